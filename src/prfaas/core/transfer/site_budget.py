"""Budget of a site's links to other sites, given out to its pool nodes as leases.

Each pool node has an equal share without any lease. A gateway gives out leases for less or more:
max-min by what waits to be sent. A lease ends after `LEASE_NS`; then its holder has the equal share
again, one that had less `RISE_NS` later.

The sum of all stays within the budget: a lease grows by what the book counts as free, and the book
counts for each holder the most that it may be sending. Holders can lose the gateway one after the
other: a lease above the equal share ends before anybody who has less rises to that, and one that is
given after somebody may have risen leaves room for it.

| holder | counts as |
|---|---|
| it confirmed its last lease | that lease |
| there are later leases that it did not confirm | the largest of them and of the confirmed one |
| the confirmed lease has ended, or there is none | equal share, or a later lease if larger |
| it was not heard of for `GONE_NS` | 0 |

A holder answers the ping that follows a lease, so that a lease is confirmed at the next tick.

The sum can be above the budget by one equal share for each holder that runs and that the gateway
has not reached for `GONE_NS`: it may be dead, and its share is given to others. No lease is below
the part of an idle holder: the kernel times the next segment of a socket by the rate of the last
one, so that a few bytes at next to nothing hold a connection up for hours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas.units import BITS_PER_BYTE, NS_PER_S

TICK_NS = NS_PER_S // 2
"""Interval of leases."""
LEASE_NS = 3 * NS_PER_S
"""Validity of a lease: several that are lost in a row change nothing."""
SILENT_NS = 2 * NS_PER_S
"""A holder that was not heard of for so long gets no further lease."""
RISE_NS = 2 * TICK_NS
"""A lease below the equal share is kept for so long after its end, so that the others have smaller
leases before its holder sends more."""
GONE_NS = 10 * NS_PER_S
"""A holder that was not heard of for so long is dead: its share goes to the others."""
DRAIN_S = 1.0
"""A backlog asks for the rate that sends it in so long."""
IDLE_SHARE = 0.1
"""Part of an equal share that a holder with nothing to send keeps, so that it can begin."""


class Lease(NamedTuple):
    """Permission to send."""

    bits_per_s: int
    """Rate of all links of the holder together."""
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
    """A pool node."""

    heard_at_ns: int
    """Time when the last ping was sent that it answered."""
    demand: float = 0.0
    """Of its last report, bits a second."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """The last lease that it confirmed, and later ones, by the time when each was sent."""
    ends_at_ns: int = 0
    """Time when the first of these ends, unless the holder has a later one."""


class LeaseBook:
    """Leases of one site's budget, as one gateway gives them out.

    Args:
        holders: Names of its pool nodes.
        now_ns: Monotonic. Nobody counts as dead before this and `GONE_NS`, and nobody gets a
            lease before this and `LEASE_NS`: holders may have leases of this gateway from before
            its restart, which the book does not know.
    """

    def __init__(self, budget_bits_per_s: int, holders: Collection[str], now_ns: int) -> None:
        self._budget = budget_bits_per_s
        self._equal = equal_share(budget_bits_per_s, len(holders))
        self._least = idle_share(budget_bits_per_s, len(holders))
        self._holders = {name: _Holder(now_ns) for name in holders}
        self._never_heard = set(holders)
        self._begins_at_ns = now_ns + LEASE_NS

    def heard(self, name: str, wanted_bits_per_s: float, heard_at_ns: int) -> None:
        """Record the last report of a holder; of other names nothing.

        Args:
            heard_at_ns: When the last ping was sent that it answered. This confirms the lease of
                that very time: an earlier one may have been lost with its connection.
        """
        if (holder := self._holders.get(name)) is not None:
            self._never_heard.discard(name)
            holder.heard_at_ns, holder.demand = heard_at_ns, wanted_bits_per_s
            if heard_at_ns in holder.leases:
                holder.leases = {
                    at: each for at, each in holder.leases.items() if at >= heard_at_ns
                }
                holder.ends_at_ns = min(at + each.for_ns for at, each in holder.leases.items())

    def leases(self, now_ns: int) -> dict[str, Lease]:
        """Return the leases to send now, of holders that are heard of."""
        if now_ns < self._begins_at_ns:
            return {}
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
        rates = {}
        is_over = sum(bounds.values()) > self._budget
        for name, holder in live.items():
            more = max(0, targets[name] - bounds[name])
            rate = min(targets[name], bounds[name]) + int(share * more)
            # What it counts as now it may only have when the leases above it have ended.
            is_early = is_over and holder.ends_at_ns <= now_ns < holder.ends_at_ns + RISE_NS
            rates[name] = self._least if is_early else max(self._least, rate)
        self._limit_high(rates, bounds)
        rises_at_ns = min(
            (
                self._holders[name].ends_at_ns + RISE_NS
                for name, bound in bounds.items()
                if 0 < bound < self._equal
            ),
            default=now_ns + LEASE_NS + TICK_NS,
        )
        found = {}
        for name, holder in live.items():
            lasts_ns = LEASE_NS
            if rates[name] > self._equal:
                lasts_ns = min(LEASE_NS, rises_at_ns - TICK_NS - now_ns)
            found[name] = holder.leases[now_ns] = Lease(rates[name], lasts_ns)
            holder.ends_at_ns = min(holder.ends_at_ns, now_ns + lasts_ns)
        return found

    def _limit_high(self, rates: dict[str, int], bounds: Mapping[str, int]) -> None:
        """Reduce leases above the equal share to what the bounds of all others leave."""
        high = {name: rate - self._equal for name, rate in rates.items() if rate > self._equal}
        others = sum(max(bounds[n], rates.get(n, 0)) for n in bounds if n not in high)
        room = max(0, self._budget - others - len(high) * self._equal)
        for name, above in high.items():
            rates[name] = self._equal + above * min(room, sum(high.values())) // sum(high.values())

    def _bound(self, name: str, now_ns: int) -> int:
        """Most that a holder may be sending now."""
        holder = self._holders[name]
        if now_ns - holder.heard_at_ns > GONE_NS:
            return 0
        # A lease arrives later than it was sent, and ends as much later.
        since_ns = now_ns - TICK_NS
        holder.leases = {at: one for at, one in holder.leases.items() if at + LEASE_NS > since_ns}
        rates = [one.bits_per_s for at, one in holder.leases.items() if at + one.for_ns > since_ns]
        return max([0 if now_ns < holder.ends_at_ns else self._equal, *rates])


class HeldLeases:
    """Leases of a pool node, by the gateway that gave them.

    Args:
        num_holders: Pool nodes of the site.
    """

    def __init__(self, budget_bits_per_s: int, num_holders: int) -> None:
        self._budget = budget_bits_per_s
        self.equal_bits_per_s = equal_share(budget_bits_per_s, num_holders)
        """Rate without a lease."""
        self._least = idle_share(budget_bits_per_s, num_holders)
        self._leases: dict[str, tuple[int, int]] = {}

    def take(self, gateway: str, lease: Lease, now_ns: int) -> None:
        """Record a lease; it is never for more than the budget, for less than the part of an idle
        holder, nor for longer than `LEASE_NS`. One below the equal share is kept for `RISE_NS`."""
        rate = max(self._least, min(lease.bits_per_s, self._budget))
        ends_at_ns = now_ns + min(lease.for_ns, LEASE_NS)
        self._leases[gateway] = rate, ends_at_ns + (RISE_NS if rate < self.equal_bits_per_s else 0)

    def bits_per_s(self, now_ns: int) -> int:
        """Return what all links together may send: the least of the leases that stand, so that
        several gateways never give out more than the budget; an equal share without any."""
        self._leases = {name: held for name, held in self._leases.items() if now_ns < held[1]}
        return min((rate for rate, _ in self._leases.values()), default=self.equal_bits_per_s)
