"""Gateway's part of the budgets of sites: reports of pool nodes in, leases out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prfaas.config.clusters import ClusterTable
from prfaas.core.transfer.site_budget import TICK_NS, LeaseBook, demand
from prfaas.units import NS_PER_S
from prfaas.wire.messages.base import Message, Ping
from prfaas.wire.messages.gateway import LinkLease, LinkTelemetry


class PoolPort(Protocol):
    """Connections of a gateway to pool nodes."""

    def names(self) -> list[str]:
        """Names of all pools."""

    def answered_ns(self, pool: str) -> int:
        """Time of the last `Ping` that a pool answered; 0 is none, or that it is not connected."""

    def telemetry(self) -> Mapping[tuple[str, str], LinkTelemetry]:
        """Latest measurements of every link, by source and destination."""

    def send(self, pool: str, message: Message) -> bool:
        """Send a message to a pool; False if it is not connected."""


class LeaseGiver:
    """Gives out the budgets of all sites that have one.

    Args:
        sites: Budget of each, bits a second, and the names of its pool nodes.
    """

    def __init__(
        self,
        sites: Iterable[tuple[int, frozenset[str]]],
        pools: PoolPort,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        now_ns = clock_ns()
        self._books = [(LeaseBook(budget, names, now_ns), names) for budget, names in sites]
        self._pools, self._clock_ns = pools, clock_ns

    @classmethod
    def of(cls, clusters: Iterable[ClusterTable], pools: PoolPort) -> LeaseGiver:
        """Return one for the sites of a deployment file."""
        sites = [(c.link_budget, frozenset(c.pools)) for c in clusters if c.link_budget]
        return cls(sites, pools)

    async def run(self) -> None:
        """Give out leases until cancelled."""
        while self._books:
            self.tick()
            await asyncio.sleep(TICK_NS / NS_PER_S)

    def tick(self) -> None:
        """Give out leases once."""
        now_ns, known = self._clock_ns(), set(self._pools.names())
        measured = self._pools.telemetry()
        for book, names in self._books:
            for pool in names & known:
                if answered_ns := self._pools.answered_ns(pool):
                    heard_at_ns = min(answered_ns, now_ns)
                    book.heard(pool, _demand(pool, names, measured), heard_at_ns)
            for pool, lease in book.leases(now_ns).items():
                self._pools.send(pool, LinkLease(bits_per_s=lease.bits_per_s, for_ns=lease.for_ns))
            for pool in names & known:
                # Its answer confirms the lease before it, which a frame that crosses would not.
                self._pools.send(pool, Ping(at_ns=now_ns))


def _demand(
    pool: str, site: frozenset[str], measured: Mapping[tuple[str, str], LinkTelemetry]
) -> float:
    """Rate that the links of a pool node to other sites ask for."""
    remote = [
        link
        for (source, destination), link in measured.items()
        if source == pool and destination not in site
    ]
    backlog = sum(link.queued_bytes + link.in_flight_bytes for link in remote)
    return demand(backlog, sum(link.goodput_bits_per_s for link in remote if link.queued_bytes))
