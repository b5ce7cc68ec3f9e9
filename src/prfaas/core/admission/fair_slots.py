"""Slots and prefill of engines, handed to tenants by weight. Pure.

An engine runs a fixed number of sequences, prefills one prompt after the other, and queues the
rest, first come first served: a tenant that sends a thousand prompts, or forty long ones, makes all
others wait. Here requests wait per tenant instead, and engines get only what keeps them busy. The
tenant that runs least for its weight is next: its sequences count, and the prefill that it has had
lately. Requests of a higher priority go first. A tenant that is alone gets all slots but a small
reserve, and the reserve goes to tenants that run little, so that a newcomer starts at once.

Fair admission: under overload every tenant gets its share of the work that is admitted.

Admission admits what is predicted to meet the target. Whoever asks most often would then take
every place that falls free. So a tenant that has had more than others, for its weight, has to be
content with a shorter queue: it is admitted only up to a part of the target, and what lies between
that and the whole target is left to those who have had less. The queue stays filled, so nothing is
lost.

The work that a tenant has had is counted in seconds of prefill and fades over a window. The rule
binds only while somebody who has had less was refused within the window: without overload, and
alone, everybody has the whole target.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

from prfaas.core.invariants import hold
from prfaas.units import NS_PER_S

TENANTS_MAX = 4096
"""Accounts that are kept; the one that was used longest ago goes first."""


@dataclass(frozen=True, slots=True)
class FairSettings:
    """Settings of the sharing of work."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Share of a tenant against others, above 0; 1 if absent."""
    window_ns: int = 60 * NS_PER_S
    """Time in which what a tenant has had fades to 1/e."""
    least_ratio: float = 0.4
    """Part of the target that is left to the tenant that has had most."""


@dataclass(slots=True)
class _Account:
    weight: float
    work_ns: float = 0.0
    seen_at_ns: int = 0
    refused_at_ns: int | None = None


class FairShare:
    """Recent use of every tenant.

    Args:
        settings: How work is shared.
    """

    def __init__(self, settings: FairSettings) -> None:
        self._settings = settings
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def limit(self, tenant: str, target: int, now_ns: int) -> int:
        """Part of the target up to which a tenant is admitted; returns `target`, or the part of it
        that is left to the tenant.

        Costs one pass over the tenants that were seen within the window.

        Args:
            target: What anybody may have in front of it: a predicted time to first token, places.
        """
        mine = self._seen(tenant, now_ns)
        if len(self._accounts) == 1:
            return target
        had = self._had(mine, now_ns)
        others = [a for a in self._recent(now_ns) if a is not mine]
        behind = [a for a in others if self._had(a, now_ns) < had]
        if not any(self._was_refused(a, now_ns) for a in behind):
            return target
        rank = len(behind) / len(others)
        return round(target * (1 - rank * (1 - self._settings.least_ratio)))

    def let_in(self, tenant: str, work_ns: int, now_ns: int) -> None:
        """A request with so much prefill was admitted."""
        self._seen(tenant, now_ns).work_ns += work_ns

    def refused(self, tenant: str, now_ns: int) -> None:
        """A request was refused."""
        self._seen(tenant, now_ns).refused_at_ns = now_ns

    def _seen(self, tenant: str, now_ns: int) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = _Account(self._settings.weights.get(tenant, 1.0), seen_at_ns=now_ns)
            self._accounts[tenant] = account
            if len(self._accounts) > TENANTS_MAX:
                self._accounts.popitem(last=False)
        elif account.seen_at_ns != now_ns:
            account.work_ns *= self._fading(account, now_ns)
            account.seen_at_ns = now_ns
            self._accounts.move_to_end(tenant)
        return account

    def _recent(self, now_ns: int) -> list[_Account]:
        """Accounts of tenants that were seen within the window; the last seen come last."""
        found = []
        for account in reversed(self._accounts.values()):
            if now_ns - account.seen_at_ns > self._settings.window_ns:
                break
            found.append(account)
        return found

    def _had(self, account: _Account, now_ns: int) -> float:
        return account.work_ns * self._fading(account, now_ns) / account.weight

    def _fading(self, account: _Account, now_ns: int) -> float:
        return exp((account.seen_at_ns - now_ns) / self._settings.window_ns)

    def _was_refused(self, account: _Account, now_ns: int) -> bool:
        at_ns = account.refused_at_ns
        return at_ns is not None and now_ns - at_ns <= self._settings.window_ns


