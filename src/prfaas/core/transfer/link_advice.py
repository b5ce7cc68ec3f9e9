"""Advice from a link test: number of connections, budget, and changes of the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH_RATIO = 0.95
"""Share of the best rate that is sufficient: more connections have no benefit."""
WINDOW_RATIO = 0.65
"""Share of the limit of send buffers that is in flight; the rest is overhead."""
RETRANSMIT_RATIO_MAX = 0.01
"""More than this is our own queueing, or a path that loses what it should not."""
BUDGET_DIGITS = 3
BBR = "bbr"


@dataclass(frozen=True, slots=True)
class Probe:
    """Measurement of a number of connections together.

    Attributes:
        goodput_bits_per_s: Bytes that the other end acknowledged.
        loaded_rtt_ns: Smoothed round trip under load, mean of all connections.
        segments: Sent while it was measured.
        retransmits: Of these, sent again.
    """

    num_connections: int
    goodput_bits_per_s: int
    rtt_ns: int
    loaded_rtt_ns: int
    segments: int
    retransmits: int

    @property
    def retransmit_ratio(self) -> float:
        """Share of segments that were sent again."""
        return self.retransmits / self.segments if self.segments else 0.0


@dataclass(frozen=True, slots=True)
class SendingHost:
    """Limits of the sending host.

    Attributes:
        congestion_control: Live on the connections.
        send_buffer_bytes_max: Limit of the kernel on the send buffer of a connection.
    """

    congestion_control: str
    send_buffer_bytes_max: int


def best_of(probes: Sequence[Probe]) -> Probe:
    """The one with the fewest connections of those that carry enough."""
    most = max(probe.goodput_bits_per_s for probe in probes)
    return min(
        (probe for probe in probes if probe.goodput_bits_per_s >= ENOUGH_RATIO * most),
        key=lambda probe: probe.num_connections,
    )


def budget_for(probes: Sequence[Probe]) -> int:
    """Bits per second that a link may send without a queue in the path.

    Pacing counts headers, goodput does not: the rate that arrived leaves room by itself.
    """
    most = max(probe.goodput_bits_per_s for probe in probes)
    step: int = 10 ** max(0, len(str(most)) - BUDGET_DIGITS)
    return most // step * step


def advise(probes: Sequence[Probe], host: SendingHost) -> list[str]:
    """Advice for the operator, one or two sentences for each point.

    Args:
        host: Where they were sent from.
    """
    best = best_of(probes)
    advice = [
        f"connections = {best.num_connections} is enough for what this path has to give",
        f'budget = "{budget_for(probes) / 1e6:g}Mbps" keeps its queue empty{_queue(best)}',
    ]
    if host.congestion_control != BBR:
        advice.append(
            f"congestion control is {host.congestion_control}, which gives way at every loss: "
            "allow BBR on the sending host (modprobe tcp_bbr; sysctl -w "
            f'net.ipv4.tcp_allowed_congestion_control="reno {host.congestion_control} bbr")'
        )
    elif best.retransmit_ratio > RETRANSMIT_RATIO_MAX:
        advice.append(
            f"{best.retransmit_ratio:.1%} of segments were sent again: without a budget BBR "
            "fills the queue of the path until it drops; test again with --budget"
        )
    return advice + _window_advice(best, host)


def _window_advice(best: Probe, host: SendingHost) -> list[str]:
    in_flight_bytes = best.goodput_bits_per_s / 8 * best.rtt_ns / 1e9
    window_bytes = WINDOW_RATIO * host.send_buffer_bytes_max
    if not window_bytes or in_flight_bytes <= window_bytes:
        return []
    wanted = 2 ** math.ceil(math.log2(in_flight_bytes / WINDOW_RATIO))
    each = window_bytes * 8 / (best.rtt_ns / 1e9)
    return [
        f"a connection cannot carry more than {each / 1e6:.0f} Mbit/s at this round trip, since "
        f"its send buffer is limited to {host.send_buffer_bytes_max >> 10} KiB: for the same rate "
        "with fewer "
        f'connections, sysctl -w net.ipv4.tcp_wmem="4096 65536 {wanted}" on the sending host, '
        f'net.ipv4.tcp_rmem="4096 131072 {wanted}" on the other'
    ]


def _queue(probe: Probe) -> str:
    queue_ms = (probe.loaded_rtt_ns - probe.rtt_ns) / 1e6
    if queue_ms < 1:
        return ""
    return f" (unpaced, a round trip grew from {probe.rtt_ns / 1e6:.1f} ms by {queue_ms:.1f} ms)"
