"""The dispatcher's books of requests under way, as the machine keeps them for both drivers.

Execution of actions: the method of a driver for each type of action.

Gateway and simulator have one subclass each. A driver without a method for an action cannot be
made, and the type of each method is checked against the action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

from prfaas.core.control.split import instance_of
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.route_finder import Considered
from prfaas.core.dispatch.types import Arrival, RefusedRequest, Routed
from prfaas.core.request.actions import (
    ACTIONS,
    Abort,
    Action,
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
    WarmDecode,
)
from prfaas.core.resilience.quarantine import Target
from prfaas.core.routing.decision import Path
from prfaas.records import methods_of


class Again(NamedTuple):
    """A new route of a request whose prefill was given up."""

    routed: Routed
    decode: str


class DispatcherBooks(ABC):
    """All but what only a driver knows: prompts, caches, and who is well. `number` is a request's.
    No method raises or takes long."""

    dispatcher: Dispatcher
    has_roles: bool
    """Instances of the PD cluster prefill or decode, and none does both."""
    _broken: set[Target]
    """Instances, and links between two pools, that a breaker keeps from new requests."""
    _asked: dict[int, Any]
    """Open requests by number, as their driver has them."""

    def set_broken(self, target: Target, now_ns: int, *, broken: bool) -> None:
        """Open or close the breaker of an instance, or of a link."""
        if (target in self._broken) == broken:
            return
        (self._broken.add if broken else self._broken.discard)(target)
        if isinstance(target, str):
            self._apply(target, now_ns)
        else:
            self._apply_link(*target)

    @abstractmethod
    def _apply(self, name: str, now_ns: int) -> None:
        """Report to the dispatcher whether an instance gets new requests."""

    @abstractmethod
    def _apply_link(self, source: str, destination: str) -> list[int]:
        """Report to the dispatcher whether a link carries new transfers; what that loses."""

    @abstractmethod
    def as_now(self, number: int, avoid: str, *, offloadable: bool) -> Arrival:
        """An open request as it would arrive now, to be sent to another engine than `avoid`."""

    @abstractmethod
    def hits(self, number: int) -> Mapping[str, int]:
        """Usable cached prefix of an open request by pool and by engine, tokens, as of now."""

    def _route(
        self, asked: Any, arrival: Arrival, now_ns: int
    ) -> tuple[Routed | RefusedRequest, Considered]:
        """Decide for a request that its driver has as `asked`; also its possible routes."""
        considered = self.dispatcher.consider(arrival, now_ns)
        found = self.dispatcher.decide(arrival, considered, now_ns)
        if isinstance(found, Routed):
            self._asked[arrival.request_id] = asked
        else:
            self._asked.pop(arrival.request_id, None)
        return found, considered

    def choose_decode(self, number: int, avoid: str = "") -> str | None:
        """The engine that decodes an open request, chosen when first asked for; None without."""
        return self.dispatcher.requests.choose_decode(number, avoid)

    def spared(self, avoid: str) -> str | None:
        """A PD engine that is well and gets no requests but for its breaker; None without one."""
        return None

    def lane(self, name: str) -> str:
        """Name of the dispatcher for a PD engine as one that prefills what it decodes."""
        return name

    def route_again(self, number: int, avoid: str, now_ns: int) -> Routed | RefusedRequest:
        """Route an open request anew, within the PD cluster, to another engine than `avoid`."""
        arrival = self.as_now(number, avoid, offloadable=False)
        return self.dispatcher.arrive(arrival, now_ns, again=True)

    def elsewhere(self, number: int, avoid: str, now_ns: int) -> str | None:
        """Route a request again whose decode engine broke; None without another one."""
        found = self.route_again(number, avoid, now_ns)
        if isinstance(found, RefusedRequest):
            return self.spared(avoid)
        # With separate roles the decode instance prefills missing blocks; without one,
        # one that prefills decodes as well.
        name = found.decode or self.choose_decode(number, avoid) or found.prefill
        self.fall_back(number, now_ns)
        return name

    def prefill_again(
        self, number: int, avoid: str, now_ns: int, *, offloadable: bool
    ) -> Again | None:
        """Route a request anew whose prefill was given up; None if who decodes it prefills it."""
        dispatcher = self.dispatcher
        if not self.has_roles and not offloadable:
            return None
        arrival = self.as_now(number, avoid, offloadable=offloadable)
        found = dispatcher.foresee(arrival, now_ns)
        if isinstance(found, RefusedRequest) or not self._is_better(number, arrival, found, now_ns):
            return None
        routed = dispatcher.arrive(arrival, now_ns, again=True)
        decode = self.choose_decode(number)
        if isinstance(routed, RefusedRequest) or decode is None:
            return None
        return Again(routed, decode)

    def _is_better(self, number: int, arrival: Arrival, found: Routed, now_ns: int) -> bool:
        """Return True if a route is sooner than a prefill by the instance that is to decode."""
        if found.decision.path is Path.LOCAL and (
            not self.has_roles or (arrival.shippable_tokens or 1) <= found.present_tokens
        ):
            return False
        expected, decode = self.dispatcher.expected, self.choose_decode(number) or ""
        present = found.present_tokens
        new = found.facts.num_prompt_tokens - present
        lane = self.lane(decode)
        if not self.has_roles or not expected.decoder_prefills(lane, new, present, now_ns):
            return True
        there_ns = found.decision.predicted_ns
        here_ns = self.local_path_ns(number, decode, now_ns)
        return there_ns is not None and here_ns is not None and there_ns < here_ns

    def prefill_left_ns(self, number: int, now_ns: int) -> int | None:
        """Expected time until a request's prefill leg ends, ns; None is unknown."""
        return self.dispatcher.expected.prefill_left_ns(number, now_ns)

    def _look_up(self, numbers: Iterable[int], now_ns: int) -> None:
        """Look up cached prefixes of open requests once more."""
        for number in numbers:
            if number in self._asked:
                self.dispatcher.requests.look_up(number, self.hits(number), now_ns)

    def prefilled(self, number: int, now_ns: int) -> None:
        """The prefill leg has answered."""
        if (following := self.dispatcher.requests.prefilled(number, now_ns)) is not None:
            self._look_up((following,), now_ns)

    def begin_relay(self, number: int, now_ns: int) -> bool:
        """The engine that prefilled goes on with the answer; returns False if it has other work."""
        return self.dispatcher.requests.begin_relay(number, now_ns)

    def end_relay(self, number: int) -> None:
        """It does so no more."""
        self.dispatcher.requests.instances.relays.pop(number, None)

    def handed_over(self, number: int, now_ns: int) -> None:
        """All blocks of a request are where it is decoded."""
        if self.has_roles:
            self.dispatcher.requests.prompt_ready(number, now_ns)

    def begun(self, number: int, now_ns: int, *, is_streamed: bool) -> None:
        """The engine that decodes has begun to answer: the blocks of a request are not needed in
        its pool any more."""
        following = self.dispatcher.requests.begun(number, now_ns, is_streamed=is_streamed)
        if following is not None:
            self._look_up((following,), now_ns)

    def fall_back(self, number: int, now_ns: int) -> None:
        """The prefill of a request was aborted: who decodes it prefills it too."""
        self.dispatcher.requests.fall_back(number, now_ns)

    def lose_pull(self, number: int, now_ns: int) -> None:
        """The prefix that a prefill in the PD cluster pulls will not come whole."""
        self.dispatcher.requests.lose_pull(number, now_ns)

    def transfer_over(
        self,
        number: int,
        now_ns: int,
        num_bytes: int = 0,
        link: tuple[str, str] | None = None,
    ) -> None:
        """The end of a request's transfer over a link was reported; None is all links."""
        self.dispatcher.requests.transfer_over(number, now_ns, num_bytes, link)

    def end(self, number: int, now_ns: int) -> None:
        """A request is over."""
        self._asked.pop(number, None)
        self.dispatcher.requests.end(number, now_ns)

    def expected_prefill_ns(self, number: int) -> int | None:
        """Expected time of a request's prefill leg, ns; None is unknown."""
        return self.dispatcher.expected.prefill_ns(number)

    def expected_local_ns(
        self,
        name: str,
        num_new_tokens: int,
        prefix_tokens: int,
        now_ns: int,
        *,
        apart: bool = False,
    ) -> int | None:
        """Expected time of a prefill that is sent to a PD engine now, ns; None is unknown."""
        expected, lane = self.dispatcher.expected, self.lane(name)
        return expected.local_prefill_ns(lane, num_new_tokens, prefix_tokens, now_ns, apart=apart)

    def local_path_ns(
        self, number: int, name: str, now_ns: int, *, beside: bool = False
    ) -> int | None:
        """Predicted time to first token of a request that takes the local path now, ns."""
        routed = self.dispatcher.requests.route_of(number)
        if routed is None:
            return None
        name = name or self.choose_decode(number) or ""
        hits = self.hits(number)
        held_tokens = max(hits.get(routed.destination, 0), hits.get(instance_of(name), 0))
        return self.dispatcher.expected.local_path_ns(
            number, self.lane(name), held_tokens, now_ns, beside=beside
        )

    def backlog_bytes(self, source: str, destination: str, now_ns: int) -> int | None:
        """Reserved bytes that a link has not carried yet; None is unknown."""
        seen = self.dispatcher.links.between(source, destination).book.latest(now_ns)
        return None if seen is None else seen.backlog_bytes

    def link_bits_per_s(self, source: str, destination: str, now_ns: int) -> float | None:
        """Throughput of a link; None is unknown."""
        seen = self.dispatcher.links.between(source, destination).book.latest(now_ns)
        return None if seen is None else seen.bits_per_s


