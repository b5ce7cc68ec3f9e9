"""A prefill that is given up: who computes the prompt instead, and when it is waited for."""

from __future__ import annotations

import pytest

from prfaas.core.request.actions import (
    Abort,
    FellBack,
    HoldBack,
    Release,
    StartDecode,
    StartPrefill,
    StartPull,
    WakeAt,
)
from prfaas.core.request.events import (
    Blocks,
    Finished,
    FirstToken,
    PrefillDone,
    PrefillFailed,
    PrefillFailure,
    TransferEnded,
    TurnCame,
    Woke,
)
from prfaas.core.request.states import Stage
from prfaas.core.routing.decision import Path
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.units import NS_PER_S

from .driver import LIMITS, Driver, ScriptedBooks, again, fallbacks, kinds, routed

HAND_OFF = Blocks.HAND_OFF

UNREACHABLE = PrefillFailed(PrefillFailure.UNREACHABLE)
TIMEOUT_NS = LIMITS.prefill_timeout_ns


def begun(books: ScriptedBooks) -> Driver:
    driver = Driver(routed(Path.REMOTE), books=books)
    driver.begin()
    return driver


def test_a_lost_prompt_goes_to_another_engine_that_prefills() -> None:
    driver = begun(ScriptedBooks(again=[again()]))
    actions = driver.step(UNREACHABLE)
    assert kinds(actions) == [Abort, FellBack, StartPrefill]
    assert driver.leg == "p2"
    assert driver.books.told["fall_back"] == 0
    assert driver.step(PrefillDone())[0] == StartDecode("d2")
    driver.step(FirstToken())
    assert driver.books.told["begun"] == 1
    driver.step(Finished(8000, 1000))


def test_blocks_of_the_second_prefill_are_waited_for() -> None:
    driver = begun(ScriptedBooks(again=[again(Path.REMOTE)]))
    driver.step(UNREACHABLE)
    assert driver.open == {HAND_OFF}
    driver.step(PrefillDone())
    assert driver.life.awaited is HAND_OFF
    assert driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED)) == []
    driver.step(FirstToken())
    driver.step(Finished(8000, 1000))
    assert driver.open == set()


@pytest.mark.parametrize("kind", [PrefillFailure.UNREACHABLE, PrefillFailure.POOL_DOWN])
def test_a_place_that_is_away_leaves_other_places_to_try(kind: PrefillFailure) -> None:
    driver = begun(ScriptedBooks(again=[again(Path.REMOTE)]))
    assert kinds(driver.step(PrefillFailed(kind)))[-1] is StartPrefill
    assert driver.books.told["offloadable_again"] == 1


@pytest.mark.parametrize("end", [TransferEnd.LINK_LOST, TransferEnd.EXPIRED])
def test_a_cut_link_sends_the_prompt_to_another_engine(end: TransferEnd) -> None:
    driver = begun(ScriptedBooks(again=[again()]))
    actions = driver.step(TransferEnded(HAND_OFF, end))
    assert fallbacks(actions) == [("transfer", end)]
    assert driver.leg == "p2"


def test_a_prompt_that_may_have_killed_an_engine_waits_for_its_turn_first() -> None:
    driver = begun(ScriptedBooks(again=[again()]))
    actions = driver.step(PrefillFailed(PrefillFailure.BROKEN, may_have_died=True))
    assert kinds(actions) == [Abort, FellBack, HoldBack]
    assert kinds(driver.step(TurnCame())) == [StartPrefill]
    assert driver.life.stage is Stage.PREFILLING


def test_a_prompt_gets_so_many_prefills_and_then_who_decodes_computes_it() -> None:
    driver = begun(ScriptedBooks(again=[again()] * 9))
    for _ in range(LIMITS.prefills_max - 1):
        assert kinds(driver.step(UNREACHABLE))[-1] is StartPrefill
    assert kinds(driver.step(UNREACHABLE))[-1] is StartDecode
    assert driver.books.told["fall_back"] == 1


@pytest.mark.parametrize(
    "failure",
    [
        PrefillFailed(PrefillFailure.STATUS_4XX),
        PrefillFailed(PrefillFailure.REFUSED),
        PrefillFailed(PrefillFailure.TOO_MANY_BLOCKS),
        PrefillFailed(PrefillFailure.STATUS_5XX, is_suspect=True),
    ],
)
def test_what_the_request_is_the_cause_of_is_not_tried_at_another_one(
    failure: PrefillFailed,
) -> None:
    driver = begun(ScriptedBooks(again=[again()]))
    assert kinds(driver.step(failure))[-1] is StartDecode


