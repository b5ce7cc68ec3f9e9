"""Prompts after which an engine died: who may run, who is refused, who is forgotten."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.resilience import quarantine
from prfaas.core.resilience.quarantine import KEPT_NS, REFUSED_NS, WINDOW_MAX, Quarantine
from prfaas.units import NS_PER_S

A, B, C, D = (bytes([n]) * 16 for n in range(4))
DEATHS = (("engine", number) for number in count())
"""Each of its own."""


def test_suspects_run_one_at_a_time_until_they_are_cleared() -> None:
    found = Quarantine()
    for digest in (A, B, C, D):
        found.killed(digest, next(DEATHS), 1, 0)
    assert found.begin(A)
    assert not found.begin(A)
    assert not found.begin(B)
    found.cleared(A)
    assert not found.is_suspect(A, 1)
    assert found.begin(B)
    assert found.begin(C)
    assert not found.begin(D)
    found.left(B)
    assert found.is_suspect(B, 1)
    assert found.begin(D)


def test_who_was_alone_when_a_second_engine_died_is_refused_for_long() -> None:
    found = Quarantine()
    found.killed(A, next(DEATHS), 1, 0)
    assert found.refused_ns(A, 0) == 0
    assert found.begin(A)
    found.killed(A, next(DEATHS), 1, 5)
    assert found.refused_ns(A, 5) == KEPT_NS
    assert not found.is_suspect(A, 5 + KEPT_NS)


def test_who_was_not_alone_is_refused_for_a_short_time_that_grows() -> None:
    """Prompts that were never suspect may be the cause as well as other suspects."""
    found, now_ns = Quarantine(), 0
    found.killed(A, next(DEATHS), 9, now_ns)
    for refused_s in (30, 120, 480, 600, 600):
        assert found.begin(A)
        found.killed(A, next(DEATHS), 2, now_ns)
        assert found.refused_ns(A, now_ns) == refused_s * NS_PER_S
        now_ns += refused_s * NS_PER_S
        assert found.refused_ns(A, now_ns) == 0
    assert REFUSED_NS == 30 * NS_PER_S


def test_a_suspect_in_another_engine_is_not_the_cause() -> None:
    found = Quarantine()
    for digest in (A, B, C):
        found.killed(digest, next(DEATHS), 3, 0)
    assert found.begin(A)
    found.cleared(A)
    assert found.begin(B)
    assert found.begin(C)
    found.killed(B, next(DEATHS), 1, 0)
    assert found.refused_ns(B, 0) == KEPT_NS


def test_copies_of_a_prompt_are_alone_in_an_engine_once_all_have_reported() -> None:
    found = Quarantine()
    found.killed(A, next(DEATHS), 1, 0)
    death = next(DEATHS)
    found.killed(A, death, 2, 0)
    assert found.refused_ns(A, 0) == REFUSED_NS
    found.killed(A, death, 2, 0)
    assert found.refused_ns(A, 0) == KEPT_NS


def test_requests_with_one_prompt_report_the_death_of_one_engine_once() -> None:
    found = Quarantine()
    for now_ns in range(3):
        found.killed(A, ("engine", 1), 3, now_ns)
    assert found.refused_ns(A, 3) == 0
    assert found.begin(A)
    found.killed(A, ("engine", 2), 1, 4)
    assert found.refused_ns(A, 4) == KEPT_NS


def test_a_suspect_that_has_run_for_long_holds_up_nobody_and_stays_suspect() -> None:
    found = Quarantine()
    for digest in (A, B, C):
        found.killed(digest, next(DEATHS), 1, 0)
    assert found.begin(A)
    found.survived(A)
    assert found.begin(B)
    assert found.begin(C)
    assert found.is_suspect(A, 1)
    found.killed(A, next(DEATHS), 3, 1)
    assert found.refused_ns(A, 1) == REFUSED_NS
    found.cleared(B)
    assert not found.is_suspect(B, 1)


@given(st.lists(st.tuples(st.sampled_from("kbcl"), st.integers(0, 200)), max_size=300))
def test_the_table_and_the_runners_are_bounded(steps: list[tuple[str, int]]) -> None:
    found = Quarantine()
    for step, number in steps:
        digest = number.to_bytes(16, "big")
        match step:
            case "k":
                found.killed(digest, next(DEATHS), 1, 0)
            case "b":
                found.begin(digest)
            case "c":
                found.cleared(digest)
            case _:
                found.left(digest)
        assert len(found._running) <= WINDOW_MAX
        assert len(found) <= quarantine.SUSPECTS_MAX


def test_the_oldest_suspects_are_forgotten_first() -> None:
    found = Quarantine()
    for number in range(quarantine.SUSPECTS_MAX + 1):
        found.killed(number.to_bytes(16, "big"), next(DEATHS), 1, 0)
    assert len(found) == quarantine.SUSPECTS_MAX
    assert not found.is_suspect((0).to_bytes(16, "big"), 0)
