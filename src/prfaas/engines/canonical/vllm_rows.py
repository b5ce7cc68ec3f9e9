"""Rows of vLLM's host memory: the pages of all ranks, and the copies to canonical blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, UniformTypeKVCacheSpecs

from prfaas.core.kv.canonical.copies import CopyRun, RankPages, page_bytes, row_runs
from prfaas.core.kv.canonical.parts import LayerParts
from prfaas.engines.canonical.vllm_parts import (
    BESIDE_VALUES,
    BY_DIMENSION,
    CannotConvertError,
    Division,
    KernelPages,
    layer_parts,
    pieces_apart,
)
from prfaas.engines.identity.vllm_facts import cpu_packing
from prfaas.errors import ConfigError

SETTING = "PRFAAS_BLOCKS"
"""Environment variable: `canonical`, or `ranks`, the default with several ranks."""
_VECTOR_CODE = {"vec", "vec16"}
"""vLLM's names of CPU code that keeps keys dimension by dimension."""
RowPages = Mapping[int, Sequence[tuple[int, int]]]
"""By group: offset within the row of one rank, and data bytes, of every page."""
LayerPages = Mapping[int, Sequence[Sequence[tuple[int, int]]]]
"""By group and layer: the same of the pages, or kernel blocks, that hold its part of a block."""


def row_pages_of(config: Any, kv_cache_config: KVCacheConfig) -> RowPages | None:
    """Pages of one rank in a row, by group; None if their places cannot be told.

    vLLM's worker lays the pages of a row out in the order in which its cache groups first name a
    tensor.
    """
    group_ids = get_offloading_group_ids(kv_cache_config)
    pages = _pages(kv_cache_config, group_ids)
    page_total = sum({tensor: page for _, tensor, page, _ in pages}.values())
    if config.canonical_layout or page_total != config.worker_kv_bytes_per_block:
        return None
    num_blocks = config.cache.blocks_per_chunk
    offsets: dict[int, int] = {}
    at = 0
    for _, tensor, page, _ in pages:
        if tensor not in offsets:
            offsets[tensor] = at
            at += page * num_blocks
    return {
        group: [
            (offsets[tensor] + block * page, data)
            for owner, tensor, page, data in pages
            if owner == group
            for block in range(num_blocks)
        ]
        for group in group_ids
    }


def extents_of(config: Any, row_pages: RowPages | None) -> dict[int, list[tuple[int, int]]]:
    """Parts of a row that carry data: pages without their padding, for every rank.

    Where their places cannot be told, the whole row counts as data.
    """
    per_rank = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    num_copies = 1 if config.replicated_layout else config.parallel.world_size
    if row_pages is None:
        return {group.group_id: [(0, per_rank * num_copies)] for group in config.groups}
    return {
        group: [(rank * per_rank + at, data) for rank in range(num_copies) for at, data in pages]
        for group, pages in row_pages.items()
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
        specs = layer_specs(kv_cache_config, group_id)
        for layer, spec in zip(layers, specs, strict=True):
            pages.append((group_id, tensor_of[layer], spec.page_size_bytes, data_bytes(spec)))
    return pages


def data_bytes(spec: Any) -> int:
    """Return the size of a layer's page, padding left out."""
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))


def layer_specs(kv_cache_config: KVCacheConfig, group_id: int) -> list[Any]:
    """Return the spec of every layer of a group."""
    group = kv_cache_config.kv_cache_groups[group_id]
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[layer] for layer in group.layer_names]
    return [spec] * len(group.layer_names)


def canonical_layers(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: Any,
    row_pages: RowPages | None,
    kernels: Mapping[str, KernelPages],
) -> tuple[dict[int, list[LayerParts]], LayerPages]:
    """Return the parts of all layers of a block, and the pages that hold them, by group.

    Where an attention backend splits a page so that a head's tokens are not side by side, its
    kernel blocks take the place of the page.

    Args:
        config: vLLM's configuration of offloading.
        row_pages: Pages of one rank; None if their places cannot be told.
        kernels: Kernel blocks of pages, by layer, as the ranks report them.

    Raises:
        CannotConvertError: The blocks of these ranks cannot be converted, or must not be.
        ConfigError: The setting has another value than the two that there are.
    """
    parallel = config.parallel
    if not is_wanted(parallel.world_size):
        raise CannotConvertError(f"{SETTING}=canonical is not in the environment")
    if row_pages is None:
        raise CannotConvertError("the places of pages in a row are not known")
    if parallel.world_size != parallel.tp_size:
        raise CannotConvertError(
            f"{parallel.world_size} ranks with a tensor-parallel size of {parallel.tp_size}"
        )
    if max(parallel.pcp_size, parallel.dcp_size) > 1:
        raise CannotConvertError("context parallelism divides the tokens of a block")
    division = Division(
        parallel.tp_size,
        vllm_config.model_config.get_total_num_kv_heads(),
        config.kv_cache_layout,
        _state_groups(vllm_config.model_config.hf_text_config),
        config.cache.blocks_per_chunk,
        _key_order(vllm_config, kv_cache_config),
    )
    found: dict[int, list[LayerParts]] = {}
    pages: dict[int, list[Sequence[tuple[int, int]]]] = {}
    for group, of_group in row_pages.items():
        found[group], pages[group] = [], []
        names = kv_cache_config.kv_cache_groups[group].layer_names
        specs = layer_specs(kv_cache_config, group)
        for name, spec, whole in zip(names, specs, _by_layer(config, of_group), strict=True):
            layer, every = layer_in_pages(spec, division, kernels.get(name), whole)
            found[group].append(layer)
            pages[group].append(every)
    return found, pages


