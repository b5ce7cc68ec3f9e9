"""Breakers around engines and links: who fails is spared, and spares.

A breaker that opens has the driver give its target nothing new. The breaker of the only PD engine
that takes requests changes nothing: a request that would find nobody may as well try it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.resilience.circuit_breaker import Breaker, BreakerState, Told
from prfaas.core.transfer.transfer_state import LINK_FAULTS, TransferEnd
from prfaas.gateway.routing.change_log import Journal, Loop
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.pool_state import LinkName

Target = str | LinkName
_WHY = {
    BreakerState.OPEN: "too many of its requests failed",
    BreakerState.HALF_OPEN: "its time is over; one request probes",
    BreakerState.CLOSED: "the probe succeeded",
}


class Guards:
    """All breakers of a deployment.

    Args:
        deployment: Who there is.
        driver: Hears who gets nothing new.
        journal: Hears of every change.
        clock_ns: Monotonic time.
    """

    def __init__(
        self,
        deployment: Deployment,
        driver: Driver,
        journal: Journal,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._driver, self._journal, self._clock_ns = driver, journal, clock_ns
        home = deployment.with_role(ClusterRole.PD)
        away = deployment.with_role(ClusterRole.PRFAAS)
        self._home = {name for cluster in home for name in cluster.engines}
        engines: list[Target] = [n for cluster in (*home, *away) for n in cluster.engines]
        links: list[Target] = [
            (source, destination)
            for far in away
            for source in far.pools
            for near in home
            for destination in near.pools
        ]
        self.breakers = {target: Breaker() for target in engines + links}

    def began(self, target: Target) -> None:
        """A request is sent to an engine, or its blocks over a link."""
        breaker = self.breakers[target]
        if breaker.state is not BreakerState.CLOSED:
            breaker.began(self._clock_ns())
            self._apply(target)

    def ended(self, target: Target, told: Told) -> None:
        """Result of a request for the breaker of its target."""
        breaker, now_ns = self.breakers[target], self._clock_ns()
        before = breaker.state
        match told:
            case Told.GOOD:
                breaker.succeeded(now_ns)
            case Told.FAILED:
                breaker.failed(now_ns)
            case Told.NOTHING:
                breaker.gave_up()
        self._say(target, before)
        if before is not BreakerState.CLOSED or breaker.state is not before:
            self._apply(target)

    def refresh(self) -> None:
        """Time has passed, or somebody is gone: half open what has been open long enough."""
        for target, breaker in self.breakers.items():
            if breaker.state is not BreakerState.CLOSED:
                self._apply(target)

    def _apply(self, target: Target) -> None:
        breaker, now_ns = self.breakers[target], self._clock_ns()
        before = breaker.state
        allowed = breaker.allows(now_ns)
        self._say(target, before)
        barred = not allowed and not self._is_last(target)
        self._driver.set_broken(target, now_ns, broken=barred)

    def _is_last(self, target: Target) -> bool:
        """Return True if no other engine could decode."""
        if target not in self._home:
            return False
        return not any(self._driver.takes(name) for name in self._home if name != target)

    def _say(self, target: Target, before: BreakerState) -> None:
        state = self.breakers[target].state
        if state is not before:
            self._journal.note(
                Loop.BREAKER,
                state.value,
                label_of(target),
                old=before.value,
                new=state.value,
                why=_WHY[state],
            )


def told_of_link(end: TransferEnd) -> Told:
    """Effect of the end of a transfer on the breaker of its link."""
    if end is TransferEnd.COMMITTED:
        return Told.GOOD
    return Told.FAILED if end in LINK_FAULTS else Told.NOTHING


def label_of(target: Target) -> str:
    """Name of a target in metrics and decisions."""
    return f"engine {target}" if isinstance(target, str) else f"link {target[0]}:{target[1]}"
