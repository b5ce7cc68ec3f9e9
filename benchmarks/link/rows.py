"""The links that are measured, and what is asked of ours on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
QUEUE_MS = 20
BUDGET_SHARE = 0.93
"""Of the link's rate, as an operator would set it: payload and headers, and no standing queue."""


@dataclass(frozen=True)
class Row:
    """A link, and transfers over it.

    Attributes:
        name: Says all of it.
        num_bytes: Of a transfer.
        rate: Of the bottleneck, bits a second; 0 is one loopback for both ends.
        rtt_ms: Round trip.
        loss: Share of segments lost at random, in the direction of the blocks.
        goal: Share of the rate; of a loopback, Gbit/s.
        peer_goals: How much faster than the best peer, by the host's default congestion control.
        jitter_ms: Largest addition to the delay of each direction.
        reorder: Share of segments that come 3 ms later, in the direction of the blocks.
    """

    name: str
    num_bytes: int
    rate: int
    rtt_ms: float
    loss: float
    goal: float
    peer_goals: dict[str, float]
    jitter_ms: float = 0.0
    reorder: float = 0.0

    @property
    def shape(self) -> dict[str, Any]:
        """Of the lab."""
        return {
            "rtt_ms": self.rtt_ms,
            "rate_bits_per_s": self.rate,
            "loss": self.loss,
            "queue_ms": QUEUE_MS,
            "jitter_ms": self.jitter_ms,
            "reorder": self.reorder,
        }

    def shown(self, rate: float) -> str:
        """A rate as the row's goal is given."""
        return f"{rate / self.rate:.1%}" if self.rate else f"{rate / 1e9:.1f} Gbit/s"

    @property
    def goal_shown(self) -> str:
        """The goal."""
        return f"{self.goal:.0%}" if self.rate else f"{self.goal:g} Gbit/s"


def goals(cubic: float, bbr: float) -> dict[str, float]:
    return {"cubic": cubic, "bbr": bbr}


G1, G5 = 10**9, 5 * 10**9
ROWS = [
    Row("256 MiB, 1 Gbit/s, 40 ms, no loss", 256 * MIB, G1, 40, 0, 0.88, goals(1.4, 1.2)),
    Row("256 MiB, 1 Gbit/s, 40 ms, 0.1 % loss", 256 * MIB, G1, 40, 0.001, 0.85, goals(8, 1.2)),
    Row("256 MiB, 1 Gbit/s, 40 ms, 1 % loss", 256 * MIB, G1, 40, 0.01, 0.80, goals(15, 1.4)),
    Row("512 MiB, 1 Gbit/s, 100 ms, 0.1 % loss", 512 * MIB, G1, 100, 0.001, 0.80, goals(0, 0)),
    Row(
        "the same, 5 ms of jitter, 0.5 % reordered",
        512 * MIB,
        G1,
        100,
        0.001,
        0.80,
        goals(0, 0),
        5,
        0.005,
    ),
    Row(
        "512 MiB, 1 Gbit/s, 200 ms, 3 % loss, the same jitter",
        512 * MIB,
        G1,
        200,
        0.03,
        0,
        goals(0, 0),
        5,
        0.005,
    ),
    Row("64 MiB, 1 Gbit/s, 40 ms, no loss", 64 * MIB, G1, 40, 0, 0.80, goals(1.4, 1.2)),
    Row("256 MiB, 5 Gbit/s, 20 ms, no loss", 256 * MIB, G5, 20, 0, 0.75, goals(1.5, 1.5)),
    Row("512 MiB, loopback, unshaped, TLS", 512 * MIB, 0, 0, 0, 8, goals(0, 0)),
]
