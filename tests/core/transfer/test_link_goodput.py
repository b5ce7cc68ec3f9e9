"""Goodput and busy time of a link, from samples of its counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.link_goodput import FILL_ROUND_TRIPS, MEMORY_NS, LinkGoodput

MS = 10**6
RTT_NS = 20 * MS
GBIT = 10**9


class Counters:
    """A link's counters, and the goodput that is read off them."""

    def __init__(self) -> None:
        self.goodput, self.now_ns, self.delivered = LinkGoodput(), 0, 0.0
        self.sample(is_busy=False)

    def sample(self, *, is_busy: bool) -> None:
        self.goodput.sample(self.now_ns, self.delivered, is_busy=is_busy, rtt_ns=RTT_NS)

    def go(
        self, ms: float, bits_per_s: float, *, is_busy: bool = True, every_ms: float = 50
    ) -> None:
        """Deliver at a rate, sampled now and then."""
        while ms > 0:
            step = min(ms, every_ms)
            self.now_ns += round(step * MS)
            self.delivered += bits_per_s / 8 * step / 1000
            self.sample(is_busy=is_busy)
            ms -= step


def filled(bits_per_s: float) -> Counters:
    """A link that has been busy for a second."""
    made = Counters()
    made.sample(is_busy=True)
    made.go(FILL_ROUND_TRIPS * RTT_NS / MS, 0)
    made.go(1000, bits_per_s)
    return made


def test_the_goodput_of_a_filled_link_is_what_it_delivers() -> None:
    assert filled(GBIT).goodput.bits_per_s == pytest.approx(GBIT)


def test_nothing_is_known_of_a_link_that_was_never_filled() -> None:
    made = Counters()
    for _ in range(20):
        made.sample(is_busy=True)
        made.go(30, GBIT)
        made.go(30, 0, is_busy=False)
    assert made.goodput.bits_per_s == 0


def test_an_idle_link_keeps_its_goodput() -> None:
    made = filled(GBIT)
    made.go(3_600_000, 0, is_busy=False, every_ms=1000)
    assert made.goodput.bits_per_s == pytest.approx(GBIT)


def test_a_link_that_becomes_slower_shows_it_within_half_a_second() -> None:
    made = filled(GBIT)
    made.go(500, GBIT / 10)
    assert made.goodput.bits_per_s == pytest.approx(GBIT / 10, rel=0.6)
    made.go(500, GBIT / 10)
    assert made.goodput.bits_per_s == pytest.approx(GBIT / 10, rel=0.05)


def test_a_busy_link_that_delivers_nothing_has_no_goodput_rather_than_an_unknown_one() -> None:
    made = filled(GBIT)
    made.go(20_000, 0)
    assert made.goodput.bits_per_s == 1


def test_short_bursts_raise_a_goodput_and_never_lower_it() -> None:
    """A link that has recovered is not taken for slow because it is never filled again."""
    made = filled(GBIT / 10)
    for _ in range(40):
        made.go(50, 0, is_busy=False)
        made.sample(is_busy=True)
        made.go(30, GBIT)
    assert made.goodput.bits_per_s == pytest.approx(GBIT, rel=0.02)
    for _ in range(40):
        made.go(50, 0, is_busy=False)
        made.sample(is_busy=True)
        made.go(30, GBIT / 10)
    assert made.goodput.bits_per_s == pytest.approx(GBIT, rel=0.02)


def test_the_first_two_round_trips_of_a_busy_time_lower_nothing() -> None:
    made = filled(GBIT)
    made.go(1000, 0, is_busy=False)
    made.sample(is_busy=True)
    made.go(FILL_ROUND_TRIPS * RTT_NS / MS, 0, every_ms=10)
    assert made.goodput.bits_per_s == pytest.approx(GBIT)
    assert made.goodput.fresh_bits_per_s == 0


def test_busy_time_is_the_time_in_which_bytes_wait() -> None:
    made = filled(GBIT)
    before_ns = made.goodput.busy_ns
    made.go(700, 0, is_busy=False)
    made.go(300, GBIT)
    assert made.goodput.busy_ns - before_ns == 300 * MS


def test_counters_that_begin_anew_are_no_rate() -> None:
    made = filled(GBIT)
    busy_ns = made.goodput.busy_ns
    made.delivered = 0
    made.now_ns += 10_000 * MS
    made.sample(is_busy=True)
    assert made.goodput.busy_ns == busy_ns
    made.go(500, GBIT)
    assert made.goodput.bits_per_s == pytest.approx(GBIT)


@given(
    pieces=st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 10 * GBIT), st.booleans()), max_size=8
    ),
    every_ms=st.sampled_from([5, 50]),
)
def test_how_often_a_link_is_sampled_changes_nothing(
    pieces: list[tuple[int, int, bool]], every_ms: int
) -> None:
    """Between samples that say the same, rates and busy time are those of one long sample."""
    once, often = filled(GBIT), filled(GBIT)
    for ms, rate, is_busy in pieces:
        for made, every in ((once, 10**9), (often, every_ms)):
            if is_busy:
                made.sample(is_busy=True)
                made.go(FILL_ROUND_TRIPS * RTT_NS / MS, 0, every_ms=every)
            made.go(ms, rate, is_busy=is_busy, every_ms=every)
    assert often.goodput.bits_per_s == pytest.approx(once.goodput.bits_per_s, rel=1e-6)
    assert often.goodput.busy_ns == once.goodput.busy_ns


def test_the_memory_is_one_of_filled_time() -> None:
    made = filled(GBIT)
    made.go(MEMORY_NS / MS, 0, every_ms=25)
    assert made.goodput.bits_per_s == pytest.approx(GBIT / 2.718, rel=0.01)


def test_a_link_that_comes_back_has_the_goodput_of_before() -> None:
    """Ten seconds without a byte, as of a cut link, then new connections that count from 0."""
    made = filled(GBIT)
    made.go(10_000, 0)
    assert made.goodput.bits_per_s == 1
    made.goodput.restart()
    assert made.goodput.bits_per_s == pytest.approx(GBIT, rel=0.01)
    made.delivered = 0.0
    made.go(50, 0, is_busy=False)
    assert made.goodput.bits_per_s == pytest.approx(GBIT, rel=0.01)
    made.go(2000, GBIT / 4)
    assert made.goodput.bits_per_s == pytest.approx(GBIT / 4, rel=0.01)


def test_a_link_that_only_became_slow_keeps_its_rate_when_it_is_connected_anew() -> None:
    made = filled(GBIT)
    made.go(2000, GBIT / 100)
    made.goodput.restart()
    assert made.goodput.bits_per_s == pytest.approx(GBIT / 100, rel=0.01)
