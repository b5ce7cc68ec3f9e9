"""Decode engines prefill for a bounded share of their time."""

from __future__ import annotations

from prfaas.core.dispatch.instance_load import InstanceLoad, WorkAhead
from prfaas.core.resilience.budgets import RESERVE_NS, SHARE, SpareTime
from prfaas.units import NS_PER_S

S = NS_PER_S


def test_prefills_take_no_more_than_a_share_of_the_time() -> None:
    spare, taken_ns, work_ns = SpareTime(["d"]), 0, 3 * S
    for second in range(3600):
        while spare.has("d", second * S):
            spare.take("d", work_ns, second * S)
            taken_ns += work_ns
    assert taken_ns <= RESERVE_NS + SHARE * 3600 * S + work_ns
    assert taken_ns >= SHARE * 3600 * S


def test_others_have_all_the_time() -> None:
    spare = SpareTime(["d"])
    for _ in range(100):
        spare.take("p", 100 * S, 0)
        spare.take("d", 100 * S, 0)
    assert spare.has("p", 0)
    assert not spare.has("d", 100 * S)


def test_the_work_before_a_prompt_is_counted_from_the_start_of_the_first() -> None:
    book = InstanceLoad(["a"], stale_after_ns=100 * S)
    for job, seconds in ((1, 4), (2, 5), (3, 6)):
        book.dispatch("a", job, 0, seconds * S)
    assert book.ahead("a", 2, 3 * S) == WorkAhead(5 * S, 9 * S, 4 * S, 3 * S)
    book.done("a", 1, 4 * S)
    assert book.ahead("a", 3, 5 * S) == WorkAhead(6 * S, 11 * S, 5 * S, 1 * S)
    assert book.ahead("a", 1, 5 * S) is None
    # A report that nothing waits: the second one is through as well.
    book.report("a", 9 * S, 0)
    assert book.ahead("a", 3, 10 * S) == WorkAhead(6 * S, 6 * S, 6 * S, 1 * S)