RESERVED_OF = 16
"""One slot in so many is reserved, at least one where there are as many as `RESERVED_FROM`."""
RESERVED_FROM = 8
"""Below this number of slots none is reserved: one would be too large a share."""
WINDOW_TOKENS = 16_384
"""Prefill that an engine may have before it in excess of one prompt, tokens: a few chunks."""
PENDING_MIN = WINDOW_TOKENS // 4
"""Least that a request counts for before its prefill has ended, tokens: an engine whose batch is
full queues short prompts, too."""
SEQUENCE_TOKENS = 256
"""A sequence that runs counts like so many tokens of prefill in the order of tenants."""
MEMORY_TOKENS = 16 * WINDOW_TOKENS
"""Prefill of all tenants after which the one that a tenant has had counts 1/e."""
NUM_LANES = 2
"""Kinds of engines that prefill: those of the PD cluster, and those of PrfaaS clusters."""

_Key = tuple[int, str]
"""Priority and name: requests of one tenant in several classes wait in several queues."""


@dataclass(slots=True)
class _Tenant:
    weight: float
    priority: int = 0
    running: int = 0
    had_tokens: float = 0.0
    """Prefill of its requests, faded."""
    had_at: float = 0.0
    """Prefill of all tenants at that time."""
    pending: list[int] = field(default_factory=lambda: [0] * NUM_LANES)
    """Its requests in each lane whose prefill has not ended."""
    waiting: tuple[deque[int], ...] = field(
        default_factory=lambda: tuple(deque[int]() for _ in range(NUM_LANES))
    )

    def had(self, total: float) -> float:
        """Prefill that it has had lately, tokens, when all have had `total`."""
        if not self.had_tokens:
            return 0.0
        return self.had_tokens * exp((self.had_at - total) / MEMORY_TOKENS)

    def order(self, total: float) -> tuple[int, float]:
        load = self.running * SEQUENCE_TOKENS + self.had(total)
        return -self.priority, load / self.weight

    @property
    def is_idle(self) -> bool:
        return not self.running and not any(self.waiting)


