"""Copies between a row of host memory and a canonical block.

A row holds the pages of all ranks: `RankPages` for each. `rank_runs` yields strided copies, which
serve both directions: a block is read out of a row, and written into another row that may be of
other ranks. A part of the block that several ranks hold is read from the first and written to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.core.kv.canonical.parts import LayerPart, LayerParts, Strip, layer_bytes
from prfaas.core.kv.canonical.shards import shard


class CopyRun(NamedTuple):
    """Fragments of equal size at equal distances in a row and in a block, all in bytes."""

    row_offset: int
    """Place of the first fragment in a row."""
    block_offset: int
    """Place of the first fragment in a canonical block."""
    size: int
    fragments: int = 1
    row_stride: int = 0
    """Distance of neighbours in the row."""
    block_stride: int = 0
    """Distance of neighbours in the block."""


@dataclass(frozen=True, slots=True)
class RankPages:
    """Pages of one rank within a row."""

    tp_rank: int
    """Number of the rank among those that divide the units."""
    tp_size: int
    """Number of those ranks."""
    pages: Mapping[int, Sequence[int]]
    """Offsets in the row, bytes, of the pages of each layer that this rank has, by its number in
    the group. A stage of pipeline parallelism has some of the layers. Several pages hold equal runs
    of the tokens of a block, one after the other."""


def page_bytes(layer: LayerParts, tp_size: int, num_pages: int = 1) -> int:
    """Return the size of a page of a layer in the memory of one rank, padding left out.

    Args:
        tp_size: Ranks that divide the units.
        num_pages: Pages that share the tokens of a block.
    """
    return sum(part.outer * _rank_row_bytes(part, tp_size) // num_pages for part in layer)


def row_runs(layers: Sequence[LayerParts], ranks: Sequence[RankPages]) -> list[CopyRun]:
    """Return the copies between a row and a canonical block of these layers.

    Raises:
        ValueError: A layer lies in no rank, or in pages that cannot share its tokens.
    """
    starts = [0]
    for layer in layers:
        starts.append(starts[-1] + layer_bytes(layer))
    found = set[int]()
    runs: list[CopyRun] = []
    for number, start in enumerate(starts[:-1]):
        for rank in ranks:
            if number in rank.pages:
                found.add(number)
                for page in _pages(rank.pages[number]):
                    runs += _layer_runs(layers[number], rank, page, start)
    missing = sorted(set(range(len(layers))) - found)
    if missing:
        raise ValueError(f"layers {missing[:8]} of {len(layers)} lie in no rank")
    return runs


class _Page(NamedTuple):
    """One of the pages that share the tokens of a block."""

    offset: int
    number: int
    of: int


def _pages(offsets: Sequence[int]) -> Iterator[_Page]:
    for number, offset in enumerate(offsets):
        yield _Page(offset, number, len(offsets))


def _layer_runs(
    layer: LayerParts, rank: RankPages, page: _Page, block_at: int
) -> Iterator[CopyRun]:
    for part in layer:
        if not part.is_shared_by(page.of):
            raise ValueError(f"{page.of} pages cannot share {part.words}")
        if part.by_token or page.of == 1:
            yield from _row_runs(part, rank, page, block_at)
        else:
            yield from _strip_runs(part, rank, page, block_at)
        size = part.outer * _rank_row_bytes(part, rank.tp_size) // page.of
        page = page._replace(offset=page.offset + size)
        block_at += part.num_bytes


def _row_runs(part: LayerPart, rank: RankPages, page: _Page, block_at: int) -> Iterator[CopyRun]:
    """Copies of a page that has whole rows of a part."""
    row_stride = _rank_row_bytes(part, rank.tp_size)
    block_stride = part.num_bytes // part.outer
    num_rows, row_at = part.outer // page.of, page.offset
    block_at += page.number * num_rows * block_stride
    for section in part.sections:
        first, num, slots = shard(section.units, rank.tp_rank, rank.tp_size)
        if num:
            at = block_at + first * section.unit_bytes
            size = num * section.unit_bytes
            yield CopyRun(row_at, at, size, num_rows, row_stride, block_stride)
        row_at += slots * section.unit_bytes
        block_at += section.num_bytes


def _strip_runs(part: LayerPart, rank: RankPages, page: _Page, block_at: int) -> Iterator[CopyRun]:
    """Copies of a page that has a piece of every strip of its units."""
    row_at = page.offset
    for section in part.sections:
        first, num, slots = shard(section.units, rank.tp_rank, rank.tp_size)
        unit_bytes = section.unit_bytes
        if section.strips == (Strip(1, unit_bytes),):
            # Units follow each other as strips do: one run for all.
            yield from _piece(Strip(num, unit_bytes), page, row_at, block_at + first * unit_bytes)
        else:
            for unit in range(num):
                at, of_unit = block_at + (first + unit) * unit_bytes, unit * unit_bytes // page.of
                for strip in section.strips:
                    yield from _piece(strip, page, row_at + of_unit, at)
                    at += strip.number * strip.num_bytes
                    of_unit += strip.number * strip.num_bytes // page.of
        row_at += slots * unit_bytes // page.of
        block_at += section.num_bytes


def _piece(strip: Strip, page: _Page, row_at: int, block_at: int) -> Iterator[CopyRun]:
    size = strip.num_bytes // page.of
    if strip.number:
        yield CopyRun(
            row_at, block_at + page.number * size, size, strip.number, size, strip.num_bytes
        )


def _rank_row_bytes(part: LayerPart, tp_size: int) -> int:
    """Bytes of one row of a part in the memory of one rank."""
    return sum(shard(s.units, 0, tp_size).slots * s.unit_bytes for s in part.sections)
