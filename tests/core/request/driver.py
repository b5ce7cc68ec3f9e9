"""A driver of the request machine without engines: books that record, and legs that may fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from prfaas.core.dispatch.types import Routed
from prfaas.core.request.actions import (
    Abort,
    Action,
    AnyAction,
    AwaitBlocks,
    ContinueOn,
    Fail,
    FellBack,
    HoldBack,
    Release,
    StartDecode,
    StartPrefill,
    StartPull,
    StopPrefill,
    WakeAt,
    WarmDecode,
)
from prfaas.core.request.driver import Again, DispatcherBooks
from prfaas.core.request.events import AnyEvent, Begun, Blocks, Event, Woke
from prfaas.core.request.fleet import RequestLimits, SharedState
from prfaas.core.request.held import OF_LEG, life_of
from prfaas.core.request.machine import Route
from prfaas.core.request.states import TRANSITIONS, Stage
from prfaas.core.resilience.circuit_breaker import BreakerOutcome
from prfaas.core.resilience.quarantine import Guards
from prfaas.core.routing.decision import Decision, Path, Reason, RoutingFacts
from prfaas.units import NS_PER_S

LIMITS = RequestLimits(prefill_timeout_ns=60 * NS_PER_S, transfer_timeout_ns=30 * NS_PER_S)
NUMBER = 7


@dataclass
class ScriptedBooks:
    """Books that know what a test tells them, and count what they are told."""

    others: list[str] = field(default_factory=list)
    """Engines that decode, the one that is tried first not among them."""
    first: str | None = "d"
    """Engine that decodes where the route names none."""
    prefill_ns: int | None = None
    local_ns: int | None = None
    left_ns: int | None = None
    again: list[Again] = field(default_factory=list)
    """Routes to take when a prefill is given up."""
    told: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    """Bytes of transfers that landed."""
    link_bytes: int | None = None
    """Bytes that a link of 8 Mbit/s has to carry."""
    is_busy: bool = False
    relaying: int = 0

    def prefilled(self, number: int, now_ns: int) -> None:
        self.told["prefilled"] += 1

    def handed_over(self, number: int, now_ns: int) -> None:
        self.told["handed_over"] += 1

    def transfer_over(
        self, number: int, now_ns: int, num_bytes: int, link: tuple[str, str]
    ) -> None:
        self.told["transfer_over"] += 1
        self.num_bytes += num_bytes

    def begun(self, number: int, now_ns: int, *, is_streamed: bool) -> None:
        self.told["begun"] += 1

    def begin_relay(self, number: int, now_ns: int) -> bool:
        self.relaying += not self.is_busy
        return not self.is_busy

    def end_relay(self, number: int) -> None:
        self.relaying -= 1

    def fall_back(self, number: int, now_ns: int) -> None:
        self.told["fall_back"] += 1

    def lose_pull(self, number: int, now_ns: int) -> None:
        self.told["lose_pull"] += 1

    def end(self, number: int, now_ns: int) -> None:
        assert number == NUMBER
        self.told["end"] += 1

    def choose_decode(self, number: int, avoid: str = "") -> str | None:
        return self.first

    def elsewhere(self, number: int, avoid: str, now_ns: int) -> str | None:
        return next((name for name in self.others if name != avoid), None)

    def prefill_again(
        self, number: int, avoid: str, now_ns: int, *, offloadable: bool
    ) -> Again | None:
        self.told["prefill_again"] += 1
        self.told["offloadable_again"] += offloadable
        return self.again.pop(0) if self.again else None

    def prefill_left_ns(self, number: int, now_ns: int) -> int | None:
        return self.left_ns

    def expected_prefill_ns(self, number: int) -> int | None:
        return self.prefill_ns

    def expected_local_ns(
        self,
        name: str,
        num_new_tokens: int,
        prefix_tokens: int,
        now_ns: int,
        *,
        apart: bool = False,
    ) -> int | None:
        return self.local_ns

    def local_path_ns(
        self, number: int, name: str, now_ns: int, *, beside: bool = False
    ) -> int | None:
        return self.local_ns

    def backlog_bytes(self, source: str, destination: str, now_ns: int) -> int | None:
        return self.link_bytes

    def link_bits_per_s(self, source: str, destination: str, now_ns: int) -> float | None:
        return None if self.link_bytes is None else 8e6


@dataclass
class ScriptedBreakers:
    """Breakers that never open."""

    began_of: Counter[str | tuple[str, str]] = field(default_factory=Counter)
    failed: list[str | tuple[str, str]] = field(default_factory=list)

    def began(self, target: str | tuple[str, str], now_ns: int) -> None:
        self.began_of[target] += 1

    def ended(self, target: str | tuple[str, str], told: BreakerOutcome, now_ns: int) -> None:
        if told is BreakerOutcome.FAILED:
            self.failed.append(target)


def again(
    path: Path = Path.LOCAL, prefill: str = "p2", decode: str = "d2", *, pulls: bool = False
) -> Again:
    """Another route of the same request."""
    return Again(routed(path, pulls=pulls)._replace(prefill=prefill), decode)


def routed(path: Path, *, pulls: bool = False, predicted_ns: int | None = None) -> Routed:
    """A route of a prompt of 8,000 tokens, of which 1,000 are held where it is decoded."""
    decision = Decision(
        path,
        Reason.ABOVE_THRESHOLD,
        num_new_tokens=7000,
        offload_threshold=4000,
        predicted_remote_ns=predicted_ns if path is Path.REMOTE else None,
        predicted_local_ns=predicted_ns if path is Path.LOCAL else None,
        pull_tokens=4000 if pulls and path is Path.LOCAL else 0,
    )
    source = "far" if path is Path.REMOTE or pulls else ""
    facts = RoutingFacts(8000, pd_hit_tokens=1000, prfaas_hit_tokens=5000 if pulls else 0)
    hit_tokens = 5000 if pulls else 1000
    pool = "far" if path is Path.REMOTE else "pd"
    pulled_from = "far" if path is Path.LOCAL else "far-b"
    return Routed(
        decision,
        facts,
        "c",
        "p",
        "d",
        source,
        "pd",
        hit_tokens,
        100,
        pool,
        1000,
        pulled_from if pulls else "",
    )


class Driver:
    """Leads one request, and checks after every step what has to hold after all of them."""

    def __init__(
        self,
        found: Routed,
        *,
        apart: bool = True,
        decode: str = "d",
        books: ScriptedBooks | None = None,
        limits: RequestLimits = LIMITS,
        holds: bool = False,
        relay_max: int = 0,
    ) -> None:
        self.books, self.breakers = books or ScriptedBooks(), ScriptedBreakers()
        shared = cast(DispatcherBooks, self.books), cast(Guards, self.breakers)
        self.fleet = SharedState(*shared, limits)
        is_remote = found.decision.path is Path.REMOTE
        pools = found.prefill_pool, found.destination
        self.life = life_of(
            Route(
                NUMBER,
                found,
                decode,
                "p" if apart or is_remote else "",
                pools,
                7680,
                holds=holds,
                relay_max=relay_max,
            ),
            self.fleet,
        )
        self.now_ns = 0
        self.leg = ""
        """Engine whose leg runs; empty without one."""
        self.is_held = False
        """True if a leg is held for blocks."""
        self.num_decode_legs = 0
        self.wakes_at_ns: int | None = None
        self.is_warming = False
        self.open: set[Blocks] = set()
        self.closed: list[Blocks] = []
        self.taken: set[tuple[Stage, type[Event], Stage]] = set()
        self.seen: Counter[type[Action]] = Counter()

    def begin(self) -> list[AnyAction]:
        return self.step(Begun())

    def step(self, event: AnyEvent, after_ns: int = 0) -> list[AnyAction]:
        self.now_ns += after_ns
        before, told = self.life.stage, self.books.told.total()
        is_late = self.is_held and isinstance(event, OF_LEG)
        actions = self.life.step(event, self.now_ns)
        after = TRANSITIONS.get((before, type(event)))
        if after is None or is_late:
            assert not actions
            assert (self.life.stage, self.books.told.total()) == (before, told)
        else:
            assert self.life.stage in after, (before, event, self.life.stage)
            self.taken.add((before, type(event), self.life.stage))
        if isinstance(event, Woke):
            self.wakes_at_ns = None
        for action in actions:
            self._do(action)
        if isinstance(event, Woke) and self.wakes_at_ns is not None:
            assert self.wakes_at_ns > self.now_ns, "or its driver would wake it for ever"
        self._check()
        return actions

    def _do(self, action: AnyAction) -> None:
        self.seen[type(action)] += 1
        if isinstance(
            action, StartPrefill | StartDecode | ContinueOn | StopPrefill | HoldBack | Fail
        ):
            self.is_held = False
        match action:
            case StartPull():
                self.open.add(Blocks.PULL)
                self.closed = [blocks for blocks in self.closed if blocks is not Blocks.PULL]
            case StartPrefill(engine, relay_tokens):
                assert 0 <= relay_tokens <= self.life.route.relay_max
                self.leg = engine
                self._begin_hand_off()
            case AwaitBlocks():
                self.leg, self.is_held = "", True
                if self.life.stage is Stage.PREFILLING:
                    self._begin_hand_off()
            case WarmDecode(engine):
                assert self.life.stage is Stage.RELAYING
                assert engine
                self.is_warming = True
            case StopPrefill():
                self.leg = ""
            case StartDecode(engine) | ContinueOn(engine):
                self.num_decode_legs += 1
                self.leg = engine
            case Abort(blocks) | Release(blocks):
                self.open.remove(blocks)
                self.closed.append(blocks)
            case WakeAt(at_ns):
                self.wakes_at_ns = at_ns
            case HoldBack() | Fail():
                self.leg = ""

    def _begin_hand_off(self) -> None:
        """Another prefill than before hands other blocks over."""
        self.closed = [blocks for blocks in self.closed if blocks is not Blocks.HAND_OFF]
        hand_off = self.life.blocks.get(Blocks.HAND_OFF)
        if hand_off is not None and hand_off.crosses_link:
            self.open.add(Blocks.HAND_OFF)

    def _check(self) -> None:
        is_over = self.life.stage is Stage.ENDED
        assert self.books.told["end"] == is_over
        assert (self.life.outcome.value != "running") == is_over
        assert self.num_decode_legs <= LIMITS.legs_max
        assert len(self.closed) == len(set(self.closed))
        if is_over:
            assert not self.open
            assert not self.life.watches
        is_relaying = self.life.stage is Stage.RELAYING
        if is_over:
            # The dispatcher's books end it with the request.
            self.books.relaying = 0
        assert self.books.relaying == is_relaying
        if is_relaying:
            assert self.wakes_at_ns is not None, "or it waits for ever"
            assert self.is_warming or self.life.blocks.open(Blocks.HAND_OFF) is not None
        if is_relaying or self.life.stage in (Stage.PREFILLING, Stage.DECODING):
            assert bool(self.leg) is not self.is_held
        if self.is_held and not is_over:
            assert self.life.route.holds
            assert self.wakes_at_ns is not None, "or it waits for ever"
        if self.life.route.holds:
            assert self.life.awaited is None


def kinds(actions: list[AnyAction]) -> list[type[Action]]:
    return [type(action) for action in actions if not isinstance(action, WakeAt)]


def fallbacks(actions: list[AnyAction]) -> list[tuple[str, str]]:
    return [(each.stage, each.reason) for each in actions if isinstance(each, FellBack)]


def relaying(found: Routed | None = None, **more: object) -> Driver:
    """A request whose blocks take a second over its link, and may have 100 more tokens."""
    more.setdefault("books", ScriptedBooks(link_bytes=10**6))
    return Driver(found or routed(Path.REMOTE), relay_max=100, **more)  # type: ignore[arg-type]
