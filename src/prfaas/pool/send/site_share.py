"""A pool node's share of its site's budget, divided among its links to other sites."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prfaas.core.transfer.site_budget import HeldLeases, Lease, allocate, demand
from prfaas.pool.send.outbound_link import OutboundLink


class SiteShare:
    """Limits links by the lease that stands, or by an equal share of the budget.

    A link whose own budget is less than its part keeps to its own.

    Args:
        budget_bits_per_s: Of the site; 0 limits nothing.
        site: Names of the pool nodes of the site, this one included.
    """

    def __init__(
        self,
        budget_bits_per_s: int,
        site: frozenset[str],
        links: Mapping[str, OutboundLink],
    ) -> None:
        self._is_limited = budget_bits_per_s > 0
        self._leases = HeldLeases(budget_bits_per_s, len(site))
        self._site, self._links = site, links
        self.apply()

    def take(self, gateway: str, lease: Lease) -> None:
        """Follow a lease that a gateway gave."""
        if self._is_limited:
            self._leases.take(gateway, lease, time.monotonic_ns())
            self.apply()

    def apply(self) -> None:
        """Divide what the node may send now by what waits for each link."""
        if not self._is_limited:
            return
        remote = {peer: link for peer, link in self._links.items() if peer not in self._site}
        wanted = {}
        for peer, link in remote.items():
            seen = link.telemetry
            wanted[peer] = demand(seen.queued_bytes + seen.in_flight_bytes, 0)
        held = self._leases.bits_per_s(time.monotonic_ns())
        most = max(held, self._leases.equal_bits_per_s)
        idle = next((peer for peer, rate in wanted.items() if not rate), "")
        # The same for each idle link: what it would have if it asked for all.
        asking = allocate(most, wanted | {idle: float(most)})[idle] if idle else 0
        for peer, rate in allocate(held, wanted).items():
            remote[peer].control.limit(max(1, rate), max(1, asking))
