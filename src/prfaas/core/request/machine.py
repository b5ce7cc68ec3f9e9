"""The machine that leads a request from its route to its end. `states.py` explains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prfaas.core.dispatch import types
from prfaas.core.request.actions import (
    AnyAction,
    ContinueOn,
    Fail,
    FellBack,
    HoldBack,
    Retry,
    StartDecode,
    StartPrefill,
    StartPull,
    StopPrefill,
    WakeAt,
)
from prfaas.core.request.blocks import ENDED_EARLY, POOL_DOWN, Movement, RequestTransfers
from prfaas.core.request.events import (
    AnyEvent,
    Begun,
    Blocks,
    DecodeWarmed,
    EngineBroke,
    Event,
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
from prfaas.core.request.fleet import SharedState
from prfaas.core.request.states import TRANSITIONS, Stage
from prfaas.core.request.watch import (
    ANSWER_NS,
    AnswerWatch,
    PrefillWatch,
    RouteWatch,
    Timeout,
    Watch,
    WatchAlarm,
)
from prfaas.core.resilience.circuit_breaker import BreakerOutcome
from prfaas.core.resilience.late_routes import RemotePath
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.records import MutableRecord

NOT_ASKED = "not_asked"
"""Outcome of a pull that no pool was asked for."""
_OF_ENGINE = frozenset({TransferEnd.ENGINE_LOST, *WatchAlarm})
"""Ends of a prefill leg that its engine is the cause of, not the transfer."""
_OF_REQUEST = frozenset(
    {
        PrefillFailure.STATUS_4XX,
        PrefillFailure.REFUSED,
        PrefillFailure.NO_LAYOUT,
        PrefillFailure.TOO_MANY_BLOCKS,
    }
)
"""Failures of a prefill leg that the request is the cause of."""
_OF_PLACE = frozenset(
    {
        WatchAlarm.TIMEOUT,
        WatchAlarm.STALLED,
        TransferEnd.LINK_LOST,
        PrefillFailure.POOL_DOWN,
        PrefillFailure.UNREACHABLE,
        PrefillFailure.BROKEN,
        PrefillFailure.STATUS_5XX,
    }
)
"""Reasons that another PrfaaS engine or link need not share."""
# Names of a module are found in a third of the time of members of an enum, and actions without
# fields are made once: the simulator leads thousands of requests a second through here.
_ROUTED, _PREFILLING, _DECODING = Stage.ROUTED, Stage.PREFILLING, Stage.DECODING
_STREAMING, _ENDED = Stage.STREAMING, Stage.ENDED
_HAND_OFF, _PULL, _COMMITTED = Blocks.HAND_OFF, Blocks.PULL, TransferEnd.COMMITTED
_START_PULL, _STOP_PREFILL = StartPull(), StopPrefill()


class Route(MutableRecord):
    """Decided route of a request."""

    number: int
    """Of the request, in the driver's books."""
    routed: types.Routed
    decode: str
    """Engine that decodes; "" lets the books choose once it is needed."""
    prefill: str = ""
    """Another engine that prefills; "" where the one that decodes does."""
    pools: tuple[str, str] = ("", "")
    """Pool of the engine that prefills, and of the one that decodes."""
    final_tokens: int = 0
    """Prefix that decode should find once the hand-off is complete."""
    deadline_ns: int | None = None
    """Instant at which the request's time is over; None without one."""
    holds: bool = False
    """True if its engines cannot wait for blocks (`held.py`)."""
    relay_max: int = 0
    """Tokens after the first that the engine that prefills may make of the answer."""
    num_bytes: int = 0
    """Of the hand-off; 0 where the books of its link have them."""

    def is_for_prefill(self, pull: Movement) -> bool:
        """Return True if a pulled prefix is on another host than decode."""
        return pull.destination != self.pools[1]


