"""The predicted wait for decode: none without a queue, and by whoever is ahead with one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch.stages import DecodeFlow
from prfaas.units import NS_PER_S

S = NS_PER_S


def full(num_places: int = 4, took_s: int = 8) -> tuple[DecodeFlow, int]:
    """A flow whose places are taken one a second, after a round of requests that took `took_s`."""
    flow, now = DecodeFlow(60 * S), 0
    for number in range(num_places):
        flow.expect(number)
        flow.landed(number, 0)
        flow.begun(number, 0)
    for number in range(num_places):
        now = (took_s + number) * S
        flow.end(number, took_s * S)
        flow.expect(100 + number)
        flow.landed(100 + number, now - 3 * S)
        flow.begun(100 + number, now)
    return flow, now


def test_decode_without_a_queue_adds_nothing() -> None:
    flow = DecodeFlow(60 * S)
    for number in range(10):
        flow.expect(number)
        flow.landed(number, 0)
        flow.begun(number, 0)
    assert flow.wait(S).after(0) == 0


def test_the_next_request_takes_the_place_that_falls_free_first() -> None:
    flow, now = full()
    # The places were taken at 8, 9, 10 and 11 s, each for 8 s.
    assert now == 11 * S
    assert flow.wait(now).after(0) == 5 * S
    assert flow.wait(now).after(2 * S) == 3 * S
    assert flow.wait(now).after(6 * S) == 0


def test_those_on_their_way_are_ahead_although_they_have_not_landed() -> None:
    flow, now = full()
    flow.expect(200)
    flow.expect(201)
    assert flow.wait(now).after(0) == 7 * S


def test_a_place_that_is_free_is_taken_at_once() -> None:
    flow, now = full()
    flow.end(100, now)
    assert flow.wait(now).after(0) == 0
    flow.expect(200)
    assert flow.wait(now).after(0) > 0


def test_a_delay_that_only_looks_like_a_queue_stays_a_short_one() -> None:
    flow = DecodeFlow(60 * S)
    for number in range(2):
        flow.expect(number)
        flow.landed(number, 30 * S * number)
        flow.begun(number, 30 * S * number + S // 4)
        flow.end(number, 30 * S * number + 29 * S)
    flow.expect(2)
    flow.landed(2, 60 * S)
    flow.begun(2, 60 * S + S // 4)
    for number in range(3, 9):
        flow.expect(number)
    assert flow.wait(61 * S).after(0) <= 3 * S // 4


def test_a_queue_of_long_ago_says_nothing() -> None:
    flow, now = full()
    assert flow.wait(now + 61 * S).after(0) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["expect", "landed", "begun", "end"]),
            st.integers(0, 5),
            st.integers(0, 2 * S),
        ),
        max_size=80,
    )
)
def test_nothing_is_held_once_all_has_ended(steps: list[tuple[str, int, int]]) -> None:
    flow, now = DecodeFlow(60 * S), 0
    for kind, number, after in steps:
        now += after
        match kind:
            case "expect":
                flow.expect(number)
            case "landed":
                flow.landed(number, now)
            case "begun":
                flow.begun(number, now)
            case "end":
                flow.end(number, now)
        assert flow.wait(now).after(after) >= 0
    for number in range(6):
        flow.end(number, now)
    assert flow.num_held == 0


@pytest.mark.parametrize("ahead", [0, 5])
def test_places_fall_free_at_an_even_pace_where_times_differ_much(ahead: int) -> None:
    flow, now = DecodeFlow(10**6 * S), 0
    for number in range(2000):
        # One in ten takes 100 s, the others hardly any time: the mean is about 10 s.
        flow.expect(number)
        flow.landed(number, now)
        flow.begun(number, now)
        now += 100 * S if number % 10 == 0 else S // 100
        flow.end(number, now)
    for number in range(4):
        flow.expect(3000 + number)
        flow.landed(3000 + number, now - 200 * S)
        flow.begun(3000 + number, now)
    for number in range(ahead):
        flow.expect(4000 + number)
    assert flow.wait(now).after(0) == pytest.approx((ahead + 1) * 10 * S / 4, rel=0.5)
