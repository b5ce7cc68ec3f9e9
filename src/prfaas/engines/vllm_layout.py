"""KV blocks of an engine: cache groups, their place in a row, and the layout id.

Read from vLLM's own configuration objects, in the scheduler process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
    get_offloading_group_ids,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.config.engines.block_tokens import SETTING
from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout, Plane, Planes, facts_id, merged
from prfaas.core.kv.canonical.copies import CopyRun
from prfaas.core.kv.canonical.parts import LayerParts, block_bytes, block_planes
from prfaas.engines.canonical.vllm_pages import backend_of, kv_pages
from prfaas.engines.canonical.vllm_parts import CannotConvertError, KernelPages
from prfaas.engines.canonical.vllm_ranks import refuse_kinds
from prfaas.engines.canonical.vllm_rows import (
    canonical_layers,
    canonical_runs,
    data_bytes,
    extents_of,
    layer_specs,
    row_pages_of,
)
from prfaas.engines.identity.vllm_facts import BLOCKS_CANONICAL, vllm_facts
from prfaas.errors import ConfigError

log = logging.getLogger(__name__)

HASH_ALGORITHM = "sha256_cbor"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A layout, and the place of each group's bytes in a row of host memory."""

    layout: Layout
    extents: dict[int, list[tuple[int, int]]]
    """Offset and length, bytes, of the parts that carry data, by group, in the order of the block;
    empty if `runs` has them."""
    facts: dict[str, str] = field(default_factory=dict)
    """Facts of the layout id."""
    model: str = ""
    """The model for people: a name, and its commit if it has one."""
    runs: dict[int, list[CopyRun]] = field(default_factory=dict)
    """Copies between a row and a canonical block, by group, if ranks or several pages hold its
    parts."""
    tokens_per_hash: int = 0
    """Tokens of a link of the engine's own hash chain; those of `layout` differ where its blocks
    are combined."""
    num_ranks: int = 1

    @property
    def has_own_names(self) -> bool:
        """True if the engine's own hashes are not the names of shared blocks."""
        return self.tokens_per_hash != self.layout.tokens_per_hash


