"""The life of a request: what each event does, and what holds after any history."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.request.actions import (
    ACTIONS,
    Abort,
    Action,
    AnyAction,
    AwaitBlocks,
    ContinueOn,
    Fail,
    FellBack,
    HoldBack,
    Release,
    Retry,
    StartDecode,
    StartPrefill,
    StartPull,
    StopPrefill,
    WakeAt,
)
from prfaas.core.request.events import (
    EVENTS,
    AnyEvent,
    Begun,
    Blocks,
    DecodeFailure,
    EngineBroke,
    Finished,
    FirstToken,
    Outcome,
    PoolLost,
    PrefillDone,
    PrefillFailed,
    PrefillFailure,
    PullNotAsked,
    Stopped,
    TransferEnded,
    TurnCame,
    Woke,
)
from prfaas.core.request.states import TRANSITIONS, Stage
from prfaas.core.routing.decision import Path
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.units import NS_PER_S

from .drawn_events import MAKERS, OUTCOMES
from .driver import LIMITS, Driver, ScriptedBooks, again, fallbacks, kinds, relaying, routed

HAND_OFF, PULL = Blocks.HAND_OFF, Blocks.PULL
BROKE = EngineBroke(DecodeFailure.BROKEN)


def remote(**more: object) -> Driver:
    return Driver(routed(Path.REMOTE), **more)  # type: ignore[arg-type]


# --- the usual ways ---


def test_a_remote_request_is_prefilled_then_decoded_then_released() -> None:
    driver = remote()
    assert kinds(driver.begin()) == [StartPrefill]
    assert driver.step(PrefillDone()) == [StartDecode("d")]
    assert driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED)) == []
    assert driver.step(FirstToken()) == []
    assert driver.step(Finished(7680, 7680)) == [Release(HAND_OFF)]
    assert driver.life.outcome is Outcome.FINISHED
    once = ("prefilled", "handed_over", "transfer_over", "begun", "end")
    assert driver.books.told == dict.fromkeys(once, 1)


def test_a_prefill_whose_blocks_are_all_there_ends_without_its_answer() -> None:
    """The path to its engine may have been forgotten meanwhile: nothing comes over it any more."""
    driver = remote()
    driver.begin()
    whole = TransferEnded(HAND_OFF, TransferEnd.COMMITTED, is_whole=True)
    [wake] = driver.step(whole)
    assert isinstance(wake, WakeAt)
    assert driver.life.stage is Stage.PREFILLING
    actions = driver.step(Woke(), wake.at_ns - driver.now_ns)
    assert kinds(actions) == [StopPrefill, StartDecode]
    assert driver.step(PrefillDone()) == []
    driver.step(Finished(7680, 7680))
    assert driver.life.outcome is Outcome.FINISHED
    assert driver.books.told["fall_back"] == 0


def test_an_answer_in_time_is_used_where_all_blocks_came_before_it() -> None:
    driver = remote()
    driver.begin()
    driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED, is_whole=True))
    assert driver.step(PrefillDone()) == [StartDecode("d")]
    assert driver.step(Woke(), 2 * NS_PER_S) == []


@pytest.mark.parametrize(
    ("end", "expected"), [(TransferEnd.COMMITTED, 4096), (TransferEnd.LINK_LOST, 0)]
)
def test_bytes_of_a_transfer_that_landed_are_recorded(end: TransferEnd, expected: int) -> None:
    driver = remote()
    driver.begin()
    driver.step(PrefillDone())
    driver.step(TransferEnded(HAND_OFF, end, at_destination=False, num_bytes=4096))
    driver.step(TransferEnded(HAND_OFF, end, num_bytes=4096))
    assert driver.books.num_bytes == expected


def test_a_local_request_is_decoded_at_once() -> None:
    driver = Driver(routed(Path.LOCAL), apart=False)
    assert driver.begin() == [StartDecode("d")]
    assert driver.step(Finished(1000, 1000)) == []


def test_a_hand_over_within_a_pool_is_no_transfer() -> None:
    driver = Driver(routed(Path.LOCAL))
    driver.begin()
    driver.step(PrefillDone())
    assert driver.step(Finished(7680, 7680)) == []
    assert not driver.breakers.began_of


def test_a_pull_is_waited_for_by_the_leg_that_starts_at_once() -> None:
    driver = Driver(routed(Path.LOCAL, pulls=True), apart=False)
    assert kinds(driver.begin()) == [StartPull, StartDecode]
    assert driver.life.awaited is PULL
    driver.step(FirstToken())
    assert driver.step(Finished(5000, 5000)) == [Release(PULL)]
    assert driver.life.blocks.pull_outcome == "whole"


# --- engines that cannot wait for blocks ---


def held(**more: object) -> Driver:
    """A remote request whose prefill leg has answered."""
    driver = remote(holds=True, **more)
    assert kinds(driver.begin()) == [StartPrefill]
    assert driver.step(PrefillDone(), NS_PER_S)[0] == AwaitBlocks(HAND_OFF)
    assert driver.is_held
    return driver


def test_decode_is_held_until_the_blocks_are_there() -> None:
    driver = held()
    assert driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED, at_destination=False)) == []
    found = driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED))
    assert kinds(found) == [StartDecode]
    assert driver.step(Finished(7680, 7680)) == [Release(HAND_OFF)]
    assert driver.books.told["fall_back"] == 0


def test_blocks_that_came_before_the_answer_are_not_waited_for() -> None:
    driver = remote(holds=True)
    driver.begin()
    driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED))
    assert kinds(driver.step(PrefillDone())) == [StartDecode]


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (TransferEnded(HAND_OFF, TransferEnd.LINK_LOST), "link_lost"),
        (PoolLost(HAND_OFF), "pool_down"),
    ],
)
def test_decode_computes_what_is_lost(lost: AnyEvent, why: str) -> None:
    driver = held()
    assert kinds(driver.step(lost)) == [StartDecode]
    assert fallbacks(driver.step(Finished(1000, 1000))) == [("transfer", why)]


def test_decode_is_held_no_longer_than_the_transfer_may_take() -> None:
    driver = held()
    assert driver.wakes_at_ns == NS_PER_S + LIMITS.transfer_timeout_ns
    assert driver.step(Woke(), LIMITS.transfer_timeout_ns - 1) == [
        WakeAt(NS_PER_S + LIMITS.transfer_timeout_ns)
    ]
    found = driver.step(Woke(), 1)
    assert kinds(found) == [Abort, FellBack, StartDecode]
    assert fallbacks(found) == [("transfer", "timeout")]
    assert driver.step(Finished(7000, 7000)) == []


def test_a_hand_over_within_a_pool_is_not_held_for() -> None:
    driver = Driver(routed(Path.LOCAL), holds=True)
    driver.begin()
    assert kinds(driver.step(PrefillDone())) == [StartDecode]


def test_a_leg_is_held_for_the_prefix_that_is_pulled_for_it() -> None:
    alone = Driver(routed(Path.LOCAL, pulls=True), apart=False, holds=True)
    assert kinds(alone.begin()) == [StartPull, AwaitBlocks]
    assert kinds(alone.step(TransferEnded(PULL, TransferEnd.COMMITTED))) == [StartDecode]
    apart = Driver(routed(Path.LOCAL, pulls=True), holds=True)
    apart.begin()
    found = apart.step(PullNotAsked())
    assert kinds(found) == [Abort, FellBack, StartPrefill]


def test_an_engine_that_is_chosen_late_may_be_missing() -> None:
    driver = remote(decode="")
    driver.begin()
    assert driver.step(PrefillDone())[0] == StartDecode("d")
    nobody = remote(decode="", books=ScriptedBooks(first=None))
    nobody.begin()
    assert kinds(nobody.step(PrefillDone())) == [Abort, Fail]
    assert nobody.life.outcome is Outcome.FAILED


# --- prefill legs that fail ---


@pytest.mark.parametrize("kind", PrefillFailure)
def test_a_prefill_that_fails_is_left_and_decode_computes_it(kind: PrefillFailure) -> None:
    driver = remote()
    driver.begin()
    actions = driver.step(PrefillFailed(kind))
    assert kinds(actions) == [Abort, FellBack, StartDecode]
    assert fallbacks(actions) == [("prefill", kind)]
    assert driver.books.told["fall_back"] == 1
    driver.step(FirstToken())
    assert driver.books.told["begun"] == 1


def test_an_engine_that_may_have_died_holds_its_prompt_back() -> None:
    driver = remote()
    driver.begin()
    actions = driver.step(PrefillFailed(PrefillFailure.BROKEN, may_have_died=True))
    assert kinds(actions) == [Abort, FellBack, HoldBack]
    assert driver.step(TurnCame()) == [StartDecode("d")]


def test_a_prefill_that_takes_too_long_is_left_and_blamed() -> None:
    driver = remote()
    assert driver.begin()[-1] == WakeAt(LIMITS.prefill_timeout_ns)
    actions = driver.step(Woke(), LIMITS.prefill_timeout_ns)
    assert kinds(actions) == [StopPrefill, Abort, FellBack, StartDecode]
    assert fallbacks(actions) == [("prefill", "timeout")]
    assert driver.breakers.failed == ["p"]


def test_a_pull_that_ends_leaves_the_alarm_of_the_prefill() -> None:
    driver = Driver(routed(Path.LOCAL, pulls=True))
    assert driver.begin()[-1] == WakeAt(LIMITS.transfer_timeout_ns)
    assert kinds(driver.step(PullNotAsked())) == [Abort, FellBack]
    # The alarm of the pull is not cancelled; when it rings, it is set for the prefill.
    early = driver.step(Woke(), LIMITS.transfer_timeout_ns)
    assert early == [WakeAt(LIMITS.prefill_timeout_ns)]


def test_a_stalled_prefill_is_left_within_the_budget() -> None:
    books = ScriptedBooks(prefill_ns=NS_PER_S, local_ns=NS_PER_S)
    driver = remote(books=books)
    assert driver.begin()[-1] == WakeAt(4 * NS_PER_S)
    while driver.fleet.hedges.take(0) is not None:
        pass
    assert driver.step(Woke(), 4 * NS_PER_S - 1) == [WakeAt(4 * NS_PER_S)], "it was early"
    # By the next look the budget has filled up.
    assert driver.step(Woke(), 1) or driver.step(Woke(), NS_PER_S)
    assert driver.life.stage is Stage.DECODING
    assert driver.breakers.failed == ["p"]


def test_a_route_that_is_late_is_left_for_one_that_is_sooner() -> None:
    books = ScriptedBooks(local_ns=NS_PER_S)
    driver = Driver(routed(Path.REMOTE, predicted_ns=10 * NS_PER_S), books=books)
    driver.begin()
    driver.step(PrefillDone(), NS_PER_S)
    actions: list[AnyAction] = []
    while not actions or isinstance(actions[0], WakeAt):
        assert driver.wakes_at_ns is not None
        actions = driver.step(Woke(), driver.wakes_at_ns - driver.now_ns)
    assert 10 * NS_PER_S < driver.now_ns < 16 * NS_PER_S
    assert kinds(actions) == [Abort, FellBack]
    assert fallbacks(actions) == [("transfer", "late")]
    assert driver.life.awaited is None


def test_blocks_that_have_come_are_not_given_up_however_long_decode_takes() -> None:
    books = ScriptedBooks(local_ns=1)
    driver = Driver(routed(Path.REMOTE, predicted_ns=10 * NS_PER_S), books=books)
    driver.begin()
    driver.step(PrefillDone())
    assert driver.step(TransferEnded(HAND_OFF, TransferEnd.COMMITTED)) == []
    assert driver.step(Woke(), 1000 * NS_PER_S) == []


@pytest.mark.parametrize(
    "kind", [kind for kind in TransferEnd if kind is not TransferEnd.COMMITTED]
)
def test_a_transfer_that_can_not_complete_ends_the_prefill(kind: TransferEnd) -> None:
    driver = remote()
    driver.begin()
    actions = driver.step(TransferEnded(HAND_OFF, kind, at_destination=False))
    is_of_engine = kind is TransferEnd.ENGINE_LOST
    last = HoldBack if is_of_engine else StartDecode
    assert kinds(actions) == [StopPrefill, Abort, FellBack, last]
    assert fallbacks(actions) == [("prefill" if is_of_engine else "transfer", kind)]


def test_a_transfer_that_is_lost_later_is_found_by_what_decode_finds() -> None:
    driver = remote()
    driver.begin()
    driver.step(PrefillDone())
    assert driver.step(TransferEnded(HAND_OFF, TransferEnd.LINK_LOST)) == []
    actions = driver.step(Finished(4096, 4096))
    assert fallbacks(actions) == [("transfer", "link_lost")]
    assert Release(HAND_OFF) in actions


@pytest.mark.parametrize(
    ("event", "failure"),
    [
        (None, "timeout"),
        (TransferEnded(HAND_OFF, TransferEnd.COMMITTED), "unknown"),
        (PoolLost(HAND_OFF), "pool_down"),
    ],
)
def test_blocks_that_decode_misses_have_a_reason(event: AnyEvent | None, failure: str) -> None:
    driver = remote()
    driver.begin()
    driver.step(PrefillDone())
    if event is not None:
        driver.step(event)
    assert fallbacks(driver.step(Finished(0, 0))) == [("transfer", failure)]


# --- pulls that fail ---


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (PullNotAsked(), "not_asked"),
        (TransferEnded(PULL, TransferEnd.REFUSED), "refused"),
        (TransferEnded(PULL, TransferEnd.NO_ROOM), "no_room"),
        (PoolLost(PULL), "pool_down"),
    ],
)
def test_a_pull_that_fails_is_computed_without_another_leg(event: AnyEvent, reason: str) -> None:
    driver = Driver(routed(Path.LOCAL, pulls=True), apart=False)
    driver.begin()
    actions = driver.step(event)
    assert kinds(actions) == [Abort, FellBack]
    assert fallbacks(actions) == [("pull", reason)]
    assert driver.life.blocks.pull_outcome == reason
    assert driver.life.awaited is None


def test_a_pull_ends_with_its_time_and_not_after_the_first_token() -> None:
    driver = Driver(routed(Path.LOCAL, pulls=True), apart=False)
    assert driver.begin()[-1] == WakeAt(LIMITS.transfer_timeout_ns)
    actions = driver.step(Woke(), LIMITS.transfer_timeout_ns)
    assert fallbacks(actions) == [("pull", "timeout")]
    driver = Driver(routed(Path.LOCAL, pulls=True), apart=False)
    driver.begin()
    assert driver.step(FirstToken()) == []
    assert not driver.life.watches
    assert driver.step(Woke(), LIMITS.transfer_timeout_ns) == []
    assert driver.step(TransferEnded(PULL, TransferEnd.LINK_LOST)) == []
    assert fallbacks(driver.step(Finished(1000, 1000))) == [("pull", "link_lost")]


def test_a_pull_that_came_whole_outlives_its_source() -> None:
    driver = Driver(routed(Path.LOCAL, pulls=True), apart=False)
    driver.begin()
    assert driver.step(TransferEnded(PULL, TransferEnd.COMMITTED)) == []
    late = TransferEnded(PULL, TransferEnd.LINK_LOST, at_destination=False)
    assert driver.step(late) == []
    assert driver.step(Finished(5000, 5000)) == [Release(PULL)]


# --- decode legs that fail ---


def test_an_engine_that_breaks_is_followed_by_another() -> None:
    driver = remote(books=ScriptedBooks(others=["e", "f"]))
    driver.begin()
    driver.step(PrefillDone())
    driver.step(FirstToken())
    actions = driver.step(BROKE)
    assert kinds(actions) == [Abort, Retry, FellBack, ContinueOn]
    assert actions[-1] == ContinueOn("e")
    assert fallbacks(actions) == [("decode", "broken")]
    assert driver.life.stage is Stage.DECODING
    driver.step(BROKE)
    assert kinds(driver.step(BROKE)) == [Fail], "the third leg was the last"
    assert driver.life.outcome is Outcome.FAILED


def test_without_another_engine_or_a_way_to_continue_it_fails() -> None:
    driver = remote()
    driver.begin()
    driver.step(PrefillDone())
    assert kinds(driver.step(BROKE)) == [Abort, Fail]
    driver = remote(books=ScriptedBooks(others=["e"]))
    driver.begin()
    driver.step(PrefillDone())
    assert kinds(driver.step(EngineBroke(DecodeFailure.ERROR, can_continue=False))) == [Abort, Fail]


def test_retries_end_with_their_budget() -> None:
    driver = remote(books=ScriptedBooks(others=["e"]))
    while driver.fleet.retries.take(0) is not None:
        pass
    driver.begin()
    driver.step(PrefillDone())
    actions = driver.step(BROKE)
    assert kinds(actions) == [Abort, Retry, Fail]
    assert Retry(is_allowed=False) in actions


def test_the_fault_is_the_engines_where_another_one_serves() -> None:
    suspect = EngineBroke(DecodeFailure.STATUS_5XX, is_suspect=True)
    driver = remote(books=ScriptedBooks(others=["e"]))
    driver.begin()
    driver.step(PrefillFailed(PrefillFailure.STATUS_5XX, is_suspect=True))
    driver.step(suspect)
    assert driver.breakers.failed == []
    driver.step(FirstToken())
    assert driver.breakers.failed == ["p", "d"]


def test_the_fault_is_the_requests_where_several_fail_and_none_serves() -> None:
    suspect = EngineBroke(DecodeFailure.STATUS_5XX, is_suspect=True)
    driver = remote(books=ScriptedBooks(others=["e"]))
    driver.begin()
    driver.step(PrefillDone())
    driver.step(suspect)
    driver.step(suspect)
    driver.step(suspect)
    assert driver.life.outcome is Outcome.FAILED
    assert driver.breakers.failed == []


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_request_that_stops_leaves_nothing_open(outcome: Outcome) -> None:
    driver = remote()
    driver.begin()
    assert kinds(driver.step(Stopped(outcome))) == [StopPrefill, Abort]
    assert driver.life.outcome is outcome


# --- any history ---

WAYS = {
    "remote": lambda books: Driver(routed(Path.REMOTE, predicted_ns=NS_PER_S), books=books),
    "late choice, planned": lambda books: Driver(
        routed(Path.REMOTE, predicted_ns=NS_PER_S), decode="", books=books
    ),
    "unplanned": lambda books: Driver(routed(Path.REMOTE), books=books),
    "apart": lambda books: Driver(routed(Path.LOCAL), books=books),
    "in place": lambda books: Driver(routed(Path.LOCAL), apart=False, books=books),
    "pull": lambda books: Driver(routed(Path.LOCAL, pulls=True), apart=False, books=books),
    "late choice": lambda books: Driver(routed(Path.REMOTE), decode="", books=books),
    "late choice in place": lambda books: Driver(
        routed(Path.LOCAL), apart=False, decode="", books=books
    ),
    "pull apart": lambda books: Driver(routed(Path.LOCAL, pulls=True), books=books),
    "pull away": lambda books: Driver(routed(Path.REMOTE, pulls=True), books=books),
    "held": lambda books: Driver(routed(Path.REMOTE), books=books, holds=True),
    "held, planned": lambda books: Driver(
        routed(Path.REMOTE, predicted_ns=NS_PER_S), books=books, holds=True
    ),
    "held, late choice": lambda books: Driver(
        routed(Path.REMOTE), decode="", books=books, holds=True
    ),
    "held pull": lambda books: Driver(
        routed(Path.LOCAL, pulls=True), apart=False, books=books, holds=True
    ),
    "held pull, late choice": lambda books: Driver(
        routed(Path.LOCAL, pulls=True), apart=False, decode="", books=books, holds=True
    ),
    "held pull apart": lambda books: Driver(
        routed(Path.LOCAL, pulls=True), books=books, holds=True
    ),
    "relay": lambda books: relaying(books=_slow(books)),
    "relay, planned": lambda books: relaying(
        routed(Path.REMOTE, predicted_ns=NS_PER_S), books=_slow(books)
    ),
    "relay, late choice": lambda books: relaying(decode="", books=_slow(books)),
    "relay, late choice, planned": lambda books: relaying(
        routed(Path.REMOTE, predicted_ns=NS_PER_S), decode="", books=_slow(books)
    ),
    "relay, pull away": lambda books: relaying(routed(Path.REMOTE, pulls=True), books=_slow(books)),
}


def _slow(books: ScriptedBooks) -> ScriptedBooks:
    books.link_bytes = books.link_bytes or 10**6
    return books


ANY_EVENT = st.builds(
    lambda kind, draw: MAKERS[kind](draw),
    st.sampled_from(EVENTS),
    st.randoms(use_true_random=False),
)


def test_histories_hold_every_kind_of_event() -> None:
    assert set(MAKERS) == set(EVENTS)


@settings(max_examples=300, deadline=None)
@given(
    way=st.sampled_from(sorted(WAYS)),
    books=st.builds(
        ScriptedBooks,
        others=st.lists(st.sampled_from("def")),
        first=st.sampled_from(["d", None]),
        prefill_ns=st.none() | st.integers(0, 10 * NS_PER_S),
        local_ns=st.none() | st.integers(0, 10 * NS_PER_S),
        left_ns=st.none() | st.integers(1, 10 * NS_PER_S),
        link_bytes=st.none() | st.integers(0, 10**7),
        is_busy=st.booleans(),
        again=st.lists(st.builds(again, st.sampled_from(Path), pulls=st.booleans())),
        told=st.builds(Counter),
    ),
    history=st.lists(st.tuples(ANY_EVENT, st.integers(0, 20 * NS_PER_S))),
    outcome=st.sampled_from(OUTCOMES),
)
def test_whatever_happens_every_book_is_closed_once(
    way: str,
    books: ScriptedBooks,
    history: list[tuple[AnyEvent, int]],
    outcome: Outcome,
) -> None:
    """The driver checks the rest after each step."""
    driver = WAYS[way](books)
    driver.begin()
    for event, after_ns in history:
        driver.step(event, after_ns)
    driver.step(Stopped(outcome))
    assert driver.life.stage is Stage.ENDED
    assert driver.step(Stopped(outcome)) == []


def test_every_transition_and_every_action_is_taken() -> None:
    """The property above says nothing of what its histories never bring about."""
    chance, taken, seen = random.Random(1), set(), Counter[type[Action]]()
    kinds_drawn = [kind for kind in EVENTS if kind not in (Begun, Stopped, TurnCame)]
    kinds_drawn += [Woke] * 3
    for number in range(6000):
        others = ["e"] if chance.random() < 0.7 else []
        books = ScriptedBooks(
            others, chance.choice(("d", None)), chance.choice((None, NS_PER_S)), NS_PER_S // 10
        )
        books.again = [again()] * (chance.random() < 0.3)
        books.is_busy = chance.random() < 0.2
        driver = WAYS[sorted(WAYS)[number % len(WAYS)]](books)
        driver.step(Stopped(Outcome.CANCELLED)) if number % 50 == 0 else driver.begin()
        for _ in range(chance.randrange(12)):
            event = MAKERS[chance.choice(kinds_drawn)](chance)
            is_late = isinstance(event, Woke) and chance.random() < 0.3
            driver.step(
                event, LIMITS.transfer_timeout_ns if is_late else chance.randrange(NS_PER_S // 2)
            )
            if driver.life.stage is Stage.HELD and chance.random() < 0.7:
                driver.step(TurnCame())
        driver.step(Stopped(chance.choice(OUTCOMES)))
        taken |= driver.taken
        seen += driver.seen
    possible = {(*pair, after) for pair, stages in TRANSITIONS.items() for after in stages}
    assert possible - taken == set()
    assert set(seen) == set(ACTIONS)