Methods: TypeAlias = dict[type[Action], Callable[[Any, Any], None]]


class Executor(ABC):
    """Executes the actions of one request; see `actions.py` for the effect of each."""

    __slots__ = ()
    methods: ClassVar[Methods]
    """Methods of the driver by type of action."""

    def __init_subclass__(cls) -> None:
        cls.methods = methods_of(cls, ACTIONS)

    @abstractmethod
    def _start_pull(self, action: StartPull) -> None: ...

    @abstractmethod
    def _start_prefill(self, action: StartPrefill) -> None: ...

    @abstractmethod
    def _await_blocks(self, action: AwaitBlocks) -> None: ...

    @abstractmethod
    def _warm_decode(self, action: WarmDecode) -> None: ...

    @abstractmethod
    def _stop_prefill(self, action: StopPrefill) -> None: ...

    @abstractmethod
    def _start_decode(self, action: StartDecode) -> None: ...

    @abstractmethod
    def _hold_back(self, action: HoldBack) -> None: ...

    @abstractmethod
    def _continue_on(self, action: ContinueOn) -> None: ...

    @abstractmethod
    def _abort(self, action: Abort) -> None: ...

    @abstractmethod
    def _release(self, action: Release) -> None: ...

    @abstractmethod
    def _fell_back(self, action: FellBack) -> None: ...

    @abstractmethod
    def _retry(self, action: Retry) -> None: ...

    @abstractmethod
    def _fail(self, action: Fail) -> None: ...

    @abstractmethod
    def _wake_at(self, action: WakeAt) -> None: ...
