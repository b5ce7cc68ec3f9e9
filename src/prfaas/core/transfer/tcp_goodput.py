"""Goodput of a link over TCP from bandwidth, round trip and loss, and advice from a test.

The lowest of three limits, times what BBR was measured to keep of it:

- **Path.** BBR keeps a short path full under random loss, but for a small share. The longer the
  path and the higher the loss, the less it keeps (`_BBR_SHARE`, measured in docs/results/fit.md).
  It gives up near a loss of 20 %, where its probing gain of 1.25 no longer makes up for what is
  lost (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016,
  figure 8).
- **Window.** Linux's default limit on send buffers, 4 MiB, lets a connection have about
  `WINDOW_BYTES` under way in each round trip.
- **Loss, without BBR.** CUBIC's mean window is `1.054 (RTT / p)^(3/4)` segments, or Reno's
  `sqrt(3 / (2 p))` where that is more (RFC 9438, sections 4.3 and 5.2; Mathis et al., "The
  Macroscopic Behavior of the TCP Congestion Avoidance Algorithm", 1997). Measured against it in
  docs/results/link.md: one iperf3 connection under cubic at 1 Gbit/s and 40 ms carries 24 Mbit/s at
  0.1 % loss and 2 at 1 %; the formula has 11 and 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from prfaas.core.transfer.pacing import (
    CONNECTIONS_MAX,
    FAR_CONNECTIONS_MIN,
    WINDOW_BYTES,
    num_connections,
)
from prfaas.units import BITS_PER_BYTE, NS_PER_S

SEND_BUFFER_BYTES = 4 << 20
"""Linux's default limit on send buffers; a connection never has more under way."""
SEGMENT_BYTES = 1448
"""Payload of a segment on a path of 1,500-byte packets."""

_RTTS_S = (0.04, 0.08, 0.16, 0.3)
_BBR_SHARE = (
    (0.0, (1.0, 0.99, 0.84, 0.75)),
    (0.001, (0.99, 0.77, 0.62, 0.55)),
    (0.01, (0.92, 0.64, 0.51, 0.44)),
    (0.03, (0.73, 0.50, 0.40, 0.35)),
    (0.2, (0.0, 0.0, 0.0, 0.0)),
)
"""Loss, and the share that is left under BBR at each of `_RTTS_S`; straight lines between losses,
and between logarithms of round trips. Shorter paths are as 40 ms; 3 % was measured at 40 ms."""
_CUBIC_C, _CUBIC_BETA = 0.4, 0.7
_CUBIC: float = (_CUBIC_C * (3 + _CUBIC_BETA) / (4 * (1 - _CUBIC_BETA))) ** 0.25
_RENO = math.sqrt(1.5)


class CongestionControl(StrEnum):
    """Congestion control of the data connections."""

    BBR = "bbr"
    """Congestion control that pool nodes request; a host has to allow it."""
    CUBIC = "cubic"
    """Linux's default, where BBR is not allowed."""


@dataclass(frozen=True, slots=True)
class TcpPath:
    """A path between two clusters."""

    bits_per_s: float
    """What transfers can use of it without loss, above 0."""
    rtt_s: float = 0.0
    """Round trip, s, 0 or more."""
    loss: float = 0.0
    """Share of segments that the path loses at random, in [0, 1)."""


@dataclass(frozen=True, slots=True)
class TcpEnds:
    """Both ends of a link."""

    num_nodes: int = 1
    """Pool nodes that send side by side, at least 1; each has connections of its own."""
    connections: int = 0
    """Data connections of a node; 0 is as many as a node opens by itself."""
    control: CongestionControl = CongestionControl.BBR
    window_bytes: float = WINDOW_BYTES
    """What a connection may have under way."""

    @property
    def alone(self) -> TcpEnds:
        """One of its pool nodes."""
        return replace(self, num_nodes=1)


def goodput_bits_per_s(path: TcpPath, transport: TcpEnds) -> float:
    """Goodput of a link, bit/s: it never rises with the round trip or the loss.

    References:
        RFC 9438; the others are in the module's docstring.
    """
    is_cubic = transport.control is CongestionControl.CUBIC
    share = _bbr_share(path.rtt_s, 0.0 if is_cubic else path.loss)
    each = _connection_bits_per_s(path, transport)
    if math.isinf(each):
        return path.bits_per_s * share
    count = transport.connections or _connections(path, transport)
    return min(path.bits_per_s, transport.num_nodes * count * each) * share


def most_bits_per_s(path: TcpPath, transport: TcpEnds) -> float:
    """Goodput that a link never exceeds, bit/s: the path, or all send buffers full."""
    if path.rtt_s <= 0:
        return path.bits_per_s
    count = transport.num_nodes * (transport.connections or CONNECTIONS_MAX)
    full = transport.window_bytes * SEND_BUFFER_BYTES / WINDOW_BYTES
    return min(path.bits_per_s, count * full * BITS_PER_BYTE / path.rtt_s)


