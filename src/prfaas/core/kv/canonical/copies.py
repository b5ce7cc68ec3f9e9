"""Copies between a row of host memory and a canonical block.

A row holds the pages of all ranks: `RankPages` for each. `rank_runs` yields strided copies, which
serve both directions: a block is read out of a row, and written into another row that may be of
other ranks. A part of the block that several ranks hold is read from the first and written to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.core.kv.canonical.parts import LayerParts, Part, layer_bytes
from prfaas.core.kv.canonical.shards import shard


class Run(NamedTuple):
    """Fragments of equal size at equal distances in a row and in a block, all in bytes.

    Attributes:
        row_offset: Place of the first fragment in a row.
        block_offset: Place of the first fragment in a canonical block.
        size: Size of a fragment.
        fragments: Number of fragments.
        row_stride: Distance of neighbours in the row.
        block_stride: Distance of neighbours in the block.
    """

    row_offset: int
    block_offset: int
    size: int
    fragments: int = 1
    row_stride: int = 0
    block_stride: int = 0


@dataclass(frozen=True, slots=True)
class RankPages:
    """Pages of one rank within a row.

    Attributes:
        tp_rank: Number of the rank among those that divide the units.
        tp_size: Number of those ranks.
        pages: Offset in the row, bytes, of each layer that this rank has, by its number in the
            group. A stage of pipeline parallelism has some of the layers.
    """

    tp_rank: int
    tp_size: int
    pages: Mapping[int, int]


def page_bytes(layer: LayerParts, tp_size: int) -> int:
    """Return the size of a layer in the memory of one rank, padding of the page left out."""
    return sum(part.outer * _rank_row_bytes(part, tp_size) for part in layer)


def row_runs(layers: Sequence[LayerParts], ranks: Sequence[RankPages]) -> list[Run]:
    """Return the copies between a row and a canonical block of these layers.

    Raises:
        ValueError: A layer lies in no rank.
    """
    starts = [0]
    for layer in layers:
        starts.append(starts[-1] + layer_bytes(layer))
    found = set[int]()
    runs: list[Run] = []
    for number, start in enumerate(starts[:-1]):
        for rank in ranks:
            if number in rank.pages:
                found.add(number)
                runs += _layer_runs(layers[number], rank, rank.pages[number], start)
    missing = sorted(set(range(len(layers))) - found)
    if missing:
        raise ValueError(f"layers {missing[:8]} of {len(layers)} lie in no rank")
    return runs


def _layer_runs(layer: LayerParts, rank: RankPages, row_at: int, block_at: int) -> Iterator[Run]:
    for part in layer:
        yield from _part_runs(part, rank, row_at, block_at)
        row_at += part.outer * _rank_row_bytes(part, rank.tp_size)
        block_at += part.num_bytes


def _part_runs(part: Part, rank: RankPages, row_at: int, block_at: int) -> Iterator[Run]:
    row_stride = _rank_row_bytes(part, rank.tp_size)
    block_stride = part.num_bytes // part.outer
    for section in part.sections:
        first, num, slots = shard(section.units, rank.tp_rank, rank.tp_size)
        if num:
            at = block_at + first * section.unit_bytes
            size = num * section.unit_bytes
            yield Run(row_at, at, size, part.outer, row_stride, block_stride)
        row_at += slots * section.unit_bytes
        block_at += section.num_bytes


def _rank_row_bytes(part: Part, tp_size: int) -> int:
    """Bytes of one row of a part in the memory of one rank."""
    return sum(shard(s.units, 0, tp_size).slots * s.unit_bytes for s in part.sections)
