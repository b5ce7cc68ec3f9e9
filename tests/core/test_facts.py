"""Facts reach the subscribers of their type, in order; a guard can refuse a change."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from prfaas.core.facts import FactStream


@dataclass(frozen=True)
class Booked:
    tokens: int


@dataclass(frozen=True)
class Sold(Booked):
    """A type of its own: subscribers of `Booked` do not get it."""


def test_a_fact_reaches_the_subscribers_of_its_type_in_their_order() -> None:
    facts, told = FactStream(), list[tuple[str, int]]()
    facts.subscribe(Booked, lambda fact: told.append(("first", fact.tokens)))
    facts.subscribe(Booked, lambda fact: told.append(("second", fact.tokens)))
    facts.report(Booked(3))
    facts.report(Sold(4))
    assert told == [("first", 3), ("second", 3)]
    assert (facts.wants(Booked), facts.wants(Sold)) == (True, False)


def test_a_guard_refuses_a_change_and_no_later_guard_is_asked() -> None:
    facts, asked = FactStream(), list[int]()

    def full(change: Booked) -> None:
        raise OSError(f"no room for {change.tokens}")

    facts.may(Booked(1))
    facts.guard(Booked, lambda change: asked.append(change.tokens))
    facts.guard(Booked, full)
    facts.guard(Booked, lambda change: asked.append(-change.tokens))
    with pytest.raises(OSError, match="no room for 2"):
        facts.may(Booked(2))
    assert asked == [2]


async def test_facts_are_kept_once_every_log_has_them() -> None:
    facts, asked = FactStream(), list[str]()
    assert await facts.kept()

    async def good() -> bool:
        asked.append("good")
        return True

    async def full() -> bool:
        asked.append("full")
        return False

    facts.keep(good)
    assert await facts.kept()
    facts.keep(full)
    facts.keep(good)
    assert not await facts.kept()
    assert asked == ["good", "good", "full", "good"]
