"""Relay decode: the engine that prefilled goes on until the blocks have come."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.core.request.actions import (
    Abort,
    ContinueOn,
    FellBack,
    Release,
    StartPrefill,
    StopPrefill,
    WarmDecode,
)
from prfaas.core.request.events import (
    AnyEvent,
    Blocks,
    DecodeWarmed,
    Finished,
    FirstToken,
    Outcome,
    PoolLost,
    PrefillDone,
    PrefillFailed,
    PrefillFailure,
    Stopped,
    TransferEnded,
    Woke,
)
from prfaas.core.request.states import Stage
from prfaas.core.routing.decision import Path
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.units import NS_PER_S

from .drawn_events import OUTCOMES
from .driver import LIMITS, Driver, ScriptedBooks, again, fallbacks, kinds, relaying, routed

HAND_OFF = Blocks.HAND_OFF


def relayed(**more: Any) -> Driver:
    """Its first token is out, and its engine goes on."""
    driver = relaying(**more)
    driver.begin()
    driver.step(FirstToken(), NS_PER_S)
    assert driver.life.stage is Stage.RELAYING
    return driver


def test_tokens_come_from_the_relay_until_the_blocks_are_there() -> None:
    driver = relaying()
    assert driver.begin()[0] == StartPrefill("p", 100)
    assert kinds(driver.step(FirstToken())) == []
    assert driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED, at_destination=False)) == []
    found = driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED))
    assert found[0] == WarmDecode("d")
    assert kinds(driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED))) == []
    assert driver.life.stage is Stage.RELAYING
    assert driver.step(DecodeWarmed()) == [StopPrefill(), ContinueOn("d")]
    assert driver.life.awaited is HAND_OFF
    assert driver.step(FirstToken()) == []
    assert driver.step(Finished(7680, 7680)) == [Release(HAND_OFF)]
    once = ("prefilled", "handed_over", "transfer_over", "begun", "end")
    assert driver.books.told == dict.fromkeys(once, 1)


@pytest.mark.parametrize(
    ("link_bytes", "num_tokens"), [(None, 0), (99_999, 0), (100_000, 80), (200_000, 100)]
)
def test_the_number_of_tokens_follows_the_link(link_bytes: int | None, num_tokens: int) -> None:
    driver = relaying(books=ScriptedBooks(link_bytes=link_bytes))
    assert driver.begin()[0] == StartPrefill("p", num_tokens)
    driver.step(FirstToken())
    assert (driver.life.stage is Stage.RELAYING) == (num_tokens > 0)


@pytest.mark.parametrize("is_busy", [False, True])
def test_no_relay_where_it_does_not_pay_by_the_first_token(is_busy: bool) -> None:
    books = ScriptedBooks(link_bytes=10**6, is_busy=is_busy)
    driver = relaying(books=books)
    driver.begin()
    books.link_bytes = 10**6 if is_busy else 1000
    assert driver.step(FirstToken()) == [StopPrefill(), ContinueOn("d")]
    assert driver.life.awaited is HAND_OFF


def test_no_relay_for_blocks_that_are_there_or_that_are_not_waited_for() -> None:
    driver = relaying()
    driver.begin()
    driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED))
    assert driver.step(FirstToken()) == [StopPrefill(), ContinueOn("d")]
    for other in (relaying(holds=True), relaying(routed(Path.LOCAL))):
        assert other.begin()[0] == StartPrefill("p")


def test_a_relay_that_ends_before_the_blocks_come() -> None:
    driver = relayed()
    assert driver.step(PrefillDone()) == [ContinueOn("d")]
    assert driver.life.awaited is HAND_OFF
    assert driver.books.told["prefilled"] == 1


def test_a_relay_that_dies_leaves_the_transfer() -> None:
    driver = relayed()
    failed = PrefillFailed(PrefillFailure.BROKEN, may_have_died=True, is_suspect=True)
    found = driver.step(failed)
    assert kinds(found) == [FellBack, ContinueOn]
    assert fallbacks(found) == [("prefill", "broken")]
    assert driver.life.awaited is HAND_OFF
    driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED))
    assert driver.step(Finished(7680, 7680)) == [Release(HAND_OFF)]
    assert driver.breakers.failed == ["p"]


@pytest.mark.parametrize(
    "lost", [TransferEnded(HAND_OFF, TransferEnd.LINK_LOST), PoolLost(HAND_OFF)]
)
def test_decode_computes_blocks_that_are_lost_during_a_relay(lost: AnyEvent) -> None:
    driver = relayed()
    assert kinds(driver.step(lost)) == [WarmDecode]
    assert driver.step(DecodeWarmed()) == [StopPrefill(), ContinueOn("d")]
    assert kinds(driver.step(Finished(0, 0)))[0] is FellBack


def test_a_relay_lasts_no_longer_than_the_transfer_may_take() -> None:
    driver = relayed()
    assert driver.wakes_at_ns == NS_PER_S + LIMITS.transfer_timeout_ns
    found = driver.step(Woke(), LIMITS.transfer_timeout_ns)
    assert kinds(found) == [Abort, FellBack, WarmDecode]
    assert fallbacks(found) == [("transfer", "timeout")]
    assert driver.life.awaited is None


def test_a_route_is_not_left_as_late_while_its_client_gets_tokens() -> None:
    books = ScriptedBooks(local_ns=NS_PER_S, link_bytes=10**6)
    driver = relaying(routed(Path.REMOTE, predicted_ns=NS_PER_S), books=books)
    driver.begin()
    driver.step(FirstToken())
    assert driver.life.stage is Stage.RELAYING
    assert driver.wakes_at_ns == LIMITS.transfer_timeout_ns


@pytest.mark.parametrize("end", [PrefillDone(), PrefillFailed(PrefillFailure.BROKEN)])
def test_decode_goes_on_from_a_relay_that_ends_while_it_is_warmed(end: AnyEvent) -> None:
    driver = relayed()
    driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED))
    assert driver.step(end)[-1] == ContinueOn("d")
    assert driver.step(DecodeWarmed()) == []


def test_a_decode_engine_that_is_never_warm_is_not_waited_for() -> None:
    driver = relayed()
    driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED))
    assert driver.wakes_at_ns == NS_PER_S + LIMITS.transfer_timeout_ns
    found = driver.step(Woke(), LIMITS.transfer_timeout_ns)
    assert kinds(found) == [StopPrefill, ContinueOn]


def test_no_decode_engine_is_warm_that_was_not_asked_to_be() -> None:
    driver = relayed()
    assert driver.step(DecodeWarmed()) == []
    assert driver.life.stage is Stage.RELAYING


def test_an_answer_that_ends_in_its_relay_has_no_decode_leg() -> None:
    driver = relayed()
    assert kinds(driver.step(Finished(1000, 1000))) == [Abort]
    assert driver.life.outcome is Outcome.FINISHED
    assert driver.books.told["prefilled"] == 1


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_request_that_stops_in_its_relay_leaves_nothing_open(outcome: Outcome) -> None:
    assert kinds(relayed().step(Stopped(outcome))) == [StopPrefill, Abort]


def test_a_second_prefill_relays_nothing() -> None:
    driver = relaying(books=ScriptedBooks(link_bytes=10**6, again=[again(Path.REMOTE)]))
    driver.begin()
    driver.life.is_begun = True
    assert StartPrefill("p2") in driver.step(PrefillFailed(PrefillFailure.STATUS_5XX))
