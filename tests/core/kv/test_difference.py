"""Differences of blocks: rounding is small, alterations are large."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import Plane
from prfaas.core.kv.difference import RUN, SHARE, SLAB, differences
from prfaas.core.kv.difference_limits import is_altered

COUNT = 20 * RUN
PLANES = (Plane("bfloat16", 2 * COUNT), Plane("float32", 4 * COUNT))


def bfloat16(values: np.ndarray) -> bytes:
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x8000) >> 16).astype("<u2").tobytes()


def block(values: np.ndarray) -> bytes:
    return bfloat16(values) + values.astype("<f4").tobytes()


VALUES = np.random.default_rng(1).standard_normal(COUNT)
BLOCK = block(VALUES)


def found(received: bytes, computed: bytes = BLOCK) -> dict[str, float]:
    return differences(memoryview(received), memoryview(computed), PLANES)


def test_equal_blocks_have_no_difference() -> None:
    assert found(BLOCK) == {"bfloat16": 0.0, "float32": 0.0}


def test_rounding_is_no_alteration() -> None:
    noise = np.random.default_rng(2).standard_normal(COUNT) * 2e-3
    rounded = found(block(VALUES * (1 + noise)))
    assert 0 < rounded["bfloat16"] < 0.01
    assert not is_altered(rounded)


def test_a_token_that_went_to_another_expert_is_no_alteration() -> None:
    other = VALUES.copy()
    other[3 * RUN : 4 * RUN] += 0.5 * np.random.default_rng(5).standard_normal(RUN)
    differing = found(block(other))
    assert 0.2 < differing["float32"] < 0.29
    assert not is_altered(differing)


@pytest.mark.parametrize("part", [0, 7, 19])
def test_a_run_of_zeros_in_a_large_block_is_an_alteration(part: int) -> None:
    zeroed = VALUES.copy()
    zeroed[part * RUN : (part + 1) * RUN] = 0
    assert is_altered(found(block(zeroed)))


def test_blocks_of_other_content_signs_and_scale_are_alterations() -> None:
    other = np.random.default_rng(3).standard_normal(COUNT)
    for altered in (other, -VALUES, 1.4 * VALUES, np.roll(VALUES, 1), 0 * VALUES):
        assert is_altered(found(block(altered)))


def test_a_number_that_is_not_finite_is_an_alteration_unless_both_versions_have_it() -> None:
    broken = VALUES.copy()
    broken[5] = math.nan
    assert is_altered(found(block(broken)))
    assert is_altered(found(BLOCK, block(broken)))
    assert not is_altered(found(block(broken), block(broken)))


def test_bytes_of_types_without_a_limit_are_no_evidence() -> None:
    """An honest engine may round the last bit of an fp8 number otherwise."""
    planes = (Plane("float8_e4m3fn", 4),)
    for found_there in (
        differences(memoryview(b"abcd"), memoryview(b"abce"), planes),
        differences(memoryview(b"abcd"), memoryview(b"abce"), ()),
    ):
        assert set(found_there.values()) == {1.0}
        assert not is_altered(found_there)


def test_a_block_of_zeros_has_to_be_received_as_zeros() -> None:
    zeros, almost = block(0 * VALUES), block(1e-20 * VALUES)
    assert not is_altered(found(zeros, zeros))
    assert is_altered(found(almost, zeros))


@given(st.binary(min_size=6, max_size=600).filter(lambda data: len(data) % 6 == 0), st.data())
def test_any_bytes_have_a_difference_that_is_a_number(received: bytes, data: st.DataObject) -> None:
    computed = data.draw(st.binary(min_size=len(received), max_size=len(received)))
    size = len(received) // 3
    planes = (Plane("bfloat16", len(received) - 2 * size), Plane("float32", 2 * size))
    worst = differences(memoryview(received), memoryview(computed), planes)
    assert all(value >= 0 and not math.isnan(value) for value in worst.values())
    assert (received == computed) <= (not any(worst.values()))


def test_a_plane_of_many_parts_is_compared_as_one() -> None:
    """The memory of a comparison is that of one part, whatever the size of a block."""
    count = 2 * SLAB + RUN // 2
    values = np.random.default_rng(4).standard_normal(count).astype("<f4")
    other = values.copy()
    other[-3:] = 0
    planes = (Plane("float32", 4 * count),)
    a, b = memoryview(other.tobytes()), memoryview(values.tobytes())
    expected = np.linalg.norm(values[-3:].astype(float)) / np.linalg.norm(
        values[-RUN // 2 :].astype(float)
    )
    assert differences(a, b, planes)["float32"] == pytest.approx(SHARE * expected)
    tracemalloc.start()
    differences(a, b, planes)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 5 * 8 * SLAB
