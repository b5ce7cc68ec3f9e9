"""Leaving a late remote path: when, and what it costs at most."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.resilience.late_routes import RemotePath, leaves

MS = 10**6
MBIT = 10**6
STEP_NS = 10 * MS


def leaves_at(
    path: RemotePath, local_ns: int, until_ns: int, rates: dict[int, float] | None = None
) -> int | None:
    """Return the time at which a check every ten milliseconds abandons a route; None if never."""
    rate: float | None = None
    for now in range(path.started_at_ns, until_ns, STEP_NS):
        rate = (rates or {}).get(now, rate)
        if leaves(path, now, path.to_come_ns(now, rate), local_ns):
            return now
    return None


def test_a_path_in_time_is_not_left_however_quick_the_other_is() -> None:
    assert leaves_at(RemotePath(0, 1000 * MS), local_ns=MS, until_ns=1000 * MS) is None


def test_a_path_that_does_not_end_is_left_after_as_long_as_the_other_takes() -> None:
    at = leaves_at(RemotePath(0, 1000 * MS), local_ns=2000 * MS, until_ns=10**11)
    assert at is not None
    assert abs(at - 3200 * MS) <= STEP_NS


def test_a_link_that_degrades_is_noticed_before_the_time_is_over() -> None:
    """A hundred megabytes at 1 Gbit/s; after 200 ms a hundredth of it is left."""
    path = RemotePath(0, 1000 * MS, link_bytes=100e6)
    rates = {0: 1000.0 * MBIT, 200 * MS: 10.0 * MBIT}
    at = leaves_at(path, local_ns=3000 * MS, until_ns=10**11, rates=rates)
    assert at == 200 * MS


def test_a_link_that_keeps_its_rate_is_not_left() -> None:
    path = RemotePath(0, 1000 * MS, link_bytes=100e6)
    assert leaves_at(path, MS, 1000 * MS, {0: 900.0 * MBIT}) is None


def test_a_deadline_is_a_reason_while_the_other_path_can_meet_it() -> None:
    """The link needs 1.4 s: still usual for a prediction of 1 s, but not in time."""
    with_deadline = RemotePath(0, 1000 * MS, deadline_ns=1300 * MS, link_bytes=175e6)
    assert leaves(with_deadline, 0, with_deadline.to_come_ns(0, 1000.0 * MBIT), 1290 * MS)
    without = RemotePath(0, 1000 * MS, link_bytes=175e6)
    assert not leaves(without, 0, without.to_come_ns(0, 1000.0 * MBIT), 1000 * MS)


def test_a_deadline_that_nobody_meets_leaves_the_sooner_path() -> None:
    path = RemotePath(0, 1000 * MS, deadline_ns=500 * MS)
    to_come = path.to_come_ns(0, None)
    assert not leaves(path, 0, to_come, local_ns=950 * MS)
    assert leaves(path, 0, to_come, local_ns=800 * MS)


@given(predicted=st.integers(1, 2000), local=st.integers(1, 2000), actual=st.integers(1, 10_000))
def test_leaving_costs_a_bounded_share(predicted: int, local: int, actual: int) -> None:
    """Never worse than both predictions and a bit, and than going local at once: by a factor."""
    path = RemotePath(0, predicted * MS)
    at = leaves_at(path, local * MS, actual * MS)
    took = actual * MS if at is None else at + local * MS
    late_ns = max(predicted * MS * 3 // 2, (predicted + 50) * MS)
    assert took <= max(late_ns + local * MS, (predicted + 2.1 * local) * MS) + STEP_NS
