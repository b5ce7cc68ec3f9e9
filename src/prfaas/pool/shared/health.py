"""Availability of a shared tier: a breaker, and the change between up and down."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prfaas.core.resilience.circuit_breaker import Breaker, BreakerSettings
from prfaas.pool.metrics.metrics import PoolMetrics

log = logging.getLogger(__name__)

BREAKER = BreakerSettings(failures_max=3)
ALTERED_MAX = 32
"""Blocks that are altered in a row until the tier counts as failing: fewer are damaged objects, and
blocks of other objects can still be read."""


class TierHealth:
    """State of a shared tier: its blocks are shown, or not.

    The tier goes down when its breaker opens, and comes up when a request succeeds after that.

    Args:
        metrics: Of the pool node.
        on_down: Called when the tier goes down.
        on_up: Called when it comes up again.
    """

    def __init__(
        self,
        metrics: PoolMetrics,
        clock_ns: Callable[[], int],
        on_down: Callable[[], None],
        on_up: Callable[[], None],
    ) -> None:
        self._metrics, self._clock_ns = metrics, clock_ns
        self._on_down, self._on_up = on_down, on_up
        self._breaker = Breaker(BREAKER)
        self.is_up = True
        self._num_altered = 0
        metrics.shared_up.set(1)

    @property
    def may_ask(self) -> bool:
        """Return True if a background request may be sent now."""
        return self.is_up or self._breaker.allows(self._clock_ns())

    def began(self) -> None:
        """A background request was sent."""
        self._breaker.began(self._clock_ns())

    def read(self) -> None:
        """A read for an engine succeeded. It may have begun before the tier went down."""
        if self.is_up:
            self._breaker.succeeded(self._clock_ns())

    def opened(self) -> None:
        """A block is what was stored."""
        self._num_altered = 0

    def altered(self, why: str) -> None:
        """A block is not what was stored, or not whole, in two answers."""
        self._num_altered += 1
        if self._num_altered >= ALTERED_MAX:
            self._num_altered = 0
            while self.is_up:
                self.failed(why)

    def failed(self, why: str) -> None:
        """A request failed."""
        self._breaker.failed(self._clock_ns())
        if self.is_up and not self._breaker.allows(self._clock_ns()):
            self.is_up = False
            self._metrics.shared_up.set(0)
            log.error("shared tier: it fails, its blocks are misses for now: %s", why)
            self._on_down()

    def succeeded(self) -> None:
        """A background request succeeded."""
        self._breaker.succeeded(self._clock_ns())
        if not self.is_up and self._breaker.allows(self._clock_ns()):
            self.is_up = True
            self._metrics.shared_up.set(1)
            log.warning("shared tier: it answers again")
            self._on_up()
