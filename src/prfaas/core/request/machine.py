"""The machine that leads a request from its route to its end. `states.py` explains it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from prfaas.core.request.blocks import POOL_DOWN, Movement, OnTheWay
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
from prfaas.core.request.watch import Alarm, PrefillWatch, RouteWatch, Timeout, Watch
from prfaas.core.resilience.circuit_breaker import Told
from prfaas.core.resilience.late_routes import RemotePath
from prfaas.core.transfer.transfer_state import TransferEnd

NOT_ASKED = "not_asked"
"""Outcome of a pull that no pool was asked for."""
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
    routed: types.Routed
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
        self.blocks = OnTheWay(fleet.breakers)
        """Blocks that it waits for."""
        self._watches: list[Watch] = []
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
        if isinstance(event, Woke):
            self._wakes_at_ns = None
        actions = list(self._on(event, now_ns))
        live = (watch.wakes_at_ns for watch in self._watches if self._is_live(watch))
        wakes_at_ns = min(live, default=None)
        if wakes_at_ns != self._wakes_at_ns:
            self._wakes_at_ns = wakes_at_ns
            actions.append(WakeAt(wakes_at_ns))
        return actions

    @property
    def awaited(self) -> Blocks | None:
        """Blocks that the next leg in the PD cluster has to wait for."""
        if self.stage is Stage.DECODING and self.blocks.open(Blocks.HAND_OFF) is not None:
            return Blocks.HAND_OFF
        return None if self.blocks.open(Blocks.PULL) is None else Blocks.PULL

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
        route, routed, limits = self._route, self._route.routed, self._fleet.limits
        if route.prefill or routed.pulls:
            self._fleet.hedges.deposit(now_ns)
        if routed.pulls:
            pull = Movement(routed.source, routed.destination, routed.hit_tokens)
            self.blocks.begin(Blocks.PULL, pull)
            self._watch_route(Blocks.PULL, pull.link, routed.prefill, now_ns)
            self._watches.append(Timeout(Blocks.PULL, now_ns + limits.transfer_timeout_ns))
            yield StartPull()
        if not route.prefill:
            yield from self._start_decode()
            return
        hand_off = Movement(*route.pools, route.final_tokens)
        self.blocks.begin(Blocks.HAND_OFF, hand_off)
        if hand_off.crosses_link:
            self._watch_route(Blocks.HAND_OFF, hand_off.link, route.decode, now_ns)
        local = route.decode, routed.facts.num_prompt_tokens - routed.present_tokens
        self._watches.append(PrefillWatch(self._fleet, route.number, local, now_ns))
        self.stage = Stage.PREFILLING
        yield StartPrefill(route.prefill)

    def _watch_route(self, of: Blocks, link: tuple[str, str], local: str, now_ns: int) -> None:
        """Watch a route over a link, if its time was predicted."""
        predicted_ns = self._route.routed.decision.predicted_ns
        if predicted_ns is None:
            return
        deadline_ns, ttft_max_ns = self._route.deadline_ns, self._fleet.limits.ttft_max_ns
        if ttft_max_ns is not None:
            at_ns = now_ns + ttft_max_ns
            deadline_ns = at_ns if deadline_ns is None else min(deadline_ns, at_ns)
        link_bytes = self._books.backlog_bytes(*link, now_ns)
        path = RemotePath(now_ns, predicted_ns, deadline_ns, link_bytes)
        watch = RouteWatch(self._fleet, self._route.number, local, of, link, path)
        self._watches.append(watch)

    def _prefilled(self, now_ns: int) -> Iterator[AnyAction]:
        number = self._route.number
        self._books.prefill_answered(number, now_ns)
        self._books.prefilled(number, now_ns)
        hand_off = self.blocks.get(Blocks.HAND_OFF)
        if hand_off is not None and not hand_off.crosses_link:
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
        yield from self.blocks.abort(Blocks.HAND_OFF, "the prefill leg was aborted")
        yield from self._fall_back(fallback, now_ns)
        if died:
            self.stage = Stage.HELD
            yield HoldBack(died)
        else:
            yield from self._start_decode()

    def _start_decode(self) -> Iterator[AnyAction]:
        self.stage = Stage.DECODING
        self._legs_left -= 1
        yield StartDecode(self.decode)

    def _first_token(self, now_ns: int, *, is_streamed: bool) -> None:
        number = self._route.number
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
        blocks = self.blocks.get(event.blocks)
        if blocks is None:
            return
        if blocks.ended(event.kind, at_destination=event.at_destination):
            if event.kind is TransferEnd.COMMITTED:
                self._books.handed_over(self._route.number, now_ns)
            self._books.transfer_over(self._route.number, now_ns)
        yield from self._check(event.blocks, now_ns)

    def _pool_lost(self, which: Blocks, now_ns: int) -> Iterator[AnyAction]:
        blocks = self.blocks.get(which)
        if blocks is not None:
            blocks.fault = blocks.fault or POOL_DOWN
            yield from self._check(which, now_ns)

    def _check(self, which: Blocks, now_ns: int) -> Iterator[AnyAction]:
        """Leave what would wait for blocks that cannot arrive any more."""
        blocks = self.blocks.open(which)
        if blocks is None or not blocks.is_lost:
            return
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
        self.blocks.pull_outcome, self._fell_back = why, True
        self._books.lose_pull(self._route.number, now_ns)
        yield from self.blocks.abort(Blocks.PULL, f"the prefix is computed: {why}")
        yield FellBack("pull", why, "what has not arrived of the prefix is computed")

    def _woke(self, now_ns: int) -> Iterator[AnyAction]:
        for watch in self._watches:
            alarm = watch.look(now_ns) if self._is_live(watch) else None
            if alarm is None:
                continue
            if watch.of is Blocks.PULL:
                yield from self._lose_pull(alarm, now_ns)
            elif self.stage is Stage.PREFILLING:
                yield from self._stop_prefill(alarm, now_ns)
            else:
                # Decode does not wait for blocks that are late.
                yield from self.blocks.abort(Blocks.HAND_OFF, "the blocks are late")
                fallback = FellBack("transfer", alarm, "the local path is sooner by now")
                yield from self._fall_back(fallback, now_ns)

    def _is_live(self, watch: Watch) -> bool:
        """Return True while a watch is of use."""
        if self.stage in (Stage.STREAMING, Stage.ENDED):
            return False
        if watch.of is None:
            return self.stage is Stage.PREFILLING
        blocks = self.blocks.get(watch.of)
        return blocks is not None and blocks.is_coming

    # Another engine

    def _engine_broke(self, broke: EngineBroke, now_ns: int) -> Iterator[AnyAction]:
        self._broke = broke
        if broke.is_suspect:
            self._suspects.append(self.decode)
        if not self._legs_left or not broke.can_continue:
            yield from self._fail(now_ns)
            return
        yield from self.blocks.abort_all("the decode engine is gone")
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
        yield from self.blocks.judge_hand_off(event.found_tokens)
        yield from self.blocks.judge_pull(event.cached_tokens)
        self._end(Outcome.FINISHED, now_ns)

    def _fail(self, now_ns: int) -> Iterator[AnyAction]:
        yield from self._stop(Outcome.FAILED, now_ns)
        yield Fail()

    def _stop(self, outcome: Outcome, now_ns: int) -> Iterator[AnyAction]:
        if self.stage is Stage.PREFILLING:
            yield StopPrefill()
        yield from self.blocks.abort_all("the request ended early")
        self._end(outcome, now_ns)

    def _end(self, outcome: Outcome, now_ns: int) -> None:
        """Close every book."""
        self.stage, self.outcome = Stage.ENDED, outcome
        # What several engines fail at and none serves is the request's fault.
        is_alone = outcome is Outcome.FAILED and len(set(self._suspects)) == 1
        if outcome is Outcome.FINISHED or is_alone:
            self._blame()
        self._books.end(self._route.number, now_ns)

    # Steps

    def _fall_back(self, fallback: FellBack, now_ns: int) -> Iterator[AnyAction]:
        self._fell_back = True
        self._books.fall_back(self._route.number, now_ns)
        yield fallback

    def _blame(self) -> None:
        """It was the engines' fault: another one served the request, or there is none to ask."""
        suspects, self._suspects = self._suspects, []
        for name in suspects:
            self._breakers.ended(name, Told.FAILED)