def describe(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kernels: Mapping[str, KernelPages] = MappingProxyType({}),
) -> RowLayout:
    """Describe an engine's blocks.

    Args:
        kernels: Kernel blocks of pages, by layer, as the ranks report them (`vllm_ranks.py`).

    Raises:
        ConfigError: The engine hashes blocks with an algorithm that is not shared between
            processes, has a cache group whose blocks cannot be named, a model whose bytes cannot
            be read, or blocks that cannot be combined to the length that is set.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        raise ConfigError(
            f"the engine hashes blocks with {algorithm!r}; "
            f"start it with --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    config = build_offloading_config(vllm_config, kv_cache_config)
    row_pages = row_pages_of(config, kv_cache_config)
    extents = extents_of(config, row_pages)
    try:
        layers, pages = canonical_layers(vllm_config, kv_cache_config, config, row_pages, kernels)
        blocks = BLOCKS_CANONICAL
    except CannotConvertError as error:
        layers, pages, blocks = {}, {}, f"of {config.parallel.world_size} ranks: {error}"
        if SETTING in config.extra_config and config.cache.blocks_per_chunk > 1:
            tokens = config.extra_config[SETTING]
            raise ConfigError(f"blocks of {tokens} tokens cannot be made: {error}") from None
    groups = tuple(
        _with_pages(
            _group(
                config, kv_cache_config, group.group_id, group.tokens_per_block, extents, layers
            ),
            layers.get(group.group_id, ()),
            layer_specs(kv_cache_config, group.group_id),
            backend_of(vllm_config),
        )
        for group in config.groups
    )
    refuse_kinds({group.kind for group in groups}, config.cache.blocks_per_chunk)
    keep_block_size(vllm_config.cache_config, groups)
    own = config.cache.tokens_per_hash
    unnamed = Layout(
        b"",
        config.extra_config.get(SETTING, own),
        resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
        groups,
    )
    facts, model = vllm_facts(
        vllm_config, kv_cache_config, unnamed, extents, blocks, layers, kernels=kernels
    )
    layout = replace(unnamed, layout_id=facts_id(facts))
    _log_layout(layout, model, blocks, config.parallel.world_size)
    num_ranks = config.parallel.world_size
    are_whole = all(len(of_layer) == 1 for of_layer in chain.from_iterable(pages.values()))
    is_straight = num_ranks == config.cache.blocks_per_chunk == 1 and are_whole
    if not layers or is_straight:
        return RowLayout(layout, extents, facts, model, tokens_per_hash=own, num_ranks=num_ranks)
    runs = {group: canonical_runs(config, parts, pages[group]) for group, parts in layers.items()}
    return RowLayout(layout, {}, facts, model, runs, own, num_ranks)


def _log_layout(layout: Layout, model: str, blocks: str, num_ranks: int) -> None:
    short = layout.layout_id.hex()[:12]
    log.info("KV layout %s: model %s, %d ranks, blocks %s", short, model, num_ranks, blocks)
    if blocks != BLOCKS_CANONICAL:
        log.warning(
            "blocks are shared only with engines of the same ranks, for they are %s", blocks
        )


def keep_block_size(cache_config: Any, groups: tuple[CacheGroup, ...]) -> None:
    """Keep the block size that the engine found for a hybrid model, also without `--block-size`.

    vLLM enlarges the block of a hybrid model in its workers, and the engine takes the size over
    before it makes the connector. Afterwards it initialises its configuration once more, which on
    CPUs sets a size that is not the user's back to 128. The scheduler would then cut prefill where
    no block of state ends, and nothing could be reused.
    """
    if any(group.kind is GroupKind.LINEAR_STATE for group in groups):
        cache_config.user_specified_block_size = True


def cut_at_blocks(cache_config: Any, groups: Sequence[CacheGroup]) -> None:
    """Have the scheduler cut prefill where shared blocks end, if there is linear state.

    vLLM stores a state where a step of prefill ends, at multiples of this size, which its scheduler
    alone reads once the engine runs. Combined blocks need states at their ends.
    """
    for group in groups:
        if group.kind is GroupKind.LINEAR_STATE:
            cache_config.block_size = group.tokens_per_block


def check_block_size(scheduled: int, groups: Sequence[CacheGroup]) -> None:
    """Refuse a scheduler that does not stop where linear state can be stored; ConfigError if no
    multiple of it ends a block of state.

    Args:
        scheduled: Block size that the scheduler cuts prefill by, tokens, while it runs; before
            that it may still change.
    """
    for group in groups:
        if group.kind is GroupKind.LINEAR_STATE and scheduled % group.tokens_per_block:
            raise ConfigError(
                f"linear state is kept every {group.tokens_per_block} tokens, but the scheduler "
                f"cuts prefill every {scheduled}; start the engine with "
                f"--block-size {group.tokens_per_block}"
            )


def _group(
    config: Any,
    kv_cache_config: KVCacheConfig,
    group_id: int,
    tokens_per_block: int,
    extents: dict[int, list[tuple[int, int]]],
    layers: Mapping[int, list[LayerParts]],
) -> CacheGroup:
    spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    kind, window = _kind(spec)
    if group_id in layers:
        num_bytes, planes = block_bytes(layers[group_id]), block_planes(layers[group_id])
    else:
        num_bytes = sum(length for _, length in extents[group_id])
        planes = _block_planes(config, kv_cache_config, group_id, num_bytes)
    return CacheGroup(
        index=group_id,
        kind=kind,
        tokens_per_block=tokens_per_block * config.cache.blocks_per_chunk,
        block_bytes=num_bytes,
        window_tokens=window,
        planes=planes,
    )


def _with_pages(
    group: CacheGroup, layers: Sequence[LayerParts], specs: Sequence[Any], backend: str
) -> CacheGroup:
    """Add the places of keys and values, if they are known."""
    repeats = len(layers) // len(specs)
    every = [spec for spec in specs for _ in range(repeats)]
    return replace(group, pages=kv_pages(every, layers, backend))


def _block_planes(
    config: Any, kv_cache_config: KVCacheConfig, group_id: int, num_bytes: int
) -> Planes:
    """Return the dtype planes of a group's blocks, in the order of its extents.

    Where a row counts as a whole, they are known only if all groups have one type.
    """
    num_copies = 1 if config.replicated_layout else config.parallel.world_size
    planes = merged(
        plane
        for _ in range(num_copies)
        for spec in layer_specs(kv_cache_config, group_id)
        for _ in range(config.cache.blocks_per_chunk)
        for plane in _spec_planes(spec)
    )
    if sum(plane.num_bytes for plane in planes) == num_bytes:
        return planes
    every = {
        plane.dtype
        for group in get_offloading_group_ids(kv_cache_config)
        for spec in layer_specs(kv_cache_config, group)
        for plane in _spec_planes(spec)
    }
    return (Plane(every.pop(), num_bytes),) if len(every) == 1 else ()


def _spec_planes(spec: Any) -> list[Plane]:
    """Return the dtype planes of a layer's page, padding left out."""
    if isinstance(spec, MambaSpec):
        return [
            Plane(_dtype_name(dtype), math.prod(shape) * dtype.itemsize)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
    return [Plane(_dtype_name(spec.dtype), data_bytes(spec))]


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(spec: Any) -> tuple[GroupKind, int]:
    if isinstance(spec, MambaSpec):
        return GroupKind.LINEAR_STATE, 0
    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.SLIDING_WINDOW, spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupKind.SLIDING_WINDOW, spec.attention_chunk_size
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL_ATTENTION, 0
    raise ConfigError(
        f"cache group of kind {type(spec).__name__}: prfaas knows full, MLA, sliding-window, "
        "chunked-local attention and linear state"
    )
