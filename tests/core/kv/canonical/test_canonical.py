"""Canonical blocks: rows of any ranks hold the same block, and it has the model's unique bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import Plane
from prfaas.core.kv.canonical.copies import CopyRun, RankPages, page_bytes, row_runs
from prfaas.core.kv.canonical.parts import (
    LayerPart,
    LayerParts,
    Section,
    Strip,
    block_bytes,
    block_planes,
)
from prfaas.core.kv.canonical.pieces import FRAGMENTS_MAX, Pieces, pieces
from prfaas.core.kv.canonical.shards import divides, shard
from tests.core.kv.canonical.model_kinds import (
    Site,
    attention,
    delta_net,
    latent,
    mamba2,
    read,
    turned,
    write,
)

pytestmark = pytest.mark.timeout(120)
SIZES = (1, 2, 4, 8)
HEADS = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16))
PAGES = (1, 2, 3)
PAGES_LCM = 6
"""Tokens of a block are a multiple of it."""
DTYPES = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}


@st.composite
def layers_of(draw: st.DrawFn) -> LayerParts:
    kind = draw(st.sampled_from(("kv", "turned", "latent", "gdn", "mamba2", "short")))
    small = st.integers(1, 3)
    tokens = PAGES_LCM * draw(small)
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    if kind == "kv":
        cell = 2 * draw(small) * DTYPES[dtype]
        by_token = draw(st.booleans())
        return attention(draw(HEADS), tokens, cell, by_token=by_token, dtype=dtype)
    if kind == "turned":
        return turned(draw(HEADS), tokens, draw(small), DTYPES[dtype], dtype)
    if kind == "latent":
        return latent(tokens, draw(small))
    if kind == "gdn":
        return delta_net(draw(HEADS), draw(HEADS), draw(small), draw(small))
    if kind == "mamba2":
        return mamba2(draw(HEADS), draw(st.sampled_from((1, 2, 8))), draw(small), 2, draw(small))
    return (LayerPart("conv", "bfloat16", draw(small), (Section("x", draw(HEADS) * 8, 2),)),)


@st.composite
def sites(draw: st.DrawFn, num_layers: int) -> Site:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, num_layers - 1)), max_size=2)))
    ends = [0, *(cut for cut in cuts if cut < num_layers), num_layers]
    stages = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
    padding, pages = draw(st.sampled_from((0, 5, 64))), draw(st.sampled_from(PAGES))
    return Site(draw(st.sampled_from(SIZES)), stages, padding, pages)


@given(st.data())
def test_rows_of_any_ranks_stages_and_block_sizes_convert_into_each_other(
    data: st.DataObject,
) -> None:
    """rows(TP a, PP b, pages c) -> canonical -> rows of another site -> canonical.

    All replicas are written.
    """
    layers = data.draw(st.lists(layers_of(), min_size=1, max_size=4))
    one, other = (data.draw(sites(len(layers))) for _ in range(2))
    num_bytes = block_bytes(layers)
    block = np.random.default_rng(num_bytes).integers(1, 256, num_bytes, np.uint8)

    found = read(one.row(block, layers, 0x77), one.pieces(layers), num_bytes)
    assert (found == block).all()
    empty = np.zeros_like(other.row(block, layers, 0))
    row = write(found, empty, other.pieces(layers))
    assert (row == other.row(block, layers, 0)).all()
    assert (read(row, other.pieces(layers), num_bytes) == block).all()


@pytest.mark.parametrize("other", SIZES)
@pytest.mark.parametrize("one", SIZES)
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([attention(2, 18, 64, by_token=True, dtype="bfloat16")] * 3, id="2 heads"),
        pytest.param([attention(3, 6, 24, by_token=False, dtype="bfloat16")], id="3 heads"),
        pytest.param([turned(5, 6, 4, 2, "bfloat16")] * 2, id="5 heads, K by dimension"),
        pytest.param([latent(18, 36)] * 2, id="MLA"),
        pytest.param([delta_net(4, 8, 8, 3), delta_net(4, 8, 8, 3)], id="GDN"),
        pytest.param([mamba2(8, 1, 4, 6, 3)], id="Mamba-2, one group"),
    ],
)
def test_every_pair_of_sizes_converts(layers: list[LayerParts], one: int, other: int) -> None:
    """With two pages for a block at one site, three at the other, and other stages."""
    whole = tuple(range(len(layers)))
    a, b = Site(one, (whole,), 8, 2), Site(other, tuple((n,) for n in whole), 0, 3)
    num_bytes = block_bytes(layers)
    block = np.random.default_rng(1).integers(1, 256, num_bytes, np.uint8)
    row = b.row(block, layers, 0)
    found = read(a.row(block, layers, 0x55), a.pieces(layers), num_bytes)
    assert (write(found, np.zeros_like(row), b.pieces(layers)) == row).all()


def test_replicated_heads_travel_once() -> None:
    """Qwen3-Next: 12 attention layers with 2 KV heads of 256, in blocks of 16 tokens, at TP 8."""
    layers = [attention(2, 16, 2 * 256 * 2, by_token=True, dtype="bfloat16")] * 12
    in_memory = sum(8 * page_bytes(layer, 8) for layer in layers)
    assert (in_memory, block_bytes(layers)) == (1_572_864, 393_216)
    found = Site(8, (tuple(range(12)),), 0).pieces(layers)
    assert sum(size for piece in found.reads for _, size in piece.places) == 393_216
    assert sum(size for piece in found.writes for _, size in piece.places) == 1_572_864


@pytest.mark.parametrize("by_token", [True, False])
def test_one_rank_holds_the_block_as_it_is(by_token: bool) -> None:
    """No copy more than before: one piece for the whole row, as long as pages have no padding."""
    layers = [attention(4, 8, 64, by_token=by_token, dtype="bfloat16")] * 5
    found = Site(1, (tuple(range(5)),), 0).pieces(layers)
    assert found.is_straight
    assert found.reads == ((0, ((0, block_bytes(layers)),)),)


def test_heads_that_no_rank_divides_leave_slots_empty() -> None:
    assert [shard(5, rank, 4) for rank in range(4)] == [(0, 2, 2), (2, 2, 2), (4, 1, 2), (5, 0, 2)]
    assert [shard(3, rank, 8).first for rank in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [divides(units, 8) for units in (1, 2, 3, 8, 12, 16)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]


def test_a_block_has_the_planes_of_its_parts() -> None:
    assert block_planes([delta_net(2, 4, 8, 3)]) == (
        Plane("bfloat16", 3 * (2 + 2 + 4) * 16),
        Plane("float32", 4 * 8 * 8 * 4),
    )


@pytest.mark.parametrize("by_token", [True, False])
def test_a_page_as_long_as_the_block_is_the_block(by_token: bool) -> None:
    """Engines whose page has all tokens of a block copy it straight, however others cut it."""
    layers = [attention(2, 12, 16, by_token=by_token, dtype="bfloat16")] * 2
    block = np.arange(block_bytes(layers), dtype=np.uint8)
    assert (Site(1, ((0, 1),), 0).row(block, layers, 0) == block).all()
    four = Site(1, ((0, 1),), 0, 4)
    assert four.pieces(layers).is_straight is by_token
    assert (read(four.row(block, layers, 0), four.pieces(layers), len(block)) == block).all()


def test_a_state_is_in_the_last_page_of_a_block() -> None:
    layers = [delta_net(2, 4, 8, 3)]
    ranks, row_bytes = Site(1, ((0,),), 0, 3).ranks(layers)
    assert ranks[0].pages == {0: [row_bytes - block_bytes(layers)]}


@pytest.mark.parametrize(
    ("layer", "num_pages"),
    [
        (attention(2, 10, 16, by_token=True, dtype="bfloat16"), 4),
        (attention(2, 10, 16, by_token=False, dtype="bfloat16"), 3),
        (delta_net(2, 4, 8, 3), 2),
    ],
)
def test_tokens_that_pages_cannot_share_are_refused(layer: LayerParts, num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"{num_pages} pages cannot share"):
        row_runs([layer], [RankPages(0, 1, {0: [n * 10_000 for n in range(num_pages)]})])


def test_strips_are_a_whole_unit() -> None:
    with pytest.raises(ValueError, match="strips of 12 bytes, units of 16"):
        LayerPart("kv", "bfloat16", 1, (Section("kv", 2, 16, (Strip(3, 4),)),))


def test_a_layer_without_a_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers \[1\] of 2 lie in no rank"):
        row_runs([latent(1, 4)] * 2, [RankPages(0, 1, {0: [0]})])


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([CopyRun(0, 0, 60)], "60 bytes are named; a block has 64"),
        ([CopyRun(0, 0, 32), CopyRun(40, 40, 24)], "byte 32 of the block is missing"),
        (
            [CopyRun(0, 0, 40), CopyRun(64, 32, 32)],
            "byte 32 of the block is missing, or named twice",
        ),
        ([CopyRun(0, 0, 64), CopyRun(64, 0, 32)], "parts of different sizes at byte 0"),
        ([CopyRun(100, 0, 64)], "of rows of 128"),
        ([CopyRun(0, 0, 32), CopyRun(16, 32, 32)], "byte 16 of the row is named twice"),
        ([CopyRun(0, 0, 0, 4), CopyRun(0, 0, 64)], "of rows of 128"),
        ([CopyRun(0, 0, 1, FRAGMENTS_MAX + 1)], "the limit is 262144"),
    ],
)
def test_runs_that_are_not_a_block_are_refused(runs: list[CopyRun], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pieces(runs, 64, 128)


@given(st.lists(st.builds(CopyRun, *[st.integers(0, 40)] * 6), max_size=6))
def test_runs_are_a_block_or_refused(runs: list[CopyRun]) -> None:
    """Announcements of an engine are checked: accepted runs stay in the row and in the block."""
    try:
        found: Pieces = pieces(runs, 64, 128)
    except ValueError:
        return
    places = sorted(place for piece in found.reads for place in piece.places)
    assert [at for at, _ in places] == [
        sum(size for _, size in places[:n]) for n in range(len(places))
    ]
    for at, parts in found.writes:
        assert at + sum(size for _, size in parts) <= 128
        assert all(place + size <= 64 for place, size in parts)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="the least is 1"):
        LayerPart("kv", "bfloat16", 1, (Section("kv", 0, 4),))
