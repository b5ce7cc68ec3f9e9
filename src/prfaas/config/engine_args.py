"""Arguments of an engine that prfaas has to understand itself."""

from __future__ import annotations

from collections.abc import Iterator

PIPELINE = ("--pipeline-parallel-size", "-pp")
DATA = ("--data-parallel-size", "-dp")
SEQUENCES = ("--max-num-seqs",)


def values_of(args: list[str], names: tuple[str, ...]) -> Iterator[str]:
    """Values that an option has among arguments, in order; vLLM takes the last one.

    Args:
        args: As the engine is given them; `--name value`, `--name=value`, and underscores for
            dashes, as vLLM's own parser reads them.
        names: Of the option.
    """
    words = iter(args)
    for word in words:
        name, mark, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in names:
            yield value if mark else next(words, "")


def size_of(args: list[str], names: tuple[str, ...], default: int = 1) -> int:
    """Number that an option has; `default` where it is not given, or is no number: vLLM refuses
    that."""
    (*_, value) = (str(default), *values_of(args, names))
    return int(value) if value.isdecimal() else default


def check_parallelism(args: list[str], *, kv_events: bool) -> None:
    """See that an engine's ranks are such as prfaas can serve.

    Args:
        args: The engine's.
        kv_events: True if its KV events are subscribed to.

    Raises:
        ValueError: They are not.
    """
    stages, ranks = size_of(args, PIPELINE), size_of(args, DATA)
    if stages > 1:
        raise ValueError(pipeline_refused(stages))
    if ranks > 1 and kv_events:
        raise ValueError(data_parallel_events_refused(ranks))


def pipeline_refused(stages: int) -> str:
    """Return the reason to refuse an engine with several pipeline stages."""
    return (
        f"--pipeline-parallel-size {stages}: prfaas does not support pipeline parallelism, where "
        "each stage holds other layers of a KV block; use --tensor-parallel-size, and "
        "--pipeline-parallel-size 1"
    )


def data_parallel_events_refused(ranks: int) -> str:
    """Return the reason to refuse KV events of an engine with several data-parallel ranks."""
    return (
        f"--data-parallel-size {ranks} with KV events: each rank publishes its own, and the "
        "gateway would receive only those of rank 0 and treat its cache as the engine's; leave "
        "KV events out, or make each rank an engine: {rank} in the connector's prfaas_engine, and "
        "`ranks` in the deployment file"
    )
