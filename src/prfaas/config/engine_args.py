"""Arguments of an engine that prfaas has to understand itself."""

from __future__ import annotations

from collections.abc import Iterator

PIPELINE = ("--pipeline-parallel-size", "-pp")
DATA = ("--data-parallel-size", "-dp")
NODES = ("--nnodes", "-n")
NODE = ("--node-rank", "-r")
EXECUTOR = ("--distributed-executor-backend",)
EXECUTORS = ("mp", "uni")
"""vLLM's executors whose ranks are on the host of their scheduler."""
_LOCAL = ("--data-parallel-size-local", "-dpl")
_OWN_URLS = ("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe")
"""Settings of data-parallel ranks that are engines of their own, each with a URL."""
_BACKEND = ("--data-parallel-backend", "-dpb")
_OF_HOSTS = ("--data-parallel-hybrid-lb", "-dph", "--headless")
"""Switches of data-parallel ranks that are on several hosts behind one URL."""
SEQUENCES = ("--max-num-seqs",)


def values_of(args: list[str], names: tuple[str, ...]) -> Iterator[str]:
    """Values that an option has among arguments, in order; vLLM takes the last one.

    Args:
        args: As the engine is given them; `--name value`, `--name=value`, and underscores for
            dashes, as vLLM's own parser reads them.
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
    """See that an engine's ranks are such as prfaas can serve; ValueError if they are not.

    Args:
        kv_events: True if its KV events are subscribed to.
    """
    stages, ranks = size_of(args, PIPELINE), size_of(args, DATA)
    if stages > 1:
        raise ValueError(pipeline_refused(stages))
    for setting in _settings_of_hosts(args, ranks):
        raise ValueError(hosts_refused(setting))
    if ranks > 1 and kv_events:
        raise ValueError(data_parallel_events_refused(ranks))


def _settings_of_hosts(args: list[str], ranks: int) -> Iterator[str]:
    """Settings by which an engine has ranks on several hosts, or may have them."""
    if (nodes := size_of(args, NODES)) > 1:
        yield f"{NODES[0]} {nodes}"
    if (node := size_of(args, NODE, 0)) > 0:
        yield f"{NODE[0]} {node}"
    for executor in list(values_of(args, EXECUTOR))[-1:]:
        if executor not in EXECUTORS:
            yield f"{EXECUTOR[0]} {executor}"
    has_own_url = any(True for _ in values_of(args, _OWN_URLS))
    if not has_own_url and (local := size_of(args, _LOCAL, ranks)) < ranks:
        yield f"{_LOCAL[0]} {local} of {DATA[0]} {ranks}"
    if "ray" in list(values_of(args, _BACKEND))[-1:]:
        yield f"{_BACKEND[0]} ray"
    yield from (name for name in _OF_HOSTS if any(True for _ in values_of(args, (name,))))


def hosts_refused(setting: str) -> str:
    """Return the reason to refuse an engine whose ranks are not known to be on one host."""
    return (
        f"{setting}: the ranks of an engine have to be on one host. Its KV blocks go through that "
        "host's shared memory, which the pool node maps; the part of a block that another host "
        "holds would be missing from it. Run all ranks of an engine on one host "
        f"(--tensor-parallel-size, {EXECUTOR[0]} {EXECUTORS[0]}), and an engine of its own on each "
        "host"
    )


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