def test_a_queue_that_moves_is_waited_for_beyond_the_timeout() -> None:
    """Ten seconds more, where the PD cluster would take thirty."""
    books = ScriptedBooks(local_ns=30 * NS_PER_S, left_ns=10 * NS_PER_S)
    driver = begun(books)
    assert driver.step(Woke(), TIMEOUT_NS) == [WakeAt(TIMEOUT_NS + 10 * NS_PER_S)]
    books.left_ns = NS_PER_S
    assert driver.step(Woke(), 10 * NS_PER_S) == [WakeAt(TIMEOUT_NS + 11 * NS_PER_S)]
    assert driver.life.stage is Stage.PREFILLING
    # Then its engine does not get on.
    books.left_ns = None
    assert fallbacks(driver.step(Woke(), NS_PER_S)) == [("prefill", "timeout")]
    assert driver.breakers.failed == ["p"]


def test_a_queue_is_left_after_the_timeout_for_what_is_sooner_and_its_engine_not_blamed() -> None:
    driver = begun(ScriptedBooks(local_ns=5 * NS_PER_S, left_ns=10 * NS_PER_S, again=[again()]))
    assert fallbacks(driver.step(Woke(), TIMEOUT_NS)) == [("prefill", "late")]
    assert driver.leg == "p2"
    assert driver.breakers.failed == []


def test_a_request_with_a_pulled_prefix_is_computed_by_who_decodes() -> None:
    driver = Driver(routed(Path.LOCAL, pulls=True), books=ScriptedBooks(again=[again()]))
    driver.begin()
    assert driver.life.blocks.get(Blocks.PULL) is not None
    assert kinds(driver.step(UNREACHABLE))[-1] is StartDecode


def test_a_prefix_from_another_prfaas_host_is_awaited_by_the_prefill_alone() -> None:
    driver = Driver(routed(Path.REMOTE, pulls=True))
    assert kinds(driver.begin()) == [StartPull, StartPrefill]
    awaited = [driver.life.awaited]
    pull = driver.life.blocks.get(Blocks.PULL)
    assert pull is not None
    assert pull.link == ("far-b", "far")
    driver.step(PrefillDone())
    awaited.append(driver.life.awaited)
    driver.step(TransferEnded(Blocks.HAND_OFF, TransferEnd.LINK_LOST))
    awaited.append(driver.life.awaited)
    assert awaited == [Blocks.PULL, Blocks.HAND_OFF, Blocks.HAND_OFF]
    assert kinds(driver.step(Finished(8000, 5000))) == [Release, Release]
    assert driver.life.blocks.pull_outcome == "whole"


def test_a_remote_prefill_that_is_given_up_ends_its_pull_and_another_engine_may_pull() -> None:
    books = ScriptedBooks(again=[again(Path.REMOTE, pulls=True)])
    driver = Driver(routed(Path.REMOTE, pulls=True), books=books)
    driver.begin()
    assert kinds(driver.step(UNREACHABLE)) == [Abort, Abort, FellBack, StartPull, StartPrefill]
    assert driver.leg == "p2"
    driver.step(UNREACHABLE)
    assert driver.life.awaited is None, "the prefix is not on the host that decodes"
    assert driver.leg == "d2"


def test_a_lost_pull_of_a_remote_prefill_costs_only_its_prefix() -> None:
    driver = Driver(routed(Path.REMOTE, pulls=True))
    driver.begin()
    ended = TransferEnded(Blocks.PULL, TransferEnd.LINK_LOST)
    assert kinds(driver.step(ended)) == [Abort, FellBack]
    assert (driver.leg, driver.open) == ("p", {Blocks.HAND_OFF})


def test_a_watch_that_goes_on_waiting_does_not_wake_at_once_again() -> None:
    """The check for a stall was due before the timeout."""
    books = ScriptedBooks(prefill_ns=14 * NS_PER_S, local_ns=None, left_ns=NS_PER_S)
    driver = begun(books)
    for _ in range(5):
        driver.step(Woke(), driver.wakes_at_ns - driver.now_ns if driver.wakes_at_ns else 0)
        assert driver.wakes_at_ns is None or driver.wakes_at_ns > driver.now_ns