def _connections(path: TcpPath, transport: TcpEnds) -> int:
    """Connections that a node opens by itself.

    It opens as many as what it carries asks for. Where loss holds CUBIC's windows far below their
    limit that is the least, which is taken for every loss: a longer path never carries more.
    """
    if transport.control is CongestionControl.CUBIC and path.loss > 0:
        return FAR_CONNECTIONS_MIN
    share = path.bits_per_s / transport.num_nodes
    wanted = num_connections(share, round(path.rtt_s * NS_PER_S))
    return max(FAR_CONNECTIONS_MIN, wanted)


def _connection_bits_per_s(path: TcpPath, transport: TcpEnds) -> float:
    if path.rtt_s <= 0:
        return math.inf
    window = transport.window_bytes
    if transport.control is CongestionControl.CUBIC and path.loss > 0:
        window = min(window, _cubic_segments(path) * SEGMENT_BYTES)
    return window * BITS_PER_BYTE / path.rtt_s


def _cubic_segments(path: TcpPath) -> float:
    """Mean congestion window of CUBIC, segments."""
    cubic = _CUBIC * math.pow(path.rtt_s / path.loss, 0.75)
    return max(cubic, _RENO / math.sqrt(path.loss))


def _bbr_share(rtt_s: float, loss: float) -> float:
    """Share that is left under BBR; it falls with both."""
    beyond = max(rtt_s / _RTTS_S[-1], 1.0)
    if loss >= _BBR_SHARE[-1][0]:
        return 0.0
    for (low, near), (high, far) in pairwise(_BBR_SHARE):
        if loss <= high:
            weight = (loss - low) / (high - low)
            at_low, at_high = _at_rtt(rtt_s, near), _at_rtt(rtt_s, far)
            return (at_low + (at_high - at_low) * weight) / beyond
    return 0.0


def _at_rtt(rtt_s: float, shares: tuple[float, ...]) -> float:
    if rtt_s <= _RTTS_S[0]:
        return shares[0]
    rows = zip(_RTTS_S, shares, strict=True)
    for (low, high_share), (high, low_share) in pairwise(rows):
        if rtt_s <= high:
            weight = math.log(rtt_s / low) / math.log(high / low)
            return high_share + (low_share - high_share) * weight
    return shares[-1]


@dataclass(frozen=True, slots=True)
class Measured:
    """Conditions under which transfers of this project were measured."""

    rtt_s: float
    loss: float
    node_bits_per_s: float
    """Highest goodput of one pool node over a path with a round trip."""
    in_flight_bytes: float
    """Most that one pool node had under way: its goodput times the round trip."""
    controls: frozenset[CongestionControl]

    def gaps(self, path: TcpPath, transport: TcpEnds, link_bits_per_s: float) -> list[str]:
        """Return the requirements of a link beyond the measurements, as text.

        Args:
            link_bits_per_s: What the link has to carry.
        """
        each = link_bits_per_s / transport.num_nodes
        in_flight = each * path.rtt_s / BITS_PER_BYTE
        beyond = {
            f"round trips above {self.rtt_s * 1e3:g} ms": path.rtt_s > self.rtt_s,
            f"loss above {self.loss * 100:g} %": path.loss > self.loss,
            f"more than {self.node_bits_per_s / 1e9:g} Gbit/s from one pool node": each
            > self.node_bits_per_s,
            f"more than {self.in_flight_bytes / 1e6:g} MB in flight from one pool node": in_flight
            > self.in_flight_bytes,
            f"links under {transport.control}": transport.control not in self.controls,
        }
        return [what for what, is_beyond in beyond.items() if is_beyond]


MEASURED = Measured(0.3, 0.01, 3.9e9, 24e6, frozenset({CongestionControl.BBR}))
"""Measurements of docs/results/link.md and docs/results/fit.md."""


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
    """Measurement of a number of connections together."""

    num_connections: int
    goodput_bits_per_s: int
    """Bytes that the other end acknowledged."""
    rtt_ns: int
    loaded_rtt_ns: int
    """Smoothed round trip under load, mean of all connections."""
    segments: int
    """Sent while it was measured."""
    retransmits: int
    """Of these, sent again."""

    @property
    def retransmit_ratio(self) -> float:
        """Share of segments that were sent again."""
        return self.retransmits / self.segments if self.segments else 0.0


@dataclass(frozen=True, slots=True)
class SendingHost:
    """Limits of the sending host."""

    congestion_control: str
    """Live on the connections."""
    send_buffer_bytes_max: int
    """Limit of the kernel on the send buffer of a connection."""


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
