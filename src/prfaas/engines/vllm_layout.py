"""KV blocks of an engine: cache groups, their place in a row, and the layout id.

Read from vLLM's own configuration objects, in the scheduler process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.layout_facts import facts_id
from prfaas.core.kv.planes import Plane, Planes, merged
from prfaas.engines.identity.vllm_facts import vllm_facts
from prfaas.errors import ConfigError

log = logging.getLogger(__name__)

HASH_ALGORITHM = "sha256_cbor"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A layout, and the place of each group's bytes in a row of host memory.

    Attributes:
        layout: The layout.
        extents: Offset and length, bytes, of the parts that carry data, by group.
        facts: Facts of the layout id.
        model: The model for people: a name, and its commit if it has one.
    """

    layout: Layout
    extents: dict[int, list[tuple[int, int]]]
    facts: dict[str, str] = field(default_factory=dict)
    model: str = ""


def describe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> RowLayout:
    """Describe an engine's blocks.

    Raises:
        ConfigError: The engine hashes blocks with an algorithm that is not shared between
            processes, has a cache group whose blocks cannot be named, or a model whose bytes
            cannot be read.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        raise ConfigError(
            f"the engine hashes blocks with {algorithm!r}; "
            f"start it with --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    config = build_offloading_config(vllm_config, kv_cache_config)
    extents = _extents(config, kv_cache_config)
    groups = tuple(
        _group(config, kv_cache_config, group.group_id, group.tokens_per_block, extents)
        for group in config.groups
    )
    keep_block_size(vllm_config.cache_config, groups)
    unnamed = Layout(
        b"",
        config.cache.tokens_per_hash,
        resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
        groups,
    )
    facts, model = vllm_facts(vllm_config, kv_cache_config, unnamed, extents)
    layout = replace(unnamed, layout_id=facts_id(facts))
    log.info("KV layout %s: model %s, %d facts", layout.layout_id.hex()[:12], model, len(facts))
    return RowLayout(layout, extents, facts, model)


def keep_block_size(cache_config: Any, groups: tuple[CacheGroup, ...]) -> None:
    """Keep the block size that the engine found for a hybrid model, also without `--block-size`.

    vLLM enlarges the block of a hybrid model in its workers, and the engine takes the size over
    before it makes the connector. Afterwards it initialises its configuration once more, which on
    CPUs sets a size that is not the user's back to 128. The scheduler would then cut prefill where
    no block of state ends, and nothing could be reused.
    """
    if any(group.kind is GroupKind.LINEAR_STATE for group in groups):
        cache_config.user_specified_block_size = True


def check_block_size(scheduled: int, groups: Sequence[CacheGroup]) -> None:
    """Refuse a scheduler that does not stop where linear state can be stored.

    Args:
        scheduled: Block size that the scheduler cuts prefill by, tokens, while it runs; before
            that it may still change.
        groups: Cache groups.

    Raises:
        ConfigError: No multiple of it ends a block of state.
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
) -> CacheGroup:
    spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    kind, window = _kind(spec)
    block_bytes = sum(length for _, length in extents[group_id])
    return CacheGroup(
        index=group_id,
        kind=kind,
        tokens_per_block=tokens_per_block * config.cache.blocks_per_chunk,
        block_bytes=block_bytes,
        window_tokens=window,
        planes=_block_planes(config, kv_cache_config, group_id, block_bytes),
    )


def _block_planes(
    config: Any, kv_cache_config: KVCacheConfig, group_id: int, block_bytes: int
) -> Planes:
    """Return the dtype planes of a group's blocks, in the order of its extents.

    Where a row counts as a whole, they are known only if all groups have one type.
    """
    num_copies = 1 if config.replicated_layout else config.parallel.world_size
    planes = merged(
        plane
        for _ in range(num_copies)
        for spec in _layer_specs(kv_cache_config, group_id)
        for _ in range(config.cache.blocks_per_chunk)
        for plane in _spec_planes(spec)
    )
    if sum(plane.num_bytes for plane in planes) == block_bytes:
        return planes
    every = {
        plane.dtype
        for group in get_offloading_group_ids(kv_cache_config)
        for spec in _layer_specs(kv_cache_config, group)
        for plane in _spec_planes(spec)
    }
    return (Plane(every.pop(), block_bytes),) if len(every) == 1 else ()


def _layer_specs(kv_cache_config: KVCacheConfig, group_id: int) -> list[Any]:
    """Return the spec of every layer of a group."""
    group = kv_cache_config.kv_cache_groups[group_id]
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[layer] for layer in group.layer_names]
    return [spec] * len(group.layer_names)


def _spec_planes(spec: Any) -> list[Plane]:
    """Return the dtype planes of a layer's page, padding left out."""
    if isinstance(spec, MambaSpec):
        return [
            Plane(_dtype_name(dtype), math.prod(shape) * dtype.itemsize)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
    return [Plane(_dtype_name(spec.dtype), _data_bytes(spec))]


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


def _extents(config: Any, kv_cache_config: KVCacheConfig) -> dict[int, list[tuple[int, int]]]:
    """Parts of a row that carry data: pages without their padding, for every rank.

    vLLM's worker lays the pages of a row out in the order in which its cache groups first name a
    tensor. Where that order cannot be told from here, the whole row counts as data.
    """
    per_rank = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    group_ids = get_offloading_group_ids(kv_cache_config)
    pages = _pages(kv_cache_config, group_ids)
    page_total = sum({tensor: page for _, tensor, page, _ in pages}.values())
    num_copies = 1 if config.replicated_layout else config.parallel.world_size
    if config.canonical_layout or page_total != config.worker_kv_bytes_per_block:
        return {group: [(0, per_rank * num_copies)] for group in group_ids}
    offsets: dict[int, int] = {}
    at = 0
    for _, tensor, page, _ in pages:
        if tensor not in offsets:
            offsets[tensor] = at
            at += page * config.cache.blocks_per_chunk
    return {
        group: [
            (rank * per_rank + offsets[tensor] + block * page, data)
            for rank in range(num_copies)
            for owner, tensor, page, data in pages
            if owner == group
            for block in range(config.cache.blocks_per_chunk)
        ]
        for group in group_ids
    }


def _pages(
    kv_cache_config: KVCacheConfig, group_ids: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """Group, address, page bytes and data bytes of every layer, in the worker's order.

    Layers of different groups at the same address share a tensor.
    """
    tensor_of = {
        layer: tensor.offset + number * tensor.layer_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }
    pages: list[tuple[int, int, int, int]] = []
    for group_id in group_ids:
        layers = kv_cache_config.kv_cache_groups[group_id].layer_names
        specs = _layer_specs(kv_cache_config, group_id)
        for layer, spec in zip(layers, specs, strict=True):
            pages.append((group_id, tensor_of[layer], spec.page_size_bytes, _data_bytes(spec)))
    return pages


def _data_bytes(spec: Any) -> int:
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))
