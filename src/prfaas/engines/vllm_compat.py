"""Compatibility with vLLM: the supported versions, and every name of vLLM that is not public.

vLLM calls its tiers outside its tree experimental, and its connectors change with each release. An
engine of another version, or one that lacks a name that prfaas uses, is refused at its start, with
the name. The check reads vLLM's source files and imports none, so that it can be run on the Python
tree of any version (`tests/engines/identity/test_vllm_facts.py`).

Versions differ in this (0.33 against 0.32):

- `OffloadingWorker.submit_load` may be asked to be `expedited`; the CPU worker's loads are done
  when it returns.
- A shared region may lie in several files. vLLM uses one for tiers; `region_descriptor` refuses
  more, since a pool node maps one.
- A poll thread calls tiers that set `tolerates_off_thread_polling`, under the manager's lock. Ours
  does not set it and is called by the scheduler's thread alone.
- Block hashes may cover tokens after the block for some drafting methods; with a KV connector they
  never do.
"""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.errors import ConfigError

VERSIONS = ("0.32", "0.33")
"""Minor versions of vLLM whose names were compared, and whose configuration was decided on."""


class Name(NamedTuple):
    """A name of vLLM that prfaas depends on."""

    file: str
    """Its file, below the package."""
    path: str
    """Class and attribute, class and method, or function."""
    passed: tuple[str, ...] = ()
    """Arguments that prfaas passes to it, or that vLLM passes to our override."""
    since: str = VERSIONS[0]
    """First minor version that has it."""


_OFFLOAD = "v1/kv_offload"
_CONNECTOR = "distributed/kv_transfer/kv_connector/v1"
_TIER = f"{_OFFLOAD}/tiering/base.py"
_REGION = f"{_OFFLOAD}/cpu/shared_offload_region.py"

NAMES = (
    # Attributes without a public way to read them.
    Name(f"{_OFFLOAD}/tiering/spec.py", "TieringOffloadingSpec._scheduler_mmap"),
    Name(f"{_OFFLOAD}/tiering/spec.py", "TieringOffloadingSpec._engine_id"),
    Name(f"{_OFFLOAD}/base.py", "ReqContext._offload_key_positions"),
    Name(f"{_CONNECTOR}/offloading/scheduler.py", "OffloadingConnectorScheduler._jobs"),
    Name(f"{_CONNECTOR}/offloading/scheduler.py", "OffloadingConnectorScheduler.manager"),
    Name(f"{_CONNECTOR}/offloading/scheduler.py", "OffloadingConnectorScheduler.config"),
    Name(f"{_CONNECTOR}/offloading/scheduler.py", "SchedulerOffloadConfig.kv_group_configs"),
    Name(
        f"{_CONNECTOR}/offloading/scheduler.py", "GroupOffloadConfig.sliding_window_size_in_chunks"
    ),
    Name(f"{_CONNECTOR}/offloading/scheduler.py", "GroupOffloadConfig.tokens_per_chunk"),
    Name(f"{_CONNECTOR}/offloading/scheduler.py", "GroupOffloadConfig.kv_cache_spec"),
    Name(f"{_CONNECTOR}/offloading_connector.py", "OffloadingConnector.connector_scheduler"),
    Name(f"{_CONNECTOR}/offloading_connector.py", "OffloadingConnector.connector_worker"),
    Name(f"{_CONNECTOR}/offloading/worker.py", "OffloadingConnectorWorker.worker"),
    Name(f"{_CONNECTOR}/offloading/worker.py", "OffloadingConnectorWorker.spec"),
    Name(f"{_OFFLOAD}/cpu/gpu_worker.py", "CPUOffloadingWorker._mmap_region"),
    Name(f"{_OFFLOAD}/config.py", "OffloadingConfig.engine_id"),
    Name(f"{_OFFLOAD}/config.py", "OffloadingParallelConfig.rank"),
    Name("v1/worker/gpu_model_runner.py", "GPUModelRunner.discard_request_mask"),
    Name("v1/worker/gpu_input_batch.py", "InputBatch.generators"),
    Name(f"{_OFFLOAD}/tiering/manager.py", "TieringOffloadingManager.secondary_tiers"),
    Name(_REGION, "SharedOffloadRegion.fd"),
    Name(_REGION, "SharedOffloadRegion._segments", since="0.33"),
    Name("config/cache.py", "CacheConfig.user_specified_block_size"),
    Name("config/cache.py", "CacheConfig.block_size"),
    Name("v1/core/sched/scheduler.py", "Scheduler._mamba_block_aligned_split"),
    Name(f"{_OFFLOAD}/config.py", "OffloadingCacheConfig.blocks_per_chunk"),
    Name("v1/request.py", "Request.all_token_ids"),
    Name("v1/request.py", "Request.cache_salt"),
    Name("v1/request.py", "Request.mm_features"),
    Name("v1/request.py", "Request.prompt_embeds"),
    Name("v1/request.py", "Request.resumable"),
    Name("distributed/device_communicators/shm_broadcast.py", "SpinCondition.last_read"),
    Name("distributed/device_communicators/shm_broadcast.py", "SpinCondition.busy_loop_s"),
    # Functions and classes that are called.
    Name(
        _REGION,
        "SharedOffloadRegion.__init__",
        ("engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size"),
    ),
    Name(_REGION, "SharedOffloadRegion.create_next_worker_view", ("tensor_page_size",)),
    Name(
        "distributed/device_communicators/shm_broadcast.py", "SpinCondition.wait", ("timeout_ms",)
    ),
    Name(
        f"{_CONNECTOR}/offloading/config.py",
        "build_offloading_config",
        ("vllm_config", "kv_cache_config"),
    ),
    Name(f"{_CONNECTOR}/offloading/config.py", "get_offloading_group_ids", ("kv_cache_config",)),
    Name("v1/core/kv_cache_utils.py", "resolve_none_hash_seed", ("hash_fn",)),
    Name(
        f"{_OFFLOAD}/cpu/gpu_worker.py",
        "compute_sub_block_ptrs",
        ("block_ids", "blocks_per_chunk", "output", "tensor", "skip_count"),
    ),
    Name(
        "v1/attention/backends/cpu_attn.py",
        "_get_attn_isa",
        ("dtype", "block_size", "head_size", "kv_cache_dtype"),
    ),
    Name("v1/worker/gpu_model_runner.py", "GPUModelRunner.sample_tokens", ("grammar_output",)),
    Name(
        f"{_CONNECTOR}/offloading_connector.py",
        "OffloadingConnector.register_kv_caches",
        ("kv_caches",),
    ),
    Name(f"{_OFFLOAD}/tiering/factory.py", "SecondaryTierFactory.create_secondary_tier"),
    # Methods that vLLM calls on our classes.
    Name(
        _TIER,
        "SecondaryTierManager.__init__",
        ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    ),
    Name(_TIER, "SecondaryTierManager.lookup", ("key", "req_context")),
    Name(_TIER, "SecondaryTierManager.touch", ("keys", "req_context")),
    Name(_TIER, "SecondaryTierManager.submit_store", ("job_metadata",)),
    Name(_TIER, "SecondaryTierManager.submit_load", ("job_metadata",)),
    Name(_TIER, "SecondaryTierManager.get_finished_jobs"),
    Name(_TIER, "SecondaryTierManager.has_pending_work"),
    Name(_TIER, "SecondaryTierManager.on_new_request", ("req_context",)),
    Name(_TIER, "SecondaryTierManager.on_request_finished", ("req_context",)),
    Name(_TIER, "SecondaryTierManager.on_schedule_end", ("context",)),
    Name(_TIER, "SecondaryTierManager.drain_jobs"),
    Name(_TIER, "SecondaryTierManager.shutdown"),
    Name(_TIER, "SecondaryTierManager.tolerates_off_thread_polling", since="0.33"),
    Name(f"{_OFFLOAD}/base.py", "OffloadingWorker.submit_load", ("job_id", "src_spec", "dst_spec")),
    Name(
        f"{_OFFLOAD}/base.py", "OffloadingWorker.submit_store", ("job_id", "src_spec", "dst_spec")
    ),
)
"""Names of vLLM that it promises nothing about; `vllm serve` and its arguments are public."""


