"""Hashes in one object are the sequence that they would be in a list."""

import gc
from itertools import product

import pytest

from prfaas.core.kv.blocks import HASH_BYTES
from prfaas.core.kv.hashes import NO_HASHES, Hashes, joined

LIST = [bytes([number]) * HASH_BYTES for number in range(9)]
HASHES = Hashes(b"".join(LIST))
ENDS = (None, *range(-11, 12))


def test_every_part_is_that_of_a_list() -> None:
    assert (list(HASHES), len(HASHES), joined(HASHES)) == (LIST, 9, joined(LIST))
    assert [HASHES[at] for at in range(-9, 9)] == LIST * 2
    for start, stop, step in product(ENDS, ENDS, (None, 1, 2, 3, 20, -1, -2)):
        part = HASHES[start:stop:step]
        assert list(part) == LIST[start:stop:step]
    assert (LIST[3] in HASHES, HASHES.index(LIST[3]), b"" in HASHES) == (True, 3, False)


@pytest.mark.parametrize("at", [-10, 9])
def test_there_are_no_others(at: int) -> None:
    with pytest.raises(IndexError):
        HASHES[at]


def test_equal_ones_are_equal() -> None:
    assert (HASHES[2:], hash(HASHES[2:])) == (Hashes(joined(LIST[2:])), hash(HASHES[2:]))
    assert HASHES[:-1] != HASHES
    assert not NO_HASHES
    assert HASHES[:0] == NO_HASHES


def test_a_garbage_collection_has_none_of_them_to_look_at() -> None:
    many = Hashes(bytes(HASH_BYTES * 10_000))
    assert len(gc.get_referents(many)) < 3
    assert not any(map(gc.is_tracked, gc.get_referents(many.data)))
