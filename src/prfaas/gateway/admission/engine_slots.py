"""Requests that an engine would only queue wait in the gateway, where tenants take turns."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.admission.concurrency_slots import SlotLimit
from prfaas.core.admission.fair_slots import FairSlots, widest
from prfaas.core.dispatch.types import Routed
from prfaas.core.routing.decision import Path
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.openai.fields import bad
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.tenancy.tenants import Tenants
from prfaas.units import NS_PER_S

LOOK_S = 1.0
"""Interval at which a waiting request checks for changed engines."""
THRESHOLD_NS = NS_PER_S // 10
"""Time for which the lowest threshold is taken to hold: links are as many as pairs of pools."""
EXPLAINED_NS = NS_PER_S // 4
"""Prefill before an engine that explains why requests wait there."""
LOCAL, REMOTE = 0, 1
"""Lanes of prefill: engines of the PD cluster, and of PrfaaS clusters."""


class Capacity(NamedTuple):
    """Limits of the engines that are ready."""

    num_slots: int
    """Sequences that PD engines run at once; 0 without any."""
    num_engines: tuple[int, ...] = ()


class SlotTurn:
    """The turn of one request.

    Args:
        holding: Holds others; None if nothing is held.
        number: Of the request among those of `holding`.
    """

    __slots__ = ("_holding", "_number")

    def __init__(self, holding: Holding | None = None, number: int = 0) -> None:
        self._holding, self._number = holding, number

    def planned(self, request_id: int, routed: Routed, *, streams: bool) -> None:
        """The route of the request is known.

        Args:
            request_id: Its number for the dispatcher.
            streams: Its first token will be seen.
        """
        if self._holding is not None:
            self._holding.planned(self._number, request_id, routed, streams=streams)

    def look(self) -> None:
        """Something has happened to the request: others may start."""
        if self._holding is not None:
            self._holding.look()


_FREE = SlotTurn()


class Holding:
    """Holds requests until engines have free slots for their sequences, and little to prefill.

    With one tenant and no classes of service nothing is held: its requests wait in the engines,
    which know best when they can start.

    Args:
        capacity: Returns what the engines take.
        driver: Knows where prompts are prefilled, and until when.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        capacity: Callable[[], Capacity],
        driver: Driver,
        *,
        has_classes: bool = False,
    ) -> None:
        self._slots = FairSlots(weights)
        self._is_on = len(weights) > 1 or has_classes
        self._capacity, self._driver = capacity, driver
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._prefilling: dict[int, tuple[int, bool]] = {}
        """Number for the dispatcher of requests whose prefill has begun; True if they stream."""
        self._numbers = itertools.count()
        self._threshold, self._threshold_until_ns = math.inf, 0
        """Lowest threshold of all links, and the time until which it is not looked for again."""

    def num_held(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        return self._slots.waiting_of(tenant)

    def check(self, num_sequences: int) -> None:
        """Refuse a request that would need the slots that are reserved for other tenants.

        Raises:
            RequestError: 400.
        """
        most = self._capacity().num_slots if self._is_on else 0
        if most and num_sequences > widest(most):
            raise bad(
                f"the request asks for {num_sequences} answers at once (prompts times n); at most "
                f"{widest(most)} are served here. Send fewer prompts in each request",
                "n",
            )

    @asynccontextmanager
    async def slots(
        self, tenant: str, num_sequences: int, num_tokens: int, priority: int = 0
    ) -> AsyncIterator[SlotTurn]:
        """Wait for a turn; the slots are the request's while the context is open.

        Args:
            num_tokens: Of its prompts, as far as is known.
            priority: Of its class of service.

        Raises:
            RequestError: 400, see `check`.
        """
        if not self._is_on:
            yield _FREE
            return
        self.check(num_sequences)
        number = next(self._numbers)
        turn = self._turns[number] = asyncio.get_running_loop().create_future()
        lane = self._lane_of(num_tokens)
        self._slots.ask(number, tenant, num_sequences, priority, num_tokens, lane)
        try:
            self._start()
            while not turn.done():
                await asyncio.wait((turn,), timeout=LOOK_S)
                self._start()
            yield SlotTurn(self, number)
        finally:
            del self._turns[number]
            self._prefilling.pop(number, None)
            self._slots.leave(number)
            self._start()

    def planned(self, number: int, request_id: int, routed: Routed, *, streams: bool) -> None:
        """The route of a request is known; see `SlotTurn`."""
        lane = REMOTE if routed.decision.path is Path.REMOTE else LOCAL
        self._slots.planned(number, routed.num_tokens_to_prefill, lane)
        self._prefilling[number] = request_id, streams
        self.look()

    def _lane_of(self, work: int) -> int:
        """Place where a prompt of so many tokens is probably prefilled."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._threshold_until_ns:
            self._threshold_until_ns = now_ns + THRESHOLD_NS
            links = self._driver.dispatcher.links
            found = (e.policy.offload_threshold for e in links if e.up and not e.is_in_site)
            self._threshold = min(found, default=math.inf)
        return REMOTE if work > self._threshold else LOCAL

    def look(self) -> None:
        """Start requests that wait, if engines take them now."""
        if self._slots.num_waiting:
            self._start()

    def _start(self) -> None:
        now_ns, requests = time.monotonic_ns(), self._driver.dispatcher.requests
        for number in self._slots.pending:
            known = self._prefilling.get(number)
            if known and not requests.is_prefilling(known[0], now_ns, streams=known[1]):
                del self._prefilling[number]
                self._slots.prefilled(number)
        capacity = self._capacity()
        # Without an engine no request is held: all get the error.
        num_slots, engines = (2**62, ()) if not capacity.num_slots else capacity
        for number in self._slots.start(num_slots, engines):
            turn = self._turns[number]
            if not turn.done():
                turn.set_result(None)


@dataclass(slots=True)
class _Known:
    limit: SlotLimit
    num_looks: int = 0


class EngineLimits:
    """Capacity of the engines of a deployment, by its file and by what they report.

    Gateways of one deployment share the engines alike.
    """

    def __init__(
        self, deployment: Deployment, engines: Engines, driver: Driver, slots: Mapping[str, int]
    ) -> None:
        self._num_gateways = len(deployment.gateways)
        self._engines, self._driver = engines, driver
        self._known: dict[str, _Known] = {}
        self._of_plan = slots
        self._counted: dict[str, tuple[int, int]] = {}
        """Lane and slots of each engine that takes requests."""
        self._num_slots, self._num_engines = 0, [0, 0]
        driver.states.changed.update(engines.by_name)

    def __call__(self) -> Capacity:
        """Their limits now."""
        changed = self._driver.states.changed
        while changed:
            self._count(changed.pop())
        return Capacity(self._num_slots, tuple(self._num_engines))

    def _count(self, name: str) -> None:
        """Count an engine again: what all the others take has not changed."""
        lane, num_slots = self._counted.pop(name, (LOCAL, -1))
        if num_slots >= 0:
            self._num_engines[lane] -= 1
            self._num_slots -= num_slots
        engine = self._engines.by_name.get(name)
        if engine is None or not self._engines.takes(engine):
            return
        lane, num_slots = REMOTE, 0
        if engine.role is ClusterRole.PD:
            lane, num_slots = LOCAL, max(1, self._limit(engine) // self._num_gateways)
        self._counted[name] = lane, num_slots
        self._num_engines[lane] += 1
        self._num_slots += num_slots

    def _limit(self, engine: Engine) -> int:
        known = self._known.get(engine.name)
        most = min(engine.num_slots, self._of_plan.get(engine.name, engine.num_slots))
        if known is None or known.limit.most != most:
            known = self._known[engine.name] = _Known(SlotLimit(most))
        if known.num_looks != engine.num_looks:
            known.num_looks, load = engine.num_looks, engine.load
            if load.num_running is not None and load.num_waiting is not None:
                expected = self._num_expected(engine.name, load.num_waiting)
                known.limit.report(load.num_running, load.num_waiting, expected)
        return known.limit.now

    def _num_expected(self, name: str, num_waiting: int) -> int:
        """Requests that wait at an engine for prefill before them, or for blocks in transit."""
        dispatcher = self._driver.dispatcher
        if not num_waiting:
            return 0
        if dispatcher.load(name).pending_ns(name) > EXPLAINED_NS:
            return num_waiting
        return dispatcher.requests.num_shipping()


def holding_for(
    deployment: Deployment,
    tenants: Tenants,
    engines: Engines,
    driver: Driver,
    slots: Mapping[str, int],
) -> Holding:
    """Hold requests above what the engines of a deployment take, timing engines by `slots`."""
    weights = {name: tenant.link_weight for name, tenant in tenants.by_name.items()}
    limits = EngineLimits(deployment, engines, driver, slots)
    return Holding(weights, limits, driver, has_classes=bool(deployment.classes))
