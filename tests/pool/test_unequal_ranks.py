"""Blocks between engines of unequal ranks: converted in the copy that is made anyway."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.canonical.parts import LayerParts, block_bytes
from prfaas.errors import PeerError
from tests.core.kv.canonical.model_kinds import Site, attention, delta_net, latent
from tests.pool.engine_rows import memory

pytestmark = pytest.mark.timeout(60)
KEY = BlockKey(0, b"k" * 32)
PREADV = os.preadv
MODELS: dict[str, list[LayerParts]] = {
    "by head": [attention(2, 16, 64, by_token=False, dtype="bfloat16")] * 4,
    "by token": [attention(2, 700, 8, by_token=True, dtype="bfloat16")] * 2,
    "latent": [latent(16, 36)] * 3,
    "delta net": [delta_net(4, 8, 8, 3)] * 2,
}


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (8, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("model", MODELS)
def test_rows_of_one_engine_are_the_rows_of_another(model: str, sizes: tuple[int, int]) -> None:
    layers, size = MODELS[model], block_bytes(MODELS[model])
    one, other = (Site(tp_size, (tuple(range(len(layers))),), 24) for tp_size in sizes)
    block = np.random.default_rng(3).integers(1, 256, size, np.uint8)
    between = bytearray(size)
    with memory(one, layers) as (source, file, row_bytes):
        os.pwrite(file, one.row(block, layers, 0x77).tobytes(), row_bytes)
        source.read(KEY, 1, memoryview(between))
    assert bytes(between) == block.tobytes()
    with memory(other, layers) as (target, file, row_bytes):
        target.write(KEY, 2, between)
        found = os.pread(file, row_bytes, 2 * row_bytes)
    assert found == other.row(block, layers, 0).tobytes()


@pytest.mark.parametrize(("tp_size", "num_calls"), [(1, 1), (2, 1), (8, 1)])
def test_a_row_is_read_in_one_pass(
    monkeypatch: pytest.MonkeyPatch, tp_size: int, num_calls: int
) -> None:
    """Every byte of a block is copied once, whatever the ranks; equal ranks need no call more."""
    layers = [attention(8, 16, 64, by_token=False, dtype="bfloat16")] * 4
    moved: list[int] = []

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = PREADV(descriptor, buffers, offset)
        moved.append(count)
        return count

    site = Site(tp_size, (tuple(range(4)),), 0)
    with memory(site, layers) as (rows, _, _), monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        rows.read(KEY, 0, memoryview(bytearray(block_bytes(layers))))
    assert (len(moved), sum(moved)) == (num_calls, block_bytes(layers))


def test_a_short_read_goes_on_in_the_middle_of_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = MODELS["by token"]
    site = Site(2, ((0, 1),), 0)
    block = np.random.default_rng(4).integers(1, 256, block_bytes(layers), np.uint8)

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        short = [buffers[0][:5]] if len(buffers) % 2 else list(buffers[:3])
        return PREADV(descriptor, short, offset)

    found = bytearray(len(block))
    with memory(site, layers) as (rows, file, row_bytes):
        os.pwrite(file, site.row(block, layers, 0).tobytes(), row_bytes)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            rows.read(KEY, 1, memoryview(found))
    assert bytes(found) == block.tobytes()


LAYERS = [latent(16, 4)]
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "runs beyond the row": ({"runs": {0: [(100, 0, 64, 1, 0, 0)]}}, "bytes 100 to 164 of rows"),
    "runs that leave bytes out": ({"runs": {0: [(0, 0, 63, 1, 0, 0)]}}, "63 bytes are named"),
    "too many fragments": ({"runs": {0: [(0, 0, 1, 2**40, 0, 0)]}}, "the limit is 262144"),
    "runs and extents": ({"extents": {0: [(0, 64)]}}, "with extents or runs of"),
    "runs of another group": ({"runs": {1: [(0, 0, 64, 1, 0, 0)]}}, "with extents or runs of"),
}


@pytest.mark.parametrize("lie", LIES)
def test_runs_that_lie_are_refused(lie: str) -> None:
    changes, words = LIES[lie]
    with pytest.raises(PeerError, match=words), memory(Site(1, ((0,),), 0), LAYERS, **changes):
        pass
