"""Traffic of the networks of a run, by purpose, and its cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.resources.shared_link import Purpose, SharedLink
from prfaas.sim.resources.transport import Transport
from prfaas.units import BYTES_PER_TB


@dataclass(frozen=True, slots=True)
class Traffic:
    """Links of one PrfaaS cluster to the PD cluster, or those between the hosts of one cluster.

    Attributes:
        network: Name of the PrfaaS cluster, or "hosts of" and a cluster.
        bytes_by_purpose: Bytes that left, lost ones included.
        price_by_purpose: What they cost, in the plan's currency.
        utilisation: Share of the time in which the busiest link had bytes to send.
    """

    network: str
    bytes_by_purpose: dict[str, float]
    price_by_purpose: dict[str, float]
    utilisation: float


def traffic_of(sim: Simulation) -> list[Traffic]:
    """The traffic of every network."""
    found = []
    for name, transports in networks(sim).items():
        price = transports[0].setup.price_per_tb / BYTES_PER_TB
        sent = dict.fromkeys((purpose.value for purpose in Purpose), 0.0)
        for transport in transports:
            for purpose, count in transport.link.sent_by_purpose().items():
                sent[purpose.value] += count
        prices = {purpose: count * price for purpose, count in sent.items()}
        busy_ns = max(transport.link.busy_ns for transport in transports)
        found.append(Traffic(name, sent, prices, busy_ns / max(sim.clock.now_ns, 1)))
    return found


def networks(sim: Simulation) -> dict[str, list[Transport]]:
    """Links of each PrfaaS cluster to the PD cluster, and between the hosts of each cluster."""
    found = dict(sim.wans)
    for cluster, pools in sim.setup.pools_of.items():
        if len(pools) > 1:
            within = permutations(pools, 2)
            found[f"hosts of {cluster}"] = [sim.transports[ends] for ends in within]
    return found


def window_bytes(links: Iterable[SharedLink]) -> dict[int, float]:
    """Bytes that left over links, by windows of one second."""
    total: dict[int, float] = {}
    for link in links:
        for window, count in link.window_bytes.items():
            total[window] = total.get(window, 0.0) + count
    return total
