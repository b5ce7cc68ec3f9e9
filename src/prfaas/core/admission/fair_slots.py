"""Slots for sequences, handed to tenants by weight. Pure.

An engine runs a fixed number of sequences and queues the rest, first come first served: a tenant
that sends a thousand makes all others wait. Here requests wait per tenant instead. The tenant that
runs the fewest sequences for its weight is next, and requests of a higher priority go first. A
tenant that is alone gets all slots but a small reserve, and the reserve goes to tenants that run
little, so that a newcomer starts at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

RESERVED_OF = 16
"""One slot in so many is reserved, at least one where there are as many as `RESERVED_FROM`."""
RESERVED_FROM = 8
"""Below this number of slots none is reserved: one would be too large a share."""


_Key = tuple[int, str]
"""Priority and name: requests of one tenant in several classes wait in several queues."""


@dataclass(slots=True)
class _Tenant:
    weight: float
    priority: int = 0
    running: int = 0
    waiting: deque[int] = field(default_factory=deque)

    @property
    def order(self) -> tuple[int, float]:
        return -self.priority, self.running / self.weight


@dataclass(slots=True)
class _Request:
    tenant: _Key
    width: int
    is_reserved: bool = False
    """Runs in slots of the reserve."""


class FairSlots:
    """Requests that run, and those that wait for a slot.

    Args:
        weights: Share of a tenant against others, above 0; 1 if absent.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[_Key, _Tenant] = {}
        self._requests: dict[int, _Request] = {}
        self._waiting: set[int] = set()
        self._reserved: dict[int, None] = {}
        self._num_reserved = 0
        self.num_running = 0
        """Sequences that run."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        return sum(len(each.waiting) for key, each in self._tenants.items() if key[1] == tenant)

    def ask(self, request: int, tenant: str, width: int, priority: int = 0) -> None:
        """Have a request wait for its turn.

        Args:
            request: Unique among those that run or wait.
            tenant: Its tenant.
            width: Its sequences, at least 1.
            priority: Of its class of service.
        """
        key = priority, tenant
        self._requests[request] = _Request(key, width)
        self._waiting.add(request)
        known = self._tenants.setdefault(key, _Tenant(self._weights.get(tenant, 1.0), priority))
        known.waiting.append(request)

    def leave(self, request: int) -> None:
        """Remove a request that has ended, or does not wait any longer."""
        gone = self._requests.pop(request)
        tenant = self._tenants[gone.tenant]
        if request in self._waiting:
            self._waiting.discard(request)
            tenant.waiting.remove(request)
        else:
            self.num_running -= gone.width
            tenant.running -= gone.width
            if gone.is_reserved:
                self._give_back(request, gone)
        if not tenant.running and not tenant.waiting:
            del self._tenants[gone.tenant]

    def start(self, num_slots: int) -> list[int]:
        """Start requests whose turn it is.

        Args:
            num_slots: Sequences that may run at once.

        Returns:
            The requests, in order. One that is wider than the limit starts when nothing else runs.
        """
        reserve = reserve_of(num_slots)
        started: list[int] = []
        while True:
            self._refill(num_slots - reserve)
            request = self._next(num_slots - reserve)
            is_reserved = request is None
            if request is None:
                request = self._next_of_reserve(reserve, num_slots)
            if request is None:
                return started
            self._begin(request, is_reserved)
            started.append(request)

    def _next(self, num_slots: int) -> int | None:
        request = self._first(lambda _: True)
        if request is None or not self.num_running:
            return request
        # Nobody overtakes a wide request of the tenant that is next: it would wait for ever.
        taken = self.num_running - self._num_reserved
        return request if taken + self._requests[request].width <= num_slots else None

    def _next_of_reserve(self, reserve: int, num_slots: int) -> int | None:
        def runs_little(tenant: _Tenant) -> bool:
            return tenant.running + self._requests[tenant.waiting[0]].width <= reserve

        request = self._first(runs_little)
        if request is None:
            return None
        width = self._requests[request].width
        is_free = self._num_reserved + width <= reserve and self.num_running + width <= num_slots
        return request if is_free else None

    def _first(self, may: Callable[[_Tenant], bool]) -> int | None:
        """The oldest request of the tenant that runs least for its weight, highest class first."""
        ready = (tenant for tenant in self._tenants.values() if tenant.waiting and may(tenant))
        tenant = min(ready, key=lambda tenant: tenant.order, default=None)
        return None if tenant is None else tenant.waiting[0]

    def _begin(self, request: int, is_reserved: bool) -> None:
        found = self._requests[request]
        tenant = self._tenants[found.tenant]
        tenant.waiting.popleft()
        tenant.running += found.width
        self._waiting.discard(request)
        self.num_running += found.width
        if is_reserved:
            found.is_reserved = True
            self._reserved[request] = None
            self._num_reserved += found.width

    def _refill(self, num_slots: int) -> None:
        """Count requests of the reserve among the others where there is room: it is free again."""
        for request in list(self._reserved):
            found = self._requests[request]
            if self.num_running - self._num_reserved + found.width > num_slots:
                return
            self._give_back(request, found)

    def _give_back(self, request: int, found: _Request) -> None:
        found.is_reserved = False
        del self._reserved[request]
        self._num_reserved -= found.width


def reserve_of(num_slots: int) -> int:
    """Slots that only tenants which run little may take."""
    return max(1, num_slots // RESERVED_OF) if num_slots >= RESERVED_FROM else 0


def widest(num_slots: int) -> int:
    """Sequences that one request may have, at least 1."""
    return max(1, num_slots - reserve_of(num_slots))
