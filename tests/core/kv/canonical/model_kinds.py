"""Layers of every kind as the parts of a canonical block, and rows of them cut by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prfaas.core.kv.canonical.copies import RankPages, page_bytes, row_runs
from prfaas.core.kv.canonical.parts import LayerParts, Part, Section, block_bytes
from prfaas.core.kv.canonical.pieces import Pieces, pieces

Bytes = npt.NDArray[np.uint8]


def attention(heads: int, tokens: int, cell: int, *, by_token: bool, dtype: str) -> LayerParts:
    """`cell` is K and V of one token and head, bytes."""
    outer, unit = (tokens, cell) if by_token else (1, tokens * cell)
    return (Part("kv", dtype, outer, (Section("kv", heads, unit),)),)


def latent(tokens: int, cell: int) -> LayerParts:
    return (Part("latent", "bfloat16", 1, (Section("latent", 1, tokens * cell),)),)


def delta_net(key_heads: int, value_heads: int, head: int, steps: int) -> LayerParts:
    """A gated delta net: convolution in bfloat16, state in float32."""
    sections = (
        Section("q", key_heads, head * 2),
        Section("k", key_heads, head * 2),
        Section("v", value_heads, head * 2),
    )
    state = Part("state", "float32", 1, (Section("state", value_heads, head * head * 4),))
    return (Part("conv", "bfloat16", steps, sections), state)


def mamba2(heads: int, groups: int, head: int, state: int, steps: int) -> LayerParts:
    sections = (
        Section("x", heads, head * 2),
        Section("B", groups, state * 2),
        Section("C", groups, state * 2),
    )
    states = Part("state", "float32", 1, (Section("state", heads, head * state * 4),))
    return (Part("conv", "bfloat16", steps, sections), states)


def cut(block: Bytes, layers: Sequence[LayerParts], tp_rank: int, tp_size: int) -> list[Bytes]:
    """The page of each layer at one rank, as a model cuts its tensors: by slices of arrays."""
    pages, at = [], 0
    for layer in layers:
        page = []
        for part in layer:
            rows = block[at : at + part.num_bytes].reshape(part.outer, -1)
            at += part.num_bytes
            columns, begin = [], 0
            for _, units, unit_bytes in part.sections:
                whole = rows[:, begin : begin + units * unit_bytes].reshape(part.outer, units, -1)
                begin += units * unit_bytes
                columns.append(_of_rank(whole, tp_rank, tp_size).reshape(part.outer, -1))
            page.append(np.concatenate(columns, axis=1).reshape(-1))
        pages.append(np.concatenate(page))
    return pages


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
    """

    tp_size: int
    stages: tuple[tuple[int, ...], ...]
    padding: int

    def ranks(self, layers: Sequence[LayerParts]) -> tuple[list[RankPages], int]:
        """The ranks, and the bytes of a row."""
        at, ranks = 0, []
        for stage in self.stages:
            for tp_rank in range(self.tp_size):
                pages = {}
                for number in stage:
                    pages[number] = at
                    at += page_bytes(layers[number], self.tp_size) + self.padding
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
            cuts = cut(block, layers, rank.tp_rank, rank.tp_size)
            for number, at in rank.pages.items():
                row[at : at + len(cuts[number])] = cuts[number]
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
