"""Traffic of the links of a run, by purpose, and its cost."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.resources.shared_link import Purpose

_BYTES_PER_TB = 1e12


@dataclass(frozen=True, slots=True)
class Traffic:
    """Both directions of one link.

    Attributes:
        cluster: PrfaaS cluster at its end.
        bytes_by_purpose: Bytes that left, lost ones included.
        price_by_purpose: What they cost, in the plan's currency.
        utilisation: Share of the time that bytes went to the PD cluster.
    """

    cluster: str
    bytes_by_purpose: dict[str, float]
    price_by_purpose: dict[str, float]
    utilisation: float


def traffic_of(sim: Simulation) -> list[Traffic]:
    """The traffic of every link."""
    found = []
    for name, transport in sim.transports.items():
        price = transport.cluster.link.price_per_tb / _BYTES_PER_TB
        by_purpose = transport.home.sent_by_purpose()
        sent = {purpose.value: by_purpose[purpose] for purpose in Purpose}
        found.append(
            Traffic(
                name,
                sent,
                {purpose: count * price for purpose, count in sent.items()},
                transport.home.busy_ns / max(sim.clock.now_ns, 1),
            )
        )
    return found


def window_bytes(sim: Simulation) -> dict[int, float]:
    """Bytes that left over all links, by windows of one second."""
    total: dict[int, float] = {}
    for link in sim.links:
        for window, count in link.window_bytes.items():
            total[window] = total.get(window, 0.0) + count
    return total