# --- checks ---


def check_vllm() -> None:
    """Refuse a vLLM that prfaas does not know; ConfigError if its version is not supported, or it
    lacks a name."""
    import vllm

    check_version(vllm.__version__)
    missing = missing_names(Path(vllm.__file__).parent, minor_of(vllm.__version__))
    if missing:
        raise ConfigError(
            f"vLLM {vllm.__version__} at {Path(vllm.__file__).parent} is not as released: "
            f"{'; '.join(missing)}. prfaas depends on these names; install {_advice()} again"
        )


def check_version(version: str) -> None:
    """Refuse an unknown version; ConfigError if it is not supported.

    Args:
        version: As in `vllm.__version__`.
    """
    if minor_of(version) not in VERSIONS:
        raise ConfigError(
            f"vLLM {version} is not supported: prfaas uses names of vLLM that change between "
            f"releases, and was tested with {' and '.join(VERSIONS)}. Install {_advice()}, or a "
            f"version of prfaas that supports vLLM {minor_of(version)}"
        )


def minor_of(version: str) -> str:
    """Return the minor version, such as "0.33" of "0.33.1.dev2+cpu"."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def _advice() -> str:
    return " or ".join(f"vllm=={minor}.*" for minor in reversed(VERSIONS))


def missing_names(root: Path, minor: str) -> list[str]:
    """Return the names that a tree of vLLM lacks or has otherwise, in words.

    Args:
        root: The package's directory; nothing of it is imported.
    """
    found = []
    for file in dict.fromkeys(name.file for name in NAMES):
        names = [name for name in NAMES if name.file == file and name.since <= minor]
        try:
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError) as error:
            found.append(f"{file} cannot be read ({type(error).__name__})")
            continue
        defined = _definitions(tree)
        found += [words for name in names if (words := _difference(name, defined))]
    return found


def _difference(name: Name, defined: Mapping[str, ast.AST]) -> str | None:
    node = defined.get(name.path)
    if node is None:
        return f"{name.file} has no {name.path}"
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    known, required = arguments_of(node)
    unknown = [argument for argument in name.passed if argument not in known]
    if unknown:
        return f"{name.path} of {name.file} has no argument {', '.join(unknown)}"
    more = [argument for argument in required if argument not in name.passed]
    # Without arguments listed, that it is there is all that is asked for.
    return f"{name.path} of {name.file} needs {', '.join(more)}" if more and name.passed else None


def arguments_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], list[str]]:
    """Return all arguments of a function, and those without a default; without `self`."""
    plain = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    required = plain[: len(plain) - len(node.args.defaults)]
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        plain.append(argument.arg)
        required += [argument.arg] if default is None else []
    return [a for a in plain if a not in _OWNERS], [a for a in required if a not in _OWNERS]


_OWNERS = ("self", "cls")


def _definitions(tree: ast.Module) -> dict[str, ast.AST]:
    """Functions, and attributes and methods of classes, by their paths."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": each for name, each in _members(node)}
    return found


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, each
        elif isinstance(each, ast.FunctionDef):
            yield each.name, each
            for inner in ast.walk(each):
                if isinstance(inner, ast.Assign | ast.AnnAssign):
                    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                    yield from ((name, inner) for name in _own(targets))


