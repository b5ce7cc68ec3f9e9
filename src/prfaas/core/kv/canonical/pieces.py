"""Runs as few contiguous pieces of a row, ready for copies; checks runs that an engine announces.

One piece is one system call: neighbouring bytes of a row, and the places of a block that they go to
or come from. Where a row is laid out as the block is, a piece has one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prfaas.core.kv.canonical.copies import CopyRun

FRAGMENTS_MAX = 1 << 18
"""Fragments of one group, replicas included. Token-major heads of 64 layers, 512 tokens and 8 ranks
are as many."""


class Piece(NamedTuple):
    """Neighbouring bytes of a row."""

    row_offset: int
    """Place of the first byte in the row."""
    places: tuple[tuple[int, int], ...]
    """Offset and size of the parts of a block that lie there, in the order of the row."""


class Pieces(NamedTuple):
    """Copies of one group, in both directions."""

    reads: tuple[Piece, ...]
    """Bytes of the block, each once."""
    writes: tuple[Piece, ...]

    @property
    def is_straight(self) -> bool:
        """True if a row has the block's bytes in the block's order, without replicas."""
        return self.reads == self.writes and all(len(piece.places) == 1 for piece in self.reads)


class _Fragment(NamedTuple):
    row: int
    block: int
    size: int


def pieces(announced: Iterable[CopyRun], block_bytes: int, row_bytes: int) -> Pieces:
    """Return the copies of a group's block.

    Args:
        announced: Any that cover the block; those that cover a part of it again are replicas.

    Raises:
        ValueError: The runs are more than FRAGMENTS_MAX fragments, reach beyond the row or the
            block, leave a part of the block out, or overlap without being replicas.
    """
    runs = list(announced)
    num = sum(run.fragments for run in runs)
    if num > FRAGMENTS_MAX:
        raise ValueError(f"{num} fragments; the limit is {FRAGMENTS_MAX}")
    every = list(_fragments(runs))
    first: dict[int, _Fragment] = {}
    for each in every:
        if each.size < 1 or each.row + each.size > row_bytes:
            raise ValueError(f"bytes {each.row} to {each.row + each.size} of rows of {row_bytes}")
        if first.setdefault(each.block, each).size != each.size:
            raise ValueError(f"parts of different sizes at byte {each.block} of the block")
    end = 0
    for each in sorted(first.values(), key=lambda fragment: fragment.block):
        if each.block != end:
            raise ValueError(f"byte {min(end, each.block)} of the block is missing, or named twice")
        end += each.size
    if end != block_bytes:
        raise ValueError(f"{end} bytes are named; a block has {block_bytes}")
    reads = tuple(_joined(first.values()))
    return Pieces(reads, reads if len(first) == len(every) else tuple(_joined(every)))


def _fragments(runs: Iterable[CopyRun]) -> Iterator[_Fragment]:
    for row, block, size, num, row_stride, block_stride in runs:
        for number in range(num):
            yield _Fragment(row + number * row_stride, block + number * block_stride, size)


def _joined(fragments: Iterable[_Fragment]) -> Iterator[Piece]:
    """Join fragments that are neighbours in the row, and their places that are in the block."""
    start = end = 0
    places: list[tuple[int, int]] = []
    for row, block, size in sorted(fragments):
        if places and row < end:
            raise ValueError(f"byte {row} of the row is named twice")
        if places and row == end:
            at, length = places[-1]
            if at + length == block:
                places[-1] = at, length + size
            else:
                places.append((block, size))
        else:
            if places:
                yield Piece(start, tuple(places))
            start, places = row, [(block, size)]
        end = row + size
    if places:
        yield Piece(start, tuple(places))
