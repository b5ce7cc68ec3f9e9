"""Number of data connections of a link, from its rate, round trip and losses.

A connection has at most `WINDOW_BYTES` on its way: what its send buffer holds. A lost segment keeps
everything that was sent after it in the buffer until it was sent again and acknowledged: another
round trip, or two where the repetition is lost too or BBR has to find its rate again. Where each
window loses something, connections that would fill a path without loss carry a half to two thirds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from prfaas.core.transfer.pacing import QUEUE_MIN_NS, QUEUE_SHARE
from prfaas.units import BITS_PER_BYTE, NS_PER_S

CONNECTIONS_MIN, CONNECTIONS_MAX = 2, 16
FAR_CONNECTIONS_MIN, FAR_RTT_NS = 4, 5_000_000
"""Over far paths one connection that lost a segment must not slow the others' blocks down."""
WINDOW_BYTES = 2_700_000
"""Bytes of a connection per round trip under Linux's default limit of send buffers, 4 MiB."""
LOSSY_ROUND_TRIPS = 3
"""Round trips that a window is held where each loses something."""
LOSSY = 0.0004
"""Share of segments sent again, without a queue on the path: about a window loses one."""
SEGMENTS_MIN = 4_000
"""A share of fewer segments is too uncertain."""
WINDOWS_MIN = 2
"""So many shares in a row: what congestion control loses once, as it starts, is no property of the
path."""


class Counters(Protocol):
    """The kernel's counters of a connection."""

    @property
    def segments(self) -> int:
        """Segments sent, those sent again included."""

    @property
    def retransmits(self) -> int:
        """Segments sent again."""

    @property
    def rtt_ns(self) -> int:
        """Smoothed round trip."""

    @property
    def min_rtt_ns(self) -> int:
        """Shortest round trip."""


def num_connections(bits_per_s: float, rtt_ns: int, *, is_lossy: bool = False) -> int:
    """Return how many: enough windows for what the link carries, and one more.

    Args:
        bits_per_s: Rate of the link.
        rtt_ns: Round trip of the path.
        is_lossy: True if every window loses something.
    """
    held_bytes = bits_per_s / BITS_PER_BYTE * rtt_ns / NS_PER_S
    held_bytes *= LOSSY_ROUND_TRIPS if is_lossy else 1
    wanted = math.ceil(held_bytes / WINDOW_BYTES) + 1
    least = FAR_CONNECTIONS_MIN if rtt_ns >= FAR_RTT_NS else CONNECTIONS_MIN
    return max(least, min(CONNECTIONS_MAX, wanted))


class PathLoss:
    """Finds out from the counters of a link's connections if its path loses segments by itself."""

    def __init__(self) -> None:
        self.is_lossy = False
        """True once it was; it stays."""
        self._before: tuple[int, int] | None = None
        self._num_windows = 0

    def sample(self, connections: Sequence[Counters]) -> None:
        """Take the counters in of all open connections."""
        now = (
            sum(each.segments for each in connections),
            sum(each.retransmits for each in connections),
        )
        before = self._before
        if before is None or now[0] < before[0] or now[1] < before[1]:
            self._before, self._num_windows = now, 0  # Connections were closed.
        elif now[0] - before[0] >= SEGMENTS_MIN:
            share = (now[1] - before[1]) / (now[0] - before[0])
            is_lost = share >= LOSSY and not _has_queue(connections)
            self._num_windows = self._num_windows + 1 if is_lost else 0
            self.is_lossy = self.is_lossy or self._num_windows >= WINDOWS_MIN
            self._before = now


def _has_queue(connections: Sequence[Counters]) -> bool:
    """Return True if the round trip shows a queue, which may be our own."""
    rtt_ns = min(each.rtt_ns for each in connections)
    shortest_ns = min(each.min_rtt_ns for each in connections)
    return rtt_ns - shortest_ns > max(QUEUE_MIN_NS, shortest_ns * QUEUE_SHARE)
