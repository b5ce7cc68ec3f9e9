"""Requests that an engine would only queue wait in the gateway, where tenants take turns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.admission.fair_slots import FairSlots, widest
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.openai.validation import bad
from prfaas.gateway.tenancy.tenants import Tenants

LOOK_S = 1.0
"""Interval at which a waiting request checks for changed engines."""


class Holding:
    """Holds requests until the PD cluster has free slots for their sequences.

    With one tenant and no classes of service nothing is held: its requests wait in the engines,
    which know best when they can start.

    Args:
        num_slots: Sequences that engines which are ready run at once; 0 without any.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        num_slots: Callable[[], int],
        *,
        has_classes: bool = False,
    ) -> None:
        self._slots = FairSlots(weights)
        self._is_on = len(weights) > 1 or has_classes
        self._num_slots = num_slots
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()

    def num_held(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        return self._slots.waiting_of(tenant)

    def check(self, num_sequences: int) -> None:
        """Refuse a request that would need the slots that are reserved for other tenants.

        Raises:
            RequestError: 400.
        """
        most = self._num_slots() if self._is_on else 0
        if most and num_sequences > widest(most):
            raise bad(
                f"the request asks for {num_sequences} answers at once (prompts times n); at most "
                f"{widest(most)} are served here. Send fewer prompts in each request",
                "n",
            )

    @asynccontextmanager
    async def slots(
        self, tenant: str, num_sequences: int, priority: int = 0
    ) -> AsyncIterator[None]:
        """Wait for a turn; the slots are the request's while the context is open.

        Raises:
            RequestError: 400, see `check`.
        """
        if not self._is_on:
            yield
            return
        self.check(num_sequences)
        number = next(self._numbers)
        turn = self._turns[number] = asyncio.get_running_loop().create_future()
        self._slots.ask(number, tenant, num_sequences, priority)
        try:
            self._start()
            while not turn.done():
                await asyncio.wait((turn,), timeout=LOOK_S)
                self._start()
            yield
        finally:
            del self._turns[number]
            self._slots.leave(number)
            self._start()

    def _start(self) -> None:
        # Without an engine no request is held: all get the error.
        num_slots = self._num_slots() or 2**62
        for number in self._slots.start(num_slots):
            turn = self._turns[number]
            if not turn.done():
                turn.set_result(None)


def holding_for(deployment: Deployment, tenants: Tenants, engines: Engines) -> Holding:
    """Hold requests above the slots of a deployment's PD engines.

    Gateways of one deployment share the engines alike.
    """

    def num_slots() -> int:
        return sum(
            max(1, engine.num_slots // len(deployment.gateways))
            for engine in engines.by_name.values()
            if engine.role is ClusterRole.PD and engines.takes(engine)
        )

    weights = {name: tenant.link_weight for name, tenant in tenants.by_name.items()}
    return Holding(weights, num_slots, has_classes=bool(deployment.classes))
