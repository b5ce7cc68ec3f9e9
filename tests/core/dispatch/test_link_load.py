"""Signals of a link, from promises and reports that are late or missing."""

from __future__ import annotations

import pytest

from prfaas.core.dispatch.links import MEMORY_NS, LinkBook, LinkReport
from prfaas.units import NS_PER_S

STALE_NS = 3 * NS_PER_S
PLANNED = 2e9


def book(expected_bits_per_s: float = PLANNED) -> LinkBook:
    return LinkBook(STALE_NS, expected_bits_per_s)


def report(
    at_s: float, busy_s: float = 0.0, rate: float = 1e9, sent: int = 0, budget: float = 0.0
) -> LinkReport:
    return LinkReport(
        round(at_s * NS_PER_S), rate, sent, round(busy_s * NS_PER_S), budget_bits_per_s=budget
    )


def test_the_rate_is_the_plans_until_one_is_measured() -> None:
    made = book()
    assert made.latest(0).bits_per_s == PLANNED  # type: ignore[union-attr]
    made.report(report(1, rate=0))
    assert made.latest(NS_PER_S).bits_per_s == PLANNED  # type: ignore[union-attr]
    made.report(report(2, rate=0, budget=1.5e9))
    assert made.latest(2 * NS_PER_S).bits_per_s == 1.5e9  # type: ignore[union-attr]
    made.report(report(3, rate=1e9, budget=1.5e9))
    assert made.latest(3 * NS_PER_S).bits_per_s == 1e9  # type: ignore[union-attr]


def test_nothing_is_known_of_a_link_without_any_rate() -> None:
    made = book(0)
    assert made.latest(0) is None
    made.report(report(1))
    assert made.latest(NS_PER_S) is not None


def test_a_link_that_owes_nothing_stays_known_without_reports() -> None:
    made = book()
    made.report(report(1))
    seen = made.latest(3600 * NS_PER_S)
    assert seen is not None
    assert (seen.bits_per_s, seen.backlog_bytes, seen.utilisation) == (1e9, 0, 0.0)


def test_a_link_that_owes_bytes_is_unknown_when_its_reports_stop() -> None:
    made = book()
    made.report(report(1))
    made.promise(1000, 100 * NS_PER_S)
    assert made.latest(103 * NS_PER_S) is not None
    assert made.latest(103 * NS_PER_S + 1) is None
    made.report(report(102, sent=400))
    assert made.latest(105 * NS_PER_S).backlog_bytes == 600  # type: ignore[union-attr]
    assert made.latest(105 * NS_PER_S + 1) is None
    made.settle(1000)
    assert made.latest(200 * NS_PER_S).backlog_bytes == 0  # type: ignore[union-attr]


def test_what_arrived_of_earlier_transfers_is_not_taken_off_later_ones() -> None:
    made = book()
    made.promise(1000, 0)
    made.report(report(1, sent=1000))
    made.settle(1000)
    made.promise(500, NS_PER_S)
    assert made.latest(NS_PER_S).backlog_bytes == 500  # type: ignore[union-attr]


def test_utilisation_is_the_busy_share_of_the_time_between_two_reports() -> None:
    made = book()
    made.report(report(1, busy_s=0.4))
    made.report(report(2, busy_s=0.7))
    assert made.latest(2 * NS_PER_S).utilisation == pytest.approx(0.3)  # type: ignore[union-attr]


def test_reports_that_were_lost_change_no_busy_share() -> None:
    """Counters are of all time, so what a lost report would have said is in the next one."""
    all_of_them, some = book(), book()
    busy_s = 0.0
    for step in range(400):
        busy_s += 0.5 * (0.9 if step % 100 < 50 else 0.1)
        each = report(1 + 0.5 * step, busy_s)
        all_of_them.report(each)
        if step % 7 == 0 or step > 397:
            some.report(each)
    now_ns = round((1 + 0.5 * 399) * NS_PER_S)
    known = all_of_them.mean_utilisation(now_ns), some.mean_utilisation(now_ns)
    assert known[0] == pytest.approx(known[1], abs=0.02)
    assert 0.1 < known[0] < 0.5


def test_an_older_report_is_ignored() -> None:
    made = book()
    made.report(report(2, rate=1e9))
    made.report(report(1, rate=5e9))
    assert made.bits_per_s == 1e9


def test_a_pool_node_that_was_started_anew_has_no_negative_busy_time() -> None:
    made = book()
    made.report(report(1, busy_s=50))
    made.report(report(2, busy_s=50.5))
    made.report(report(3, busy_s=0.1))
    made.report(report(4, busy_s=0.2))
    assert made.latest(4 * NS_PER_S).utilisation == pytest.approx(0.1)  # type: ignore[union-attr]


def test_the_mean_utilisation_fades_while_nothing_is_promised() -> None:
    made = book()
    for second in range(200):
        made.report(report(second, busy_s=second))
    busy = made.mean_utilisation(199 * NS_PER_S)
    assert busy > 0.99
    assert made.mean_utilisation(199 * NS_PER_S + MEMORY_NS) == pytest.approx(
        busy / 2.718, rel=0.01
    )