class RequestLife:
    """One request, from its route to its end.

    Args:
        fleet: What all requests share.
    """

    __slots__ = (
        "_books",
        "_breakers",
        "_broke",
        "_fleet",
        "_has_streamed",
        "_legs_left",
        "_needs_alarm",
        "_prefills_left",
        "_suspects",
        "blocks",
        "decode",
        "is_begun",
        "outcome",
        "route",
        "stage",
        "watches",
    )

    def __init__(self, route: Route, fleet: SharedState) -> None:
        self._fleet = fleet
        self.route = route
        """Route of the request; another prefill engine changes it."""
        self._books, self._breakers = fleet.books, fleet.breakers
        self.stage = _ROUTED
        self.decode = route.decode
        """Engine that decodes, or is to; "" until it is chosen."""
        self.outcome = Outcome.RUNNING
        self.blocks = RequestTransfers(fleet.breakers)
        """Blocks that it waits for."""
        self.watches: list[Watch] = []
        """Purpose of `Woke`; empty once it has no effect."""
        self._needs_alarm = False
        self._legs_left = fleet.limits.legs_max
        self._prefills_left = fleet.limits.prefills_max
        self._broke: EngineBroke | None = None
        """Reason for the end of the last decode leg; None before the first."""
        self._has_streamed = False
        self.is_begun = False
        """A prefill leg gave the first token."""
        self._suspects: list[str] = []
        """Engines that failed at it, by their fault or its own."""

    def step(self, event: AnyEvent, now_ns: int) -> list[AnyAction]:
        """Take an event.

        Args:
            now_ns: Time; not before that of the last step.

        Returns:
            What to do, in order; nothing for an event that is late.
        """
        stages, handler = _HANDLERS[type(event)]
        if self.stage not in stages:
            return []
        actions: list[AnyAction] = handler(self, event, now_ns)
        if self._needs_alarm:
            self._set_alarm(actions)
        return actions

    @property
    def awaited(self) -> Blocks | None:
        """Blocks that the next leg in the PD cluster has to wait for."""
        hand_off, pull = self.blocks.hand_off, self.blocks.pull
        is_decoding = self.stage is _DECODING
        if is_decoding and hand_off is not None and hand_off.is_open:
            return _HAND_OFF
        if pull is None or not pull.is_open or (is_decoding and self.route.is_for_prefill(pull)):
            return None
        return _PULL

    def _set_alarm(self, actions: list[AnyAction]) -> None:
        """Have the driver wake this life when a watch has to be looked at.

        An alarm is not cancelled if its watch is of no more use by then: few alarms find one that
        is, and each cancellation would cost a step and an action.
        """
        self._needs_alarm = False
        if self.watches:
            at_ns = self.watches[0].wakes_at_ns
            for watch in self.watches:
                at_ns = min(at_ns, watch.wakes_at_ns)
            actions.append(WakeAt(at_ns))

    # The way to the first token

    def _begin(self, _event: AnyEvent, now_ns: int) -> list[AnyAction]:
        if self.route.prefill or self.route.routed.pulls:
            self._fleet.hedges.deposit(now_ns)
        return self._take_route(now_ns)

    def _take_route(self, now_ns: int) -> list[AnyAction]:
        """Begin the first leg of a route, and what brings its blocks."""
        route, routed, limits = self.route, self.route.routed, self._fleet.limits
        actions: list[AnyAction] = []
        self._needs_alarm = True
        if routed.pulled_from:
            pull = Movement(*routed.pull_link, routed.hit_tokens)
            self.blocks.begin(_PULL, pull, now_ns)
            if routed.pulls:
                self._watch_route(pull, routed.prefill, now_ns)
            self.watches.append(Timeout(pull, now_ns + limits.transfer_timeout_ns))
            actions.append(_START_PULL)
        if not route.prefill:
            return actions + self._start_decode(now_ns)
        source, destination = route.pools
        hand_off = Movement(source, destination, route.final_tokens)
        self.blocks.begin(_HAND_OFF, hand_off, now_ns)
        if hand_off.crosses_link:
            self._watch_route(hand_off, route.decode, now_ns)
        present = routed.facts.present_tokens
        local = route.decode, routed.facts.num_prompt_tokens - present, present
        self.watches.append(PrefillWatch(self._fleet, route.number, local, now_ns))
        self.stage = _PREFILLING
        self._prefills_left -= 1
        actions.append(StartPrefill(route.prefill))
        return actions

    def _watch_route(self, blocks: Movement, local: str, now_ns: int) -> None:
        """Watch a route over a link, if its time was predicted."""
        predicted_ns = self.route.routed.decision.predicted_ns
        if predicted_ns is None:
            return
        deadline_ns, ttft_max_ns = self.route.deadline_ns, self._fleet.limits.ttft_max_ns
        if ttft_max_ns is not None:
            at_ns = now_ns + ttft_max_ns
            deadline_ns = at_ns if deadline_ns is None else min(deadline_ns, at_ns)
        link_bytes = self._books.backlog_bytes(blocks.source, blocks.destination, now_ns)
        path = RemotePath(now_ns, predicted_ns, deadline_ns, link_bytes)
        self.watches.append(RouteWatch(self._fleet, self.route.number, local, blocks, path))

    def _prefilled(self, _event: AnyEvent, now_ns: int) -> list[AnyAction]:
        number, books = self.route.number, self._books
        books.prefilled(number, now_ns)
        hand_off = self.blocks.hand_off
        if hand_off is not None and not hand_off.crosses_link:
            books.handed_over(number, now_ns)
        return self._start_decode(now_ns)

    def _prefill_failed(self, failure: PrefillFailed, now_ns: int) -> list[AnyAction]:
        if failure.is_suspect:
            self._suspects.append(self.route.prefill)
        died = self.route.prefill if failure.may_have_died else ""
        fallback = FellBack("prefill", failure.kind, failure.why)
        if failure.kind in _OF_REQUEST or failure.is_suspect:
            # Another engine would fail at it alike.
            self._prefills_left = 0
        return self._leave_prefill(fallback, died, now_ns)

    def _leave_prefill(self, fallback: FellBack, died: str, now_ns: int) -> list[AnyAction]:
        """Go on without this prefill: another engine computes what has not arrived."""
        why = "the prefill leg was given up"
        actions, pull = self.blocks.abort(_HAND_OFF, why, now_ns), self.blocks.open(_PULL)
        if pull is not None and self.route.is_for_prefill(pull):
            self.blocks.pull_outcome = ENDED_EARLY
            actions += self.blocks.abort(_PULL, why, now_ns)
        actions.append(fallback)
        if died:
            self._books.fall_back(self.route.number, now_ns)
            self.stage = Stage.HELD
            return [*actions, HoldBack(died)]
        may_ship = fallback.reason in _OF_PLACE
        return actions + self._prefill_again(now_ns, offloadable=may_ship)

    def _prefill_again(self, now_ns: int, *, offloadable: bool) -> list[AnyAction]:
        """Have a prompt prefilled where that is soonest: by another engine that prefills, or by the
        one that decodes."""
        number, books, route = self.route.number, self._books, self.route
        again, pull = None, self.blocks.pull
        if self._prefills_left and (pull is None or self.route.is_for_prefill(pull)):
            avoid = route.prefill
            again = books.prefill_again(number, avoid, now_ns, offloadable=offloadable)
        if again is None:
            books.fall_back(number, now_ns)
            return self._start_decode(now_ns)
        self.watches.clear()
        routed, self.decode = route.routed, route.decode = again
        route.prefill, route.pools = routed.prefill, (routed.prefill_pool, routed.destination)
        return self._take_route(now_ns)

    def _start_decode(self, now_ns: int) -> list[AnyAction]:
        if not self.decode:
            self.decode = self._books.choose_decode(self.route.number) or ""
            if not self.decode:
                self.stage = _DECODING
                return self._fail(now_ns)
        self.stage = _DECODING
        self._legs_left -= 1
        return [ContinueOn(self.decode) if self.is_begun else StartDecode(self.decode)]

    def _first_token(self, _event: AnyEvent, now_ns: int) -> list[AnyAction]:
        if self.stage is _PREFILLING:
            self.is_begun = True
            return []
        self._books.begun(self.route.number, now_ns, is_streamed=True)
        # Engines that failed in the middle of an answer are judged by the rest of it.
        if self._suspects and not self._has_streamed:
            self._blame(now_ns)
        self._has_streamed = True
        self.stage = _STREAMING
        self.watches.clear()
        return []

    # Blocks in transit

    def _transfer_ended(self, event: TransferEnded, now_ns: int) -> list[AnyAction]:
        which = event.blocks
        blocks = self.blocks.get(which)
        if blocks is None:
            return []
        if blocks.ended(event.kind, at_destination=event.at_destination):
            is_whole = event.kind is _COMMITTED
            if is_whole and which is _HAND_OFF:
                self._books.handed_over(self.route.number, now_ns)
            num_bytes = event.num_bytes if is_whole else 0
            self._books.transfer_over(self.route.number, now_ns, num_bytes, blocks.link)
        if event.is_whole and which is _HAND_OFF and self.stage is _PREFILLING:
            self.watches.append(AnswerWatch(now_ns + ANSWER_NS, _PREFILLING))
            self._needs_alarm = True
        return self._check(which, now_ns) if blocks.fault else []

    def _pool_lost(self, event: PoolLost, now_ns: int) -> list[AnyAction]:
        blocks = self.blocks.get(event.blocks)
        if blocks is None:
            return []
        blocks.lose(blocks.fault or POOL_DOWN)
        return self._check(event.blocks, now_ns)

    def _check(self, which: Blocks, now_ns: int) -> list[AnyAction]:
        """Leave what would wait for blocks that cannot arrive any more."""
        blocks = self.blocks.open(which)
        if blocks is None or not blocks.is_lost:
            return []
        if which is _PULL:
            is_over = self.stage is _STREAMING
            return [] if is_over else self._lose_pull(blocks.fault, now_ns)
        return self._stop_prefill(blocks.fault, now_ns) if self.stage is _PREFILLING else []

    def _stop_prefill(self, why: str, now_ns: int) -> list[AnyAction]:
        engine = self.route.prefill
        if why in (WatchAlarm.TIMEOUT, WatchAlarm.STALLED):
            self._breakers.ended(engine, BreakerOutcome.FAILED, now_ns)
        died = engine if why == TransferEnd.ENGINE_LOST else ""
        stage = "prefill" if why in _OF_ENGINE else "transfer"
        fallback = FellBack(stage, why, f"the prefill leg was ended: {why}")
        return [_STOP_PREFILL, *self._leave_prefill(fallback, died, now_ns)]

    def _lose_pull(self, why: str, now_ns: int) -> list[AnyAction]:
        """Let the waiting engine compute the missing part of a pulled prefix."""
        self.blocks.pull_outcome = why
        self._books.lose_pull(self.route.number, now_ns)
        actions = self.blocks.abort(_PULL, f"the prefix is computed: {why}", now_ns)
        actions.append(FellBack("pull", why, "what has not arrived of the prefix is computed"))
        return actions

    def _woke(self, _event: AnyEvent, now_ns: int) -> list[AnyAction]:
        actions = self._look(now_ns)
        # What is not waited for now is never waited for again.
        self.watches = [watch for watch in self.watches if self._is_live(watch)]
        self._needs_alarm = True
        return actions

    def _look(self, now_ns: int) -> list[AnyAction]:
        """Look at the watches, and leave what one of them gives up."""
        actions: list[AnyAction] = []
        for watch in self.watches:
            if isinstance(watch, AnswerWatch):
                if self._is_live(watch) and now_ns >= watch.wakes_at_ns:
                    return [*actions, _STOP_PREFILL, *self._prefilled(PrefillDone(), now_ns)]
                continue
            beside = self.stage is _DECODING
            alarm = watch.look(now_ns, beside=beside) if self._is_live(watch) else None
            if alarm is None:
                continue
            if watch.blocks is not None and watch.blocks is self.blocks.pull:
                actions += self._lose_pull(alarm, now_ns)
            elif self.stage is _PREFILLING:
                return actions + self._stop_prefill(alarm, now_ns)
            else:
                # Decode does not wait for blocks that are late.
                actions += self.blocks.abort(_HAND_OFF, "the blocks are late", now_ns)
                self._books.fall_back(self.route.number, now_ns)
                actions.append(FellBack("transfer", alarm, "the local path is sooner by now"))
        return actions

    def _is_live(self, watch: Watch) -> bool:
        """Return True while a watch is of use."""
        if isinstance(watch, (AnswerWatch, PrefillWatch)):
            return self.stage is watch.stage
        return watch.blocks.is_coming

    # Another engine

    def _engine_broke(self, broke: EngineBroke, now_ns: int) -> list[AnyAction]:
        self._broke = broke
        if broke.is_suspect:
            self._suspects.append(self.decode)
        if not self._legs_left or not broke.can_continue:
            return self._fail(now_ns)
        actions = self.blocks.abort_all("the decode engine is gone", now_ns)
        if broke.may_have_died and not self._has_streamed:
            self.stage = Stage.HELD
            return [*actions, HoldBack(self.decode)]
        return actions + self._go_elsewhere(broke, now_ns)

    def _turn_came(self, _event: AnyEvent, now_ns: int) -> list[AnyAction]:
        if self._broke is None:
            return self._prefill_again(now_ns, offloadable=True)
        return self._go_elsewhere(self._broke, now_ns)

    def _go_elsewhere(self, broke: EngineBroke, now_ns: int) -> list[AnyAction]:
        other = self._books.elsewhere(self.route.number, self.decode, now_ns)
        if other is None:
            return self._fail(now_ns)
        wait_ns = self._fleet.retries.take(now_ns)
        retry = Retry(is_allowed=wait_ns is not None)
        if wait_ns is None:
            # Requests that do run again show whose fault it is.
            self._suspects = []
            return [retry, *self._fail(now_ns)]
        self._legs_left -= 1
        self.decode, self.stage = other, _DECODING
        return [retry, FellBack("decode", broke.kind, broke.why), ContinueOn(other, wait_ns)]

    # Ends

    def _finished(self, event: Finished, now_ns: int) -> list[AnyAction]:
        if self.stage is not _STREAMING:
            if self.stage is not _DECODING:
                return self._ended_early(event, now_ns)
            self._books.begun(self.route.number, now_ns, is_streamed=False)
        actions = self.blocks.judge_hand_off(event.found_tokens, now_ns)
        if self.blocks.pull is not None:
            actions += self.blocks.judge_pull(event.cached_tokens, now_ns)
        self._end(Outcome.FINISHED, now_ns)
        return actions

    def _ended_early(self, event: Finished, now_ns: int) -> list[AnyAction]:
        """The engine that prefills made all of the answer: no blocks are waited for."""
        if self.stage is _PREFILLING:
            self._books.prefilled(self.route.number, now_ns)
        actions: list[AnyAction] = []
        pull = self.blocks.pull
        if pull is not None and self.route.is_for_prefill(pull):
            actions += self.blocks.judge_pull(event.cached_tokens, now_ns)
        actions += self.blocks.abort_all("the answer ended before its blocks were needed", now_ns)
        self._end(Outcome.FINISHED, now_ns)
        return actions

    def _fail(self, now_ns: int) -> list[AnyAction]:
        return [*self._stop(Outcome.FAILED, now_ns), Fail()]

    def _stop(self, outcome: Outcome, now_ns: int) -> list[AnyAction]:
        runs = self.stage in (_PREFILLING, Stage.RELAYING)
        actions: list[AnyAction] = [_STOP_PREFILL] if runs else []
        actions += self.blocks.abort_all("the request ended early", now_ns)
        self._end(outcome, now_ns)
        return actions

    def _end(self, outcome: Outcome, now_ns: int) -> None:
        """Close every book."""
        self.stage, self.outcome = _ENDED, outcome
        self.watches.clear()
        if self._suspects:
            # A failure on several engines without success counts against none of them.
            is_alone = outcome is Outcome.FAILED and len(set(self._suspects)) == 1
            if outcome is Outcome.FINISHED or is_alone:
                self._blame(now_ns)
        self._books.end(self.route.number, now_ns)

    def _blame(self, now_ns: int) -> None:
        """It was the engines' fault: another one served the request, or there is none to ask."""
        suspects, self._suspects = self._suspects, []
        for name in suspects:
            self._breakers.ended(name, BreakerOutcome.FAILED, now_ns)


_HANDLE: dict[type[Event], Callable[[RequestLife, Any, int], list[AnyAction]]] = {
    Begun: RequestLife._begin,
    PrefillDone: RequestLife._prefilled,
    PrefillFailed: RequestLife._prefill_failed,
    DecodeWarmed: lambda _life, _event, _now_ns: [],  # `relay.py` goes on.
    TransferEnded: RequestLife._transfer_ended,
    PullNotAsked: lambda life, _event, now_ns: life._lose_pull(NOT_ASKED, now_ns),
    PoolLost: RequestLife._pool_lost,
    TurnCame: RequestLife._turn_came,
    EngineBroke: RequestLife._engine_broke,
    FirstToken: RequestLife._first_token,
    Finished: RequestLife._finished,
    Stopped: lambda life, event, now_ns: life._stop(event.outcome, now_ns),
    Woke: RequestLife._woke,
}
_HANDLERS = {
    event: (tuple(stage for stage in Stage if (stage, event) in TRANSITIONS), handle)
    for event, handle in _HANDLE.items()
}
"""By kind of event: the stages that have a use for it, and what it does."""
