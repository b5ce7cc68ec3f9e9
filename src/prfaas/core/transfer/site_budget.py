"""Budget of a site's links to other sites, given out to its pool nodes as leases.

Each pool node has an equal share without any lease. A gateway gives out leases for less or more:
max-min by what waits to be sent. A lease ends after `LEASE_NS`; then its holder has the equal share
again. A growing lease waits until the leases that shrink for it were sent `TICK_NS` before, so that
the sum of all stays within the budget.

The sum can be above the budget by one equal share for each holder that runs and that the gateway
has not reached for `GONE_NS`: it may be dead, and its share is given to others. No lease is below
the part of an idle holder: the kernel times the next segment of a socket by the rate of the last
one, so that a few bytes at next to nothing hold a connection up for hours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.units import BITS_PER_BYTE, NS_PER_S

TICK_NS = NS_PER_S // 2
"""Interval of leases."""
LEASE_NS = 3 * NS_PER_S
"""Validity of a lease: several that are lost in a row change nothing."""
SILENT_NS = 2 * NS_PER_S
"""A holder that was not heard of for so long gets no further lease."""
GONE_NS = 10 * NS_PER_S
"""A holder that was not heard of for so long is dead: its share goes to the others."""
DRAIN_S = 1.0
"""A backlog asks for the rate that sends it in so long."""
IDLE_SHARE = 0.1
"""Part of an equal share that a holder with nothing to send keeps, so that it can begin."""


class Lease(NamedTuple):
    """Permission to send.

    Attributes:
        bits_per_s: Rate of all links of the holder together.
        for_ns: Its time.
    """

    bits_per_s: int
    for_ns: int


def equal_share(budget_bits_per_s: int, num_holders: int) -> int:
    """Return what a holder may send without a lease, bits a second, at least 1."""
    return max(1, budget_bits_per_s // max(1, num_holders))


def idle_share(budget_bits_per_s: int, num_holders: int) -> int:
    """Return the least that a holder may send, bits a second, at least 1."""
    return max(1, int(IDLE_SHARE * equal_share(budget_bits_per_s, num_holders)))


def demand(backlog_bytes: int, goodput_bits_per_s: int) -> float:
    """Return the rate that a holder asks for, bits a second; 0 if nothing waits.

    Args:
        backlog_bytes: Bytes that wait, or are under way.
        goodput_bits_per_s: What its links carry while they are busy.
    """
    if not backlog_bytes:
        return 0.0
    return max(backlog_bytes * BITS_PER_BYTE / DRAIN_S, float(goodput_bits_per_s))


def allocate(budget_bits_per_s: int, demands: Mapping[str, float]) -> dict[str, int]:
    """Divide a budget by max-min fairness: nobody can have more without taking it from one that has
    less.

    Args:
        budget_bits_per_s: All together.
        demands: Rates that holders ask for.

    Returns:
        Rates whose sum is at most the budget. What nobody asks for is divided equally.
    """
    if not demands:
        return {}
    least = IDLE_SHARE * budget_bits_per_s / len(demands)
    found = dict.fromkeys(demands, least)
    left = budget_bits_per_s - least * len(demands)
    waiting = sorted(demands, key=lambda name: (demands[name], name))
    for index, name in enumerate(waiting):
        more = min(max(0.0, demands[name] - least), left / (len(waiting) - index))
        found[name] += more
        left -= more
    return {name: int(rate + left / len(found)) for name, rate in found.items()}


@dataclass(slots=True)
class _Holder:
    """A pool node.

    Attributes:
        heard_at_ns: Last report.
        demand: Of that report, bits a second.
        granted: Rate of its last lease.
        ends_at_ns: End of that lease.
    """

    heard_at_ns: int
    demand: float = 0.0
    granted: int = 0
    ends_at_ns: int = -1


class LeaseBook:
    """Leases of one site's budget, as one gateway gives them out.

    Args:
        budget_bits_per_s: Of the site.
        holders: Names of its pool nodes.
        now_ns: Monotonic. Nobody counts as dead before this and `GONE_NS`.
    """

    def __init__(self, budget_bits_per_s: int, holders: Collection[str], now_ns: int) -> None:
        self._budget = budget_bits_per_s
        self._equal = equal_share(budget_bits_per_s, len(holders))
        self._least = idle_share(budget_bits_per_s, len(holders))
        self._holders = {name: _Holder(now_ns) for name in holders}
        self._never_heard = set(holders)

    def heard(self, name: str, wanted_bits_per_s: float, now_ns: int) -> None:
        """Record a report of a holder; of other names nothing."""
        if (holder := self._holders.get(name)) is not None:
            self._never_heard.discard(name)
            holder.heard_at_ns, holder.demand = now_ns, wanted_bits_per_s

    def leases(self, now_ns: int) -> dict[str, Lease]:
        """Return the leases to send now, of holders that are heard of."""
        live = {
            name: holder
            for name, holder in self._holders.items()
            if name not in self._never_heard and now_ns - holder.heard_at_ns <= SILENT_NS
        }
        bounds = {name: self._bound(name, now_ns) for name in self._holders}
        others = sum(rate for name, rate in bounds.items() if name not in live)
        targets = allocate(max(0, self._budget - others), {n: h.demand for n, h in live.items()})
        free = max(0, self._budget - sum(bounds.values()))
        wanted = sum(max(0, targets[name] - bounds[name]) for name in live)
        share = min(1.0, free / wanted) if wanted else 0.0
        found = {}
        for name, holder in live.items():
            more = max(0, targets[name] - bounds[name])
            rate = min(targets[name], bounds[name]) + int(share * more)
            holder.granted, holder.ends_at_ns = max(self._least, rate), now_ns + LEASE_NS
            found[name] = Lease(holder.granted, LEASE_NS)
        return found

    def _bound(self, name: str, now_ns: int) -> int:
        """Most that a holder may be sending now."""
        holder = self._holders[name]
        if now_ns - holder.heard_at_ns > GONE_NS:
            return 0
        if now_ns >= holder.ends_at_ns:
            return self._equal
        is_silent = now_ns - holder.heard_at_ns > SILENT_NS
        return max(holder.granted, self._equal) if is_silent else holder.granted


class HeldLeases:
    """Leases of a pool node, by the gateway that gave them.

    Args:
        budget_bits_per_s: Of the site.
        num_holders: Pool nodes of the site.
    """

    def __init__(self, budget_bits_per_s: int, num_holders: int) -> None:
        self._budget = budget_bits_per_s
        self._equal = equal_share(budget_bits_per_s, num_holders)
        self._least = idle_share(budget_bits_per_s, num_holders)
        self._leases: dict[str, tuple[int, int]] = {}

    def take(self, gateway: str, lease: Lease, now_ns: int) -> None:
        """Record a lease; it is never for more than the budget, for less than the part of an idle
        holder, nor for longer than `LEASE_NS`."""
        rate = max(self._least, min(lease.bits_per_s, self._budget))
        self._leases[gateway] = rate, now_ns + min(lease.for_ns, LEASE_NS)

    def bits_per_s(self, now_ns: int) -> int:
        """Return what all links together may send: the least of the leases that stand, so that
        several gateways never give out more than the budget; an equal share without any."""
        self._leases = {name: held for name, held in self._leases.items() if now_ns < held[1]}
        return min((rate for rate, _ in self._leases.values()), default=self._equal)
