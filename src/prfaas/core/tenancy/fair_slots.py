"""Slots for sequences, handed to tenants by weight. Pure.

An engine runs so many sequences at once and queues the rest, first come first served: whoever
sends a thousand makes everybody wait for them. Here requests wait per tenant instead. The tenant
that runs the fewest sequences for its weight is next, and none takes the last slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

SHARE_MAX = Fraction(3, 4)
"""Of the slots, for one tenant: the rest lets another one start at once. Slots come back only when
a whole request ends."""


@dataclass(slots=True)
class _Tenant:
    weight: float
    running: int = 0
    waiting: deque[int] = field(default_factory=deque)

    @property
    def order(self) -> float:
        return self.running / self.weight


class FairSlots:
    """Requests that run, and those that wait for a slot.

    Args:
        weights: Share of a tenant against others, above 0; 1 if absent.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}
        self._requests: dict[int, tuple[str, int]] = {}
        self._waiting: set[int] = set()
        self.num_running = 0
        """Sequences that run."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        found = self._tenants.get(tenant)
        return 0 if found is None else len(found.waiting)

    def ask(self, request: int, tenant: str, width: int) -> None:
        """Have a request wait for its turn.

        Args:
            request: Unique among those that run or wait.
            tenant: Whose it is.
            width: Its sequences, at least 1.
        """
        self._requests[request] = (tenant, width)
        self._waiting.add(request)
        known = self._tenants.setdefault(tenant, _Tenant(self._weights.get(tenant, 1.0)))
        known.waiting.append(request)

    def leave(self, request: int) -> None:
        """A request has ended, or does not wait any longer."""
        name, width = self._requests.pop(request)
        tenant = self._tenants[name]
        if request in self._waiting:
            self._waiting.discard(request)
            tenant.waiting.remove(request)
        else:
            self.num_running -= width
            tenant.running -= width
        if not tenant.running and not tenant.waiting:
            del self._tenants[name]

    def start(self, num_slots: int) -> list[int]:
        """Start requests whose turn it is.

        Args:
            num_slots: Sequences that may run at once.

        Returns:
            The requests, in order. One that is wider than the limit starts when nothing else runs.
        """
        started: list[int] = []
        share = share_of(num_slots)
        while (request := self._next(num_slots, share)) is not None:
            name, width = self._requests[request]
            self._tenants[name].waiting.popleft()
            self._tenants[name].running += width
            self._waiting.discard(request)
            self.num_running += width
            started.append(request)
        return started

    def _next(self, num_slots: int, share: int) -> int | None:
        ready = [tenant for tenant in self._tenants.values() if tenant.waiting]
        for tenant in sorted(ready, key=lambda tenant: tenant.order):
            request = tenant.waiting[0]
            width = self._requests[request][1]
            if not self.num_running:
                return request
            if tenant.running and tenant.running + width > share:
                continue
            # Nobody overtakes a wide request of the tenant that is next: it would wait for ever.
            return request if self.num_running + width <= num_slots else None
        return None


def share_of(num_slots: int) -> int:
    """Sequences that one tenant may run at once, at least 1."""
    return max(1, int(num_slots * SHARE_MAX))
