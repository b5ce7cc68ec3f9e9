"""Breakers: what opens them, who probes, and that nobody is shut out for ever."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.resilience.circuit_breaker import Breaker, BreakerSettings, BreakerState

MS = 10**6
SETTINGS = BreakerSettings(
    failures_max=3,
    outcomes_min=10,
    window_ns=1000 * MS,
    open_ns=100 * MS,
    open_max_ns=400 * MS,
)


def fail(breaker: Breaker, now_ns: int, times: int) -> None:
    for _ in range(times):
        breaker.failed(now_ns)


def opened(now_ns: int = 0) -> Breaker:
    breaker = Breaker(SETTINGS)
    fail(breaker, now_ns, 3)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(SETTINGS)
    fail(breaker, 0, 2)
    breaker.succeeded(0)
    fail(breaker, 0, 2)
    assert breaker.allows(0)
    breaker.failed(0)
    assert not breaker.allows(0)


def test_a_share_of_failures_opens_it_once_there_are_enough() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(4):
        breaker.failed(0)
        breaker.succeeded(0)
    breaker.failed(0)
    assert breaker.allows(0), "nine outcomes are too few"
    breaker.failed(0)
    assert not breaker.allows(0)


def test_a_new_window_forgets() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(5):
        breaker.failed(0)
        breaker.succeeded(0)
    later = 1000 * MS
    breaker.failed(later)
    breaker.succeeded(later)
    breaker.failed(later)
    assert breaker.state is BreakerState.CLOSED


def test_one_probe_at_a_time() -> None:
    breaker = opened()
    assert not breaker.allows(99 * MS)
    assert breaker.allows(100 * MS)
    breaker.began(100 * MS)
    assert not breaker.allows(150 * MS)
    breaker.succeeded(160 * MS)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows(160 * MS)


def test_each_failed_probe_doubles_the_time_up_to_a_limit() -> None:
    breaker, now, waits = opened(), 0, []
    for _ in range(4):
        began = now
        while not breaker.allows(now):
            now += MS
        waits.append((now - began) // MS)
        breaker.began(now)
        breaker.failed(now)
    assert waits == [100, 200, 400, 400]
    while not breaker.allows(now):
        now += MS
    breaker.succeeded(now)
    fail(breaker, now, 3)
    assert not breaker.allows(now + 99 * MS)
    assert breaker.allows(now + 100 * MS), "a success starts over"


def test_a_probe_that_tells_nothing_frees_its_place() -> None:
    breaker = opened()
    assert breaker.allows(100 * MS)
    breaker.began(100 * MS)
    breaker.gave_up()
    assert breaker.allows(100 * MS)


def test_late_outcomes_do_not_lengthen_an_opening() -> None:
    breaker = opened()
    fail(breaker, 50 * MS, 10)
    breaker.succeeded(60 * MS)
    assert breaker.state is BreakerState.OPEN
    assert breaker.allows(100 * MS)


@given(st.lists(st.tuples(st.sampled_from("abfsg"), st.integers(0, 300)), max_size=60))
def test_nobody_is_shut_out_for_ever(steps: list[tuple[str, int]]) -> None:
    breaker, now = Breaker(SETTINGS), 0
    for what, wait in steps:
        now += wait * MS
        match what:
            case "a":
                breaker.allows(now)
            case "b":
                breaker.began(now)
            case "f":
                breaker.failed(now)
            case "s":
                breaker.succeeded(now)
            case "g":
                breaker.gave_up()
    assert breaker.allows(now + SETTINGS.open_max_ns)
