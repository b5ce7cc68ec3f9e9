"""Layers of every kind as the parts of a canonical block, and rows of them cut by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prfaas.core.kv.canonical.copies import RankPages, page_bytes, row_runs
from prfaas.core.kv.canonical.parts import LayerPart, LayerParts, Section, Strip, block_bytes
from prfaas.core.kv.canonical.pieces import Pieces, pieces

Bytes = npt.NDArray[np.uint8]


def attention(heads: int, tokens: int, cell: int, *, by_token: bool, dtype: str) -> LayerParts:
    """`cell` is K and V of one token and head, bytes."""
    if by_token:
        return (LayerPart("kv", dtype, tokens, (Section("kv", heads, cell),), by_token=True),)
    unit = tokens * cell
    return (LayerPart("kv", dtype, 1, (Section("kv", heads, unit, (Strip(1, unit),)),)),)


def turned(heads: int, tokens: int, head: int, width: int, dtype: str) -> LayerParts:
    """Attention as on CPUs: K dimension by dimension, then V token by token."""
    strips = (Strip(head, tokens * width), Strip(1, tokens * head * width))
    unit = 2 * tokens * head * width
    return (LayerPart("kv", dtype, 1, (Section("kv", heads, unit, strips),)),)


def latent(tokens: int, cell: int) -> LayerParts:
    unit = tokens * cell
    return (LayerPart("latent", "bfloat16", 1, (Section("latent", 1, unit, (Strip(1, unit),)),)),)


def delta_net(key_heads: int, value_heads: int, head: int, steps: int) -> LayerParts:
    """A gated delta net: convolution in bfloat16, state in float32."""
    sections = (
        Section("q", key_heads, head * 2),
        Section("k", key_heads, head * 2),
        Section("v", value_heads, head * 2),
    )
    state = LayerPart("state", "float32", 1, (Section("state", value_heads, head * head * 4),))
    return (LayerPart("conv", "bfloat16", steps, sections), state)


def mamba2(heads: int, groups: int, head: int, state: int, steps: int) -> LayerParts:
    sections = (
        Section("x", heads, head * 2),
        Section("B", groups, state * 2),
        Section("C", groups, state * 2),
    )
    states = LayerPart("state", "float32", 1, (Section("state", heads, head * state * 4),))
    return (LayerPart("conv", "bfloat16", steps, sections), states)


def cut(
    block: Bytes, layers: Sequence[LayerParts], tp_rank: int, tp_size: int, num_pages: int = 1
) -> list[list[Bytes]]:
    """The pages of each layer at one rank, as a model cuts its tensors: by slices of arrays."""
    pages, at = [], 0
    for layer in layers:
        parts = []
        for part in layer:
            rows = block[at : at + part.num_bytes].reshape(part.outer, -1)
            at += part.num_bytes
            columns, begin = [], 0
            for section in part.sections:
                units, unit_bytes = section.units, section.unit_bytes
                whole = rows[:, begin : begin + units * unit_bytes].reshape(part.outer, units, -1)
                begin += units * unit_bytes
                columns.append(_of_rank(whole, tp_rank, tp_size))
            parts.append(_of_pages(part, columns, num_pages))
        num = num_pages if all(part.is_shared_by(num_pages) for part in layer) else 1
        pages.append([np.concatenate([part[page] for part in parts]) for page in range(num)])
    return pages


def _of_pages(part: LayerPart, columns: list[Bytes], num_pages: int) -> list[Bytes]:
    """A part's columns of one rank, for each page: rows x units x bytes of a unit."""
    if part.by_token or not part.is_shared_by(num_pages) or num_pages == 1:
        rows = np.concatenate([each.reshape(part.outer, -1) for each in columns], axis=1)
        num = num_pages if part.is_shared_by(num_pages) else 1
        return [each.reshape(-1) for each in np.split(rows, num)]
    pages: list[list[Bytes]] = [[] for _ in range(num_pages)]
    for section, column in zip(part.sections, columns, strict=True):
        for unit in column[0]:
            at = 0
            for count, size in section.strips:
                strips = unit[at : at + count * size].reshape(count, num_pages, -1)
                at += count * size
                for page in range(num_pages):
                    pages[page].append(strips[:, page].reshape(-1))
    return [np.concatenate(page) for page in pages]


def _of_rank(whole: Bytes, tp_rank: int, tp_size: int) -> Bytes:
    """Units of one rank: a run of them, zeros where there are none left, or the one it shares."""
    units = whole.shape[1]
    if units < tp_size:
        owner = [rank * units // tp_size for rank in range(tp_size)][tp_rank]
        return whole[:, owner : owner + 1]
    slots = (units + tp_size - 1) // tp_size
    padded = np.zeros((whole.shape[0], slots * tp_size, whole.shape[2]), np.uint8)
    padded[:, :units] = whole
    return padded[:, tp_rank * slots : (tp_rank + 1) * slots]


@dataclass(frozen=True)
class Site:
    """Storage of blocks at one site: ranks, stages, and padding of its pages.

    Attributes:
        tp_size: Ranks that divide the heads.
        stages: Layers of each stage of pipeline parallelism.
        padding: Bytes behind every page.
        num_pages: Pages that share the tokens of a block; a state is in the last one.
    """

    tp_size: int
    stages: tuple[tuple[int, ...], ...]
    padding: int
    num_pages: int = 1

    def ranks(self, layers: Sequence[LayerParts]) -> tuple[list[RankPages], int]:
        """The ranks, and the bytes of a row."""
        at, ranks = 0, []
        for stage in self.stages:
            for tp_rank in range(self.tp_size):
                pages = {}
                for number in stage:
                    is_shared = all(part.is_shared_by(self.num_pages) for part in layers[number])
                    num = self.num_pages if is_shared else 1
                    size = page_bytes(layers[number], self.tp_size, num) + self.padding
                    every = [at + page * size for page in range(self.num_pages)]
                    pages[number] = every[-num:]
                    at += self.num_pages * size
                ranks.append(RankPages(tp_rank, self.tp_size, pages))
        return ranks, max(at, 1)

    def pieces(self, layers: Sequence[LayerParts]) -> Pieces:
        ranks, row_bytes = self.ranks(layers)
        return pieces(row_runs(layers, ranks), block_bytes(layers), row_bytes)

    def row(self, block: Bytes, layers: Sequence[LayerParts], filler: int) -> Bytes:
        """A row as the ranks of this site would write it."""
        ranks, row_bytes = self.ranks(layers)
        row = np.full(row_bytes, filler, np.uint8)
        for rank in ranks:
            cuts = cut(block, layers, rank.tp_rank, rank.tp_size, self.num_pages)
            for number, every in rank.pages.items():
                for at, page in zip(every, cuts[number], strict=True):
                    row[at : at + len(page)] = page
        return row


def read(row: Bytes, found: Pieces, num_bytes: int) -> Bytes:
    """A block out of a row."""
    block = np.full(num_bytes, 0xEE, np.uint8)
    for start, places in found.reads:
        at = start
        for place, size in places:
            block[place : place + size] = row[at : at + size]
            at += size
    return block


def write(block: Bytes, row: Bytes, found: Pieces) -> Bytes:
    """A row with a block written into it."""
    row = row.copy()
    for start, places in found.writes:
        at = start
        for place, size in places:
            row[at : at + size] = block[place : place + size]
            at += size
    return row