@dataclass(slots=True)
class _Request:
    tenant: _Key
    width: int
    work: int = 0
    lane: int = 0
    is_reserved: bool = False
    """Runs in slots of the reserve."""
    is_pending: bool = False
    """Has started, and its prefill has not ended."""


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
        self._total = 0.0
        """Prefill of all tenants so far, tokens."""
        self._pending = [dict[int, int]() for _ in range(NUM_LANES)]
        """Work of the requests in each lane whose prefill has not ended, tokens."""
        self._pending_tokens = [0] * NUM_LANES
        self.num_running = 0
        """Sequences that run."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        return sum(
            len(lane)
            for key, each in self._tenants.items()
            if key[1] == tenant
            for lane in each.waiting
        )

    @property
    def pending(self) -> list[int]:
        """Requests that have started and whose prefill has not ended."""
        return [request for lane in self._pending for request in lane]

    def ask(
        self,
        request: int,
        tenant: str,
        width: int,
        priority: int = 0,
        work: int = 0,
        lane: int = 0,
    ) -> None:
        """Have a request wait for its turn.

        Args:
            request: Unique among those that run or wait.
            width: Its sequences, at least 1.
            priority: Of its class of service.
            work: Its prefill as far as is known, tokens.
            lane: Where that is expected, in [0, `NUM_LANES`).
        """
        key = priority, tenant
        self._requests[request] = _Request(key, width, work, lane)
        self._waiting.add(request)
        known = self._tenants.setdefault(key, _Tenant(self._weights.get(tenant, 1.0), priority))
        known.waiting[lane].append(request)

    def leave(self, request: int) -> None:
        """Remove a request that has ended, or does not wait any longer."""
        self.prefilled(request)
        gone = self._requests.pop(request)
        tenant = self._tenants[gone.tenant]
        if request in self._waiting:
            self._waiting.discard(request)
            tenant.waiting[gone.lane].remove(request)
        else:
            self.num_running -= gone.width
            tenant.running -= gone.width
            if gone.is_reserved:
                self._give_back(request, gone)
        if tenant.is_idle and tenant.had(self._total) < 1:
            del self._tenants[gone.tenant]

    def planned(self, request: int, work: int, lane: int) -> None:
        """The prefill of a request that has started is known: tokens, and where it is."""
        found = self._requests[request]
        self._charge(self._tenants[found.tenant], work - found.work)
        if found.is_pending:
            self.prefilled(request)
            found.work, found.lane = work, lane
            self._begin_prefill(request, found)

    def prefilled(self, request: int) -> None:
        """The prefill of a request has ended; no effect if that is known."""
        found = self._requests[request]
        if found.is_pending:
            found.is_pending = False
            self._tenants[found.tenant].pending[found.lane] -= 1
            self._pending_tokens[found.lane] -= self._pending[found.lane].pop(request)

    def start(self, num_slots: int, num_engines: Sequence[int] = ()) -> list[int]:
        """Start requests whose turn it is.

        Args:
            num_slots: Sequences that may run at once.
            num_engines: Engines of each lane; a lane without has no limit of prefill.

        Returns:
            The requests, in order. One that is wider than the limit starts when nothing else runs.
        """
        reserve = reserve_of(num_slots)
        started: list[int] = []
        while self._waiting:
            self._refill(num_slots - reserve)
            request = self._next(num_slots - reserve, num_engines)
            is_reserved = request is None
            if request is None:
                request = self._next_of_reserve(reserve, num_slots, num_engines)
            if request is None:
                return started
            self._begin(request, is_reserved)
            started.append(request)
        return started

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        runs = [each for number, each in self._requests.items() if number not in self._waiting]
        queued = [n for each in self._tenants.values() for lane in each.waiting for n in lane]
        hold(
            running_sequences_are_those_of_requests=self.num_running
            == sum(each.width for each in runs)
            == sum(each.running for each in self._tenants.values()),
            the_reserve_is_that_of_requests=self._num_reserved
            == sum(self._requests[number].width for number in self._reserved),
            each_waits_in_one_queue=sorted(queued) == sorted(self._waiting),
            pending_tokens_are_those_of_requests=self._pending_tokens
            == [sum(lane.values()) for lane in self._pending]
            and sorted(self.pending)
            == sorted(number for number, each in self._requests.items() if each.is_pending),
        )

    def _next(self, num_slots: int, num_engines: Sequence[int]) -> int | None:
        request = self._first(lambda *_: True, num_engines)
        if request is None or not self.num_running:
            return request
        # Nobody overtakes a wide request of the tenant that is next: it would wait for ever.
        taken = self.num_running - self._num_reserved
        return request if taken + self._requests[request].width <= num_slots else None

    def _next_of_reserve(
        self, reserve: int, num_slots: int, num_engines: Sequence[int]
    ) -> int | None:
        def runs_little(tenant: _Tenant, request: int) -> bool:
            return tenant.running + self._requests[request].width <= reserve

        request = self._first(runs_little, num_engines)
        if request is None:
            return None
        width = self._requests[request].width
        is_free = self._num_reserved + width <= reserve and self.num_running + width <= num_slots
        return request if is_free else None

    def _first(self, may: Callable[[_Tenant, int], bool], num_engines: Sequence[int]) -> int | None:
        """The oldest request of the tenant that runs least for its weight, highest class first."""
        best: tuple[tuple[int, float], int] | None = None
        for tenant in self._tenants.values():
            heads = [lane[0] for lane in tenant.waiting if lane]
            ready = [
                request
                for request in heads
                if may(tenant, request) and self._fits(tenant, request, num_engines)
            ]
            if ready:
                order = tenant.order(self._total)
                if best is None or order < best[0]:
                    best = order, min(ready)
        return None if best is None else best[1]

    def _fits(self, tenant: _Tenant, request: int, num_engines: Sequence[int]) -> bool:
        """Return True if the engines that would prefill a request have not enough before them.

        A short prompt of a tenant that has nothing before them always fits: it delays nobody much.
        """
        found = self._requests[request]
        lane = found.lane
        engines = num_engines[lane] if lane < len(num_engines) else 0
        if not engines or len(self._pending[lane]) < engines:
            return True
        if not tenant.pending[lane] and found.work <= PENDING_MIN:
            return True
        return self._pending_tokens[lane] < engines * WINDOW_TOKENS

    def _begin(self, request: int, is_reserved: bool) -> None:
        found = self._requests[request]
        tenant = self._tenants[found.tenant]
        tenant.waiting[found.lane].popleft()
        tenant.running += found.width
        self._waiting.discard(request)
        self.num_running += found.width
        self._charge(tenant, found.work)
        self._begin_prefill(request, found)
        if is_reserved:
            found.is_reserved = True
            self._reserved[request] = None
            self._num_reserved += found.width

    def _begin_prefill(self, request: int, found: _Request) -> None:
        tokens = max(found.work, PENDING_MIN)
        found.is_pending = True
        self._tenants[found.tenant].pending[found.lane] += 1
        self._pending[found.lane][request] = tokens
        self._pending_tokens[found.lane] += tokens

    def _charge(self, tenant: _Tenant, work: int) -> None:
        self._total += max(work, 0)
        tenant.had_tokens = max(0.0, tenant.had(self._total) + work)
        tenant.had_at = self._total

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