def _own(targets: Sequence[ast.expr]) -> Iterator[str]:
    """Names of the attributes of `self` among the targets of an assignment."""
    for target in targets:
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            yield target.attr


def installed_tree() -> Path | None:
    """Return the directory of the vLLM that would be imported; None if there is none."""
    found = find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


# --- accessors ---


def region_descriptor(offloading_spec: Any) -> int:
    """Return the descriptor of the file with an engine's host memory; ConfigError if the memory
    lies in several files, or is another connector's."""
    region = offloading_spec._scheduler_mmap
    files = getattr(region, "_segments", ())
    if len(files) > 1:
        raise ConfigError(
            f"the engine's host memory of {region.total_size_bytes} bytes lies in {len(files)} "
            "files, and a pool node maps one; start the engine with vLLM's "
            "TieringOffloadingSpec, which makes one file"
        )
    descriptor: int = region.fd
    found = os.fstat(descriptor).st_size
    if found != region.total_size_bytes:
        raise ConfigError(
            f"the engine's host memory has {found} bytes instead of {region.total_size_bytes}: "
            "another connector of this engine made it, since vLLM names it by the engine's id; "
            "PrfaasConnector cannot be in one MultiConnector with an OffloadingConnector"
        )
    return descriptor


def worker_descriptor(connector: Any) -> int:
    """Return the descriptor of the file that this rank copies blocks to and from."""
    worker = connector.connector_worker.worker
    # That on machines without a GPU is ours.
    region = worker.region if hasattr(worker, "region") else worker._mmap_region
    descriptor: int = region.fd
    return descriptor


def engine_and_rank(connector: Any) -> tuple[str, int]:
    """Return vLLM's id of an engine, and this rank's number in it."""
    config = connector.connector_worker.spec.config
    return config.engine_id, config.parallel.rank


def engine_id(offloading_spec: Any) -> str:
    """Return vLLM's id of an engine, with the suffix of a data-parallel rank."""
    found: str = offloading_spec._engine_id
    return found


def key_positions(context: Any) -> Mapping[Any, int]:
    """Return the last token of each block of a request that vLLM has named so far, by key."""
    found: Mapping[Any, int] = context._offload_key_positions
    return found


def open_jobs(connector: Any) -> Mapping[int, Any]:
    """Return the copies between device and host memory that are not reported yet."""
    found: Mapping[int, Any] = connector.scheduler._jobs
    return found


def look_up_kept_windows(scheduler: Any) -> None:
    """Have a connector look as many blocks of a window up as prefill keeps.

    The token after a prefix is in its own window, so a window of W tokens needs W - 1 before it,
    which is what vLLM's own prefix cache keeps and finds. Its offloading looks up the blocks of W
    tokens: one more where W is a multiple of the block, and one (Cohere 2). Such prefixes would
    never be found.
    """
    config = scheduler.config
    scheduler.config = config._replace(
        kv_group_configs=tuple(_with_kept_window(group) for group in config.kv_group_configs)
    )


def _with_kept_window(group: Any) -> Any:
    spec = group.kv_cache_spec
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    looked_up = group.sliding_window_size_in_chunks
    if not window or looked_up is None:
        return group
    kept = max(window - 1 + getattr(spec, "extra_retained_tokens", 0), 1)
    num_chunks = -(-kept // group.tokens_per_chunk)
    return group._replace(sliding_window_size_in_chunks=min(looked_up, num_chunks))


def attention_isa(spec: Any, cache_dtype: str) -> str:
    """Return the instruction set that attention on this CPU packs a layer's keys for."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa: str = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache_dtype)
    return isa


def log_with_vllm() -> None:
    """Have the logs of prfaas in an engine's process go where vLLM's go.

    vLLM sets up its own logger alone, so that only warnings of others would be shown.
    """
    ours, theirs = logging.getLogger("prfaas"), logging.getLogger("vllm")
    if theirs.handlers and not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
