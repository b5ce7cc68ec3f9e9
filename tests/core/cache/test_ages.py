"""Maximum ages of blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.cache.eviction import (
    AGE_UNKNOWN,
    GRAIN_S,
    UNKNOWN_S,
    MaxAges,
    age_code,
    born_at,
    born_in,
    is_age_code,
)

NOW_S = 1_800_000_000
DAY_S = 86_400


@given(
    ages=st.lists(st.integers(0, 3650 * DAY_S), min_size=1, max_size=5),
)
def test_a_copy_of_a_copy_is_never_younger_and_hardly_older(ages: list[int]) -> None:
    """Each number is the time for which a block lies at a node before it is copied on."""
    real_s = now_s = NOW_S
    born_s = born_at(now_s)
    for age_s in ages:
        now_s += age_s
        code = age_code(born_s, now_s)
        assert 0 <= code <= AGE_UNKNOWN
        assert is_age_code(code)
        born_s = born_in(code, now_s)
        if code == AGE_UNKNOWN:
            assert born_s == UNKNOWN_S
            return
    assert born_s <= real_s
    slack_s = (len(ages) + 1) * (GRAIN_S + 0.002 * (now_s - real_s))
    assert born_s >= max(UNKNOWN_S, real_s - slack_s)


def test_a_block_is_over_at_its_limit_and_not_before() -> None:
    ages = MaxAges([{"a": 100, "": 300}])
    assert not ages.is_over("a", NOW_S, NOW_S + 99.9)
    assert ages.is_over("a", NOW_S, NOW_S + 100)
    assert not ages.is_over("b", NOW_S, NOW_S + 299)
    assert ages.is_over("b", NOW_S, NOW_S + 300)
    assert ages.is_over("", NOW_S, NOW_S + 300)


def test_a_block_of_unknown_age_is_over_any_limit_and_stays_without_one() -> None:
    assert MaxAges([{"a": 10**9}]).is_over("a", UNKNOWN_S, NOW_S)
    assert not MaxAges([{"a": 10**9}]).is_over("b", UNKNOWN_S, NOW_S)
    assert born_in(AGE_UNKNOWN, NOW_S) == UNKNOWN_S


def test_most_other_flags_are_no_age() -> None:
    valid = [code for code in range(1 << 15) if is_age_code(code)]
    assert len(valid) == 1024 + 20 * 512 + 1
    assert valid[-1] == AGE_UNKNOWN


def test_of_two_gateways_the_strictest_limit_counts() -> None:
    ages = MaxAges([{"a": 100, "": 50}, {"a": 200, "b": 10}, {"": 70}])
    assert (ages.limit_s("a"), ages.limit_s("b"), ages.limit_s("c")) == (100, 10, 50)
    assert ages.tags == {"a", "b"}
    assert not MaxAges([{}, {}])
