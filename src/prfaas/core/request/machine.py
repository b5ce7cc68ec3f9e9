"""The machine that leads a request from its route to its end. `states.py` explains it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.core import dispatch
from prfaas.core.breakers import Told
from prfaas.core.hedging import RemotePath
from prfaas.core.request.actions import (
    Abort,
    AnyAction,
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
from prfaas.core.request.blocks import POOL_DOWN, UNKNOWN, Movement
from prfaas.core.request.events import (
    AnyEvent,
    Begun,
    Blocks,
    EngineBroke,
    Finished,
    FirstToken,
    Outcome,
    PoolLost,
    PrefillDone,
    PrefillFailed,
    PullNotAsked,
    Stopped,
    TransferEnded,
    TurnCame,
    Woke,
)
from prfaas.core.request.fleet import Fleet
from prfaas.core.request.states import TRANSITIONS, Stage
from prfaas.core.request.watch import Alarm, PrefillWatch, RouteWatch, Timeout
from prfaas.core.transfers import TransferEnd

WHOLE = "whole"
"""Outcome of a pull whose prefix the engine found."""
ENDED_EARLY = "ended_early"
"""The request ended, or its engine did, before the prefix was of use."""
NOT_ASKED = "not_asked"
BLOCKS_MISSING = "blocks_missing"
_OF_ENGINE = frozenset({TransferEnd.ENGINE_LOST, *Alarm})
"""Ends of a prefill leg that its engine is the cause of, not the transfer."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, as decided.

    Attributes:
        number: Of the request, in the driver's books.
        routed: The decision.
        decode: Engine that decodes.
        prefill: Another engine that prefills; "" where the one that decodes does.
        pools: Pool of the engine that prefills, and of the one that decodes.
        final_tokens: Prefix that decode should find once the hand-off is complete.
        deadline_ns: Instant at which the request's time is over; None without one.
    """

    number: int
    routed: dispatch.Routed
    decode: str
    prefill: str = ""
    pools: tuple[str, str] = ("", "")
    final_tokens: int = 0
    deadline_ns: int | None = None


class RequestLife:
    """One request, from its route to its end.

    Args:
        route: Where it goes.
        fleet: What all requests share.
    """

    def __init__(self, route: Route, fleet: Fleet) -> None:
        self._route, self._fleet = route, fleet
        self._books, self._breakers = fleet.books, fleet.breakers
        self.stage = Stage.ROUTED
        self.decode = route.decode
        """Engine that decodes, or is to."""
        self.outcome = Outcome.RUNNING
        self.hand_off: Movement | None = None
        self.pull: Movement | None = None
        self.pull_outcome = ""
        """What came of the pull, one of a bounded set; empty while an engine may wait for it."""
        self._watches: list[PrefillWatch | RouteWatch | Timeout] = []
        self._wakes_at_ns: int | None = None
        self._legs_left = fleet.limits.legs_max
        self._broke: EngineBroke | None = None
        """Why the last decode leg ended; None before any did."""
        self._fell_back = self._has_streamed = False
        self._suspects: list[str] = []
        """Engines that failed at it, by their fault or its own."""

    def step(self, event: AnyEvent, now_ns: int) -> list[AnyAction]:
        """Take an event.

        Args:
            event: What happened.
            now_ns: Time; not before that of the last step.

        Returns:
            What to do, in order; nothing for an event that is late.
        """
        if (self.stage, type(event)) not in TRANSITIONS:
            return []
        actions = list(self._on(event, now_ns))
        wakes_at_ns = min((watch.wakes_at_ns for watch in self._watches), default=None)
        if wakes_at_ns != self._wakes_at_ns:
            self._wakes_at_ns = wakes_at_ns
            actions.append(WakeAt(wakes_at_ns))
        return actions

    @property
    def awaited(self) -> Blocks | None:
        """Blocks that the next leg in the PD cluster has to wait for."""
        if self.hand_off is not None and self.hand_off.is_open and self.stage is Stage.DECODING:
            return Blocks.HAND_OFF
        return Blocks.PULL if self.pull is not None and self.pull.is_open else None

    def _on(self, event: AnyEvent, now_ns: int) -> Iterator[AnyAction]:
        match event:
            case Begun():
                yield from self._begin(now_ns)
            case PrefillDone():
                yield from self._prefilled(now_ns)
            case PrefillFailed():
                yield from self._prefill_failed(event, now_ns)
            case TransferEnded():
                yield from self._transfer_ended(event, now_ns)
            case PoolLost(blocks):
                yield from self._pool_lost(blocks, now_ns)
            case PullNotAsked():
                yield from self._lose_pull(NOT_ASKED, now_ns)
            case Woke():
                yield from self._woke(now_ns)
            case TurnCame():
                yield from self._turn_came(now_ns)
            case EngineBroke():
                yield from self._engine_broke(event, now_ns)
            case FirstToken():
                self._first_token(now_ns, is_streamed=True)
                self.stage = Stage.STREAMING
            case Finished():
                yield from self._finished(event, now_ns)
            case Stopped(outcome):
                yield from self._stop(outcome, now_ns)

    # The way to the first token

    def _begin(self, now_ns: int) -> Iterator[AnyAction]:
        route, routed = self._route, self._route.routed
        if routed.pulls:
            self.pull = Movement(routed.source, routed.destination, routed.hit_tokens)
            self._breakers.began(self.pull.link)
            self._watch_route(self.pull, routed.prefill, now_ns)
            self._watches.append(Timeout(now_ns + self._fleet.limits.transfer_timeout_ns))
            yield StartPull()
        if not route.prefill:
            yield from self._start_decode()
            return
        self.hand_off = Movement(*route.pools, route.final_tokens)
        if self.hand_off.crosses_link:
            self._breakers.began(self.hand_off.link)
            self._watch_route(self.hand_off, route.decode, now_ns)
        elif not self._watches:
            self._fleet.hedges.deposit(now_ns)
        num_new_tokens = routed.num_prompt_tokens - routed.present_tokens
        local = route.decode, num_new_tokens
        self._watches.append(PrefillWatch(self._fleet, route.number, local, now_ns))
        self.stage = Stage.PREFILLING
        yield StartPrefill(route.prefill)

    def _watch_route(self, blocks: Movement, local: str, now_ns: int) -> None:
        """Watch a route over a link, if its time was predicted."""
        self._fleet.hedges.deposit(now_ns)
        predicted_ns = self._route.routed.decision.predicted_ns
        if predicted_ns is None:
            return
        deadline_ns, ttft_max_ns = self._route.deadline_ns, self._fleet.limits.ttft_max_ns
        if ttft_max_ns is not None:
            at_ns = now_ns + ttft_max_ns
            deadline_ns = at_ns if deadline_ns is None else min(deadline_ns, at_ns)
        link_bytes = self._books.backlog_bytes(*blocks.link, now_ns)
        path = RemotePath(now_ns, predicted_ns, deadline_ns, link_bytes)
        watch = RouteWatch(self._fleet, self._route.number, local, blocks.link, path)
        self._watches.append(watch)

    def _prefilled(self, now_ns: int) -> Iterator[AnyAction]:
        number = self._route.number
        self._books.prefill_answered(number, now_ns)
        self._books.prefilled(number, now_ns)
        if self.hand_off is not None and not self.hand_off.crosses_link:
            self._books.handed_over(number, now_ns)
        yield from self._start_decode()

    def _prefill_failed(self, failure: PrefillFailed, now_ns: int) -> Iterator[AnyAction]:
        if failure.is_suspect:
            self._suspects.append(self._route.prefill)
        died = self._route.prefill if failure.may_have_died else ""
        fallback = FellBack("prefill", failure.kind, failure.why)
        yield from self._leave_prefill(fallback, died, now_ns)

    def _leave_prefill(self, fallback: FellBack, died: str, now_ns: int) -> Iterator[AnyAction]:
        """Go on without a prefill: the engine that decodes computes what has not arrived."""
        yield from self._abort_hand_off("the prefill leg was given up")
        yield from self._fall_back(fallback, now_ns)
        self._drop(PrefillWatch)
        if died:
            self.stage = Stage.HELD
            yield HoldBack(died)
        else:
            yield from self._start_decode()

    def _start_decode(self) -> Iterator[AnyAction]:
        self._drop(PrefillWatch)
        self.stage = Stage.DECODING
        self._legs_left -= 1
        yield StartDecode(self.decode)

    def _first_token(self, now_ns: int, *, is_streamed: bool) -> None:
        number = self._route.number
        self._watches = []
        self._books.prefilled(number, now_ns)
        self._books.loaded(number)
        if is_streamed and not self._fell_back:
            self._books.first_token(number, now_ns)
        # Engines that failed in the middle of an answer are judged by the rest of it.
        if not self._has_streamed:
            self._blame()
        self._has_streamed = self._has_streamed or is_streamed

    # Blocks on their way

    def _transfer_ended(self, event: TransferEnded, now_ns: int) -> Iterator[AnyAction]:
        blocks = self._movement(event.blocks)
        if blocks is None:
            return
        had_ended = blocks.end is not None
        blocks.ended(event.kind, at_destination=event.at_destination)
        if event.at_destination and not had_ended:
            if event.kind is TransferEnd.COMMITTED:
                self._books.handed_over(self._route.number, now_ns)
            self._books.transfer_over(self._route.number, now_ns)
            self._drop(RouteWatch)
        yield from self._faulty(event.blocks, blocks, now_ns)

    def _pool_lost(self, which: Blocks, now_ns: int) -> Iterator[AnyAction]:
        blocks = self._movement(which)
        if blocks is not None:
            blocks.fault = blocks.fault or POOL_DOWN
            yield from self._faulty(which, blocks, now_ns)

    def _faulty(self, which: Blocks, blocks: Movement, now_ns: int) -> Iterator[AnyAction]:
        """Leave what would wait for blocks that can not arrive any more."""
        if not blocks.fault or not blocks.is_open or blocks.end is TransferEnd.COMMITTED:
            return
        self._drop(RouteWatch)
        if which is Blocks.PULL:
            if self.stage is not Stage.STREAMING:
                yield from self._lose_pull(blocks.fault, now_ns)
        elif self.stage is Stage.PREFILLING:
            yield from self._stop_prefill(blocks.fault, now_ns)

    def _stop_prefill(self, why: str, now_ns: int) -> Iterator[AnyAction]:
        yield StopPrefill()
        engine = self._route.prefill
        if why in (Alarm.TIMEOUT, Alarm.STALLED):
            self._breakers.ended(engine, Told.FAILED)
        died = engine if why == TransferEnd.ENGINE_LOST else ""
        stage = "prefill" if why in _OF_ENGINE else "transfer"
        fallback = FellBack(stage, why, f"the prefill leg was ended: {why}")
        yield from self._leave_prefill(fallback, died, now_ns)

    def _lose_pull(self, why: str, now_ns: int) -> Iterator[AnyAction]:
        """What has not arrived of a pulled prefix is computed by the engine that waits for it."""
        self.pull_outcome = why
        self._books.lose_pull(self._route.number, now_ns)
        yield from self._abort_pull(f"the prefix is computed: {why}")
        self._fell_back = True
        yield FellBack("pull", why, "what has not arrived of the prefix is computed")

    def _woke(self, now_ns: int) -> Iterator[AnyAction]:
        for watch in tuple(self._watches):
            alarm = watch.look(now_ns) if watch in self._watches else None
            if alarm is None:
                continue
            if isinstance(watch, PrefillWatch):
                yield from self._stop_prefill(alarm, now_ns)
            elif self.pull is not None and self.pull.is_open:
                yield from self._lose_pull(alarm, now_ns)
            elif self.stage is Stage.PREFILLING:
                yield from self._stop_prefill(alarm, now_ns)
            else:
                yield from self._leave_hand_off(alarm, now_ns)

    def _leave_hand_off(self, why: str, now_ns: int) -> Iterator[AnyAction]:
        """Decode does not wait for blocks that are late."""
        yield from self._abort_hand_off("the blocks are late")
        fallback = FellBack("transfer", why, "the local path is sooner by now")
        yield from self._fall_back(fallback, now_ns)

    # Another engine

    def _engine_broke(self, broke: EngineBroke, now_ns: int) -> Iterator[AnyAction]:
        self._broke = broke
        if broke.is_suspect:
            self._suspects.append(self.decode)
        if not self._legs_left or not broke.can_continue:
            yield from self._fail(now_ns)
            return
        yield from self._abort_hand_off("the decode engine is gone")
        yield from self._end_pull_early("the decode engine is gone")
        if broke.may_have_died and not self._has_streamed:
            self.stage = Stage.HELD
            yield HoldBack(self.decode)
        else:
            yield from self._go_elsewhere(broke, now_ns)

    def _turn_came(self, now_ns: int) -> Iterator[AnyAction]:
        if self._broke is None:
            yield from self._start_decode()
        else:
            yield from self._go_elsewhere(self._broke, now_ns)

    def _go_elsewhere(self, broke: EngineBroke, now_ns: int) -> Iterator[AnyAction]:
        other = self._books.elsewhere(self._route.number, self.decode, now_ns)
        if other is None:
            yield from self._fail(now_ns)
            return
        wait_ns = self._fleet.retries.take(now_ns)
        yield Retry(is_allowed=wait_ns is not None)
        if wait_ns is None:
            # Requests that do run again show whose fault it is.
            self._suspects = []
            yield from self._fail(now_ns)
            return
        self._legs_left -= 1
        self._fell_back, self.decode, self.stage = True, other, Stage.DECODING
        yield FellBack("decode", broke.kind, broke.why)
        yield ContinueOn(other, wait_ns)

    # Ends

    def _finished(self, event: Finished, now_ns: int) -> Iterator[AnyAction]:
        if self.stage is Stage.DECODING:
            self._first_token(now_ns, is_streamed=False)
        hand_off = self.hand_off
        if hand_off is not None and hand_off.is_open:
            found, wanted = event.found_tokens, hand_off.num_tokens
            if found < wanted:
                why = f"decode found {found} of {wanted} tokens"
                yield FellBack("transfer", hand_off.failure, why)
            if found < wanted and hand_off.end is None:
                yield from self._abort_hand_off("decode went on without its blocks")
            elif hand_off.crosses_link:
                hand_off.is_open = False
                yield Release(Blocks.HAND_OFF)
        yield from self._judge_pull(event.cached_tokens)
        yield from self._end(Outcome.FINISHED, now_ns)

    def _judge_pull(self, cached_tokens: int) -> Iterator[AnyAction]:
        """It was not given up: did the engine find it?"""
        pull = self.pull
        if pull is None or not pull.is_open:
            return
        is_whole = cached_tokens >= pull.num_tokens
        failure = BLOCKS_MISSING if pull.failure == UNKNOWN else pull.failure
        self.pull_outcome = WHOLE if is_whole else failure
        if is_whole or pull.end is not None:
            pull.is_open = False
            yield Release(Blocks.PULL)
        else:
            yield from self._abort_pull("the engine went on without it")
        if not is_whole:
            why = f"the engine found {cached_tokens} of {pull.num_tokens} tokens"
            yield FellBack("pull", failure, why)

    def _fail(self, now_ns: int) -> Iterator[AnyAction]:
        yield from self._stop(Outcome.FAILED, now_ns)
        yield Fail()

    def _stop(self, outcome: Outcome, now_ns: int) -> Iterator[AnyAction]:
        if self.stage is Stage.PREFILLING:
            yield StopPrefill()
        yield from self._abort_hand_off("the request ended early")
        yield from self._end_pull_early("the request ended early")
        yield from self._end(outcome, now_ns)

    def _end(self, outcome: Outcome, now_ns: int) -> Iterator[AnyAction]:
        """Close every book."""
        self.stage, self.outcome, self._watches = Stage.ENDED, outcome, []
        # What several engines fail at and none serves is the request's fault.
        is_alone = outcome is Outcome.FAILED and len(set(self._suspects)) == 1
        if outcome is Outcome.FINISHED or is_alone:
            self._blame()
        self._books.end(self._route.number, now_ns)
        yield from ()

    # Steps

    def _movement(self, which: Blocks) -> Movement | None:
        return self.hand_off if which is Blocks.HAND_OFF else self.pull

    def _fall_back(self, fallback: FellBack, now_ns: int) -> Iterator[AnyAction]:
        self._fell_back = True
        self._books.fall_back(self._route.number, now_ns)
        yield fallback

    def _abort_hand_off(self, why: str) -> Iterator[AnyAction]:
        if self.hand_off is not None and self.hand_off.is_open:
            self.hand_off.is_open = False
            if self.hand_off.crosses_link:
                self._drop(RouteWatch)
                self._breakers.ended(self.hand_off.link, Told.NOTHING)
                yield Abort(Blocks.HAND_OFF, why)

    def _end_pull_early(self, why: str) -> Iterator[AnyAction]:
        if self.pull is not None and self.pull.is_open:
            self.pull_outcome = ENDED_EARLY
            yield from self._abort_pull(why)

    def _abort_pull(self, why: str) -> Iterator[AnyAction]:
        if self.pull is not None and self.pull.is_open:
            self.pull.is_open = False
            self._drop(RouteWatch, Timeout)
            self._breakers.ended(self.pull.link, Told.NOTHING)
            yield Abort(Blocks.PULL, why)

    def _drop(self, *kinds: type[PrefillWatch | RouteWatch | Timeout]) -> None:
        """Watch for these no longer."""
        self._watches = [watch for watch in self._watches if not isinstance(watch, kinds)]

    def _blame(self) -> None:
        """It was the engines' fault: another one served the request, or there is none to ask."""
        suspects, self._suspects = self._suspects, []
        for name in suspects:
            self._breakers.ended(name, Told.FAILED)