def layer_in_pages(
    spec: Any, division: Division, kernel: KernelPages | None, pages: Sequence[tuple[int, int]]
) -> tuple[LayerParts, Sequence[tuple[int, int]]]:
    """Return the parts of a layer, and the pages that hold them.

    Args:
        spec: vLLM's description of the layer at one rank.
        kernel: Kernel blocks of its pages; without a report they are taken to be whole.
        pages: Offset and data bytes of the pages of a block.

    Raises:
        CannotConvertError: The layer is not known well enough, or its pages have another order or
            size.
    """
    if kernel is not None:
        order = "".join(axis for axis in division.cache_layout or "" if axis in kernel.order)
        if kernel.order != order:
            raise CannotConvertError(
                f"pages have {kernel.words}, and the cache is {division.cache_layout}"
            )
        division = replace(division, pieces=kernel.pieces)
    layer = layer_parts(spec, division)
    every = _holding(layer, _apart(pages, pieces_apart(spec, division)))
    if {page_bytes(layer, division.tp_size, len(every))} != {size for _, size in every}:
        raise CannotConvertError(
            f"{len(every)} pages of {every[0][1]} bytes are not "
            f"{', '.join(part.words for part in layer)} at {division.tp_size} ranks"
        )
    return layer, every


def _apart(pages: Sequence[tuple[int, int]], pieces: int) -> Sequence[tuple[int, int]]:
    """The kernel blocks of pages, in the order of their tokens."""
    return [
        (at + number * (size // pieces), size // pieces)
        for at, size in pages
        for number in range(pieces)
    ]


def _by_layer(config: Any, pages: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """The pages of each layer, in the order of their tokens."""
    num = config.cache.blocks_per_chunk
    for at in range(0, len(pages), num):
        yield pages[at : at + num]


def _holding(layer: LayerParts, pages: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """The pages that hold a block of a layer: of states, the last one alone."""
    return pages if all(part.is_shared_by(len(pages)) for part in layer) else pages[-1:]


def _key_order(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Order of keys in head-major pages; the name of the instruction sets where it is not known."""
    if not current_platform.is_cpu():
        return BESIDE_VALUES
    found = cpu_packing(vllm_config, kv_cache_config)
    return BY_DIMENSION if found <= _VECTOR_CODE else ", ".join(sorted(found))


def is_wanted(num_ranks: int) -> bool:
    """Return True if blocks are to be canonical; those of one rank are so in any case."""
    value = os.environ.get(SETTING, "canonical" if num_ranks == 1 else "ranks")
    if value not in ("canonical", "ranks"):
        raise ConfigError(f'{SETTING} is {value!r}; it has to be "canonical" or "ranks"')
    return value == "canonical"


def _state_groups(hf_config: Any) -> int | None:
    names = ("n_groups", "mamba_n_groups")
    return next((int(n) for name in names if (n := getattr(hf_config, name, None))), None)


def canonical_runs(
    config: Any, layers: list[LayerParts], pages: Sequence[Sequence[tuple[int, int]]]
) -> list[CopyRun]:
    """Return the copies between a row of all ranks and a block.

    Args:
        config: vLLM's configuration of offloading.
        layers: Parts of the layers of a group.
        pages: Of each layer, as `canonical_layers` returns them.
    """
    per_rank = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    tp_size = config.parallel.tp_size
    offsets = [[at for at, _ in of_layer] for of_layer in pages]
    ranks = [
        RankPages(
            rank,
            tp_size,
            {n: [rank * per_rank + at for at in every] for n, every in enumerate(offsets)},
        )
        for rank in range(1 if config.replicated_layout else tp_size)
    ]
    return row_runs(layers, ranks)
