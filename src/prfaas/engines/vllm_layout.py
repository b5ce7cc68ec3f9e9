"""What an engine's KV blocks are: cache groups, where they lie in a row, and the layout id.

Read from vLLM's own configuration objects, in the scheduler process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3
import msgspec
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

from prfaas.core.blocks import CacheGroup, GroupKind, Layout
from prfaas.errors import ConfigError

WHOLE_FILE_BYTES_MAX = 1 << 30
SAMPLE_BYTES = 1 << 20
NUM_SAMPLES = 16
HASH_ALGORITHM = "sha256_cbor"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A layout, and where each group's bytes lie in a row of host memory.

    Attributes:
        layout: The layout.
        extents: Offset and length, bytes, of the parts that carry data, by group.
    """

    layout: Layout
    extents: dict[int, list[tuple[int, int]]]


def describe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> RowLayout:
    """Describe an engine's blocks.

    Raises:
        ConfigError: The engine hashes blocks with an algorithm that is not shared between
            processes, or has a cache group whose blocks can not be named.
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
    _check_block_size(vllm_config.cache_config.block_size, groups)
    unnamed = Layout(
        b"",
        config.cache.tokens_per_hash,
        resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
        groups,
    )
    layout_id = _layout_id(vllm_config, unnamed, extents)
    return RowLayout(replace(unnamed, layout_id=layout_id), extents)


def _check_block_size(scheduled: int, groups: tuple[CacheGroup, ...]) -> None:
    """Refuse a scheduler that would not stop where linear state can be stored.

    vLLM enlarges the block of a hybrid model in its workers; a scheduler that was not told cuts
    prefill at multiples of the default, where no block of state ends, and nothing is reusable.
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
    return CacheGroup(
        index=group_id,
        kind=kind,
        tokens_per_block=tokens_per_block * config.cache.blocks_per_chunk,
        block_bytes=sum(length for _, length in extents[group_id]),
        window_tokens=window,
    )


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
    tensor. Where that order can not be told from here, the whole row counts as data.
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
        group = kv_cache_config.kv_cache_groups[group_id]
        for layer in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[layer]
            pages.append((group_id, tensor_of[layer], spec.page_size_bytes, _data_bytes(spec)))
    return pages


def _data_bytes(spec: Any) -> int:
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))


def _layout_id(
    vllm_config: VllmConfig, layout: Layout, extents: dict[int, list[tuple[int, int]]]
) -> bytes:
    """Digest of everything that must agree for block bytes to mean the same."""
    model = vllm_config.model_config
    facts = {
        "version": 1,
        "model": model_digest(model.model, model.revision),
        "dtype": str(model.dtype),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "tokens_per_hash": layout.tokens_per_hash,
        "hash": [HASH_ALGORITHM, layout.hash_seed],
        "groups": [
            [group.index, group.kind, group.tokens_per_block, group.window_tokens]
            for group in layout.groups
        ],
        "extents": sorted(extents.items()),
    }
    return blake3.blake3(msgspec.json.encode(facts)).digest()


def model_digest(model: str, revision: str | None) -> str:
    """Digest of a checkpoint: weights, configuration, tokenizer and chat template.

    Small files are read whole; of a weight file over 1 GiB, its size and sixteen samples of 1 MiB,
    the first and the last one among them. A name that is no directory counts as itself.
    """
    directory = Path(model)
    if not directory.is_dir():
        return blake3.blake3(f"{model}@{revision}".encode()).hexdigest()
    hasher = blake3.blake3()
    for path in sorted(directory.iterdir()):
        if path.suffix in {".safetensors", ".json", ".jinja", ".model", ".txt", ".bin"}:
            hasher.update(f"{path.name}:{path.stat().st_size}:".encode())
            _hash_file(hasher, path)
    return hasher.hexdigest()


def _hash_file(hasher: Any, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES_MAX:
            hasher.update(file.read())
            return
        for sample in range(NUM_SAMPLES):
            file.seek((size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
            hasher.update(file.read(SAMPLE_BYTES))
