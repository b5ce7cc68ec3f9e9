"""Pace and number of connections of a link, from arrivals, the queue on the path, and losses.

Several connections under BBR or cubic find out what a path carries by filling its queue until it
drops, and lose up to a tenth of their segments to themselves. A pacer keeps their sum just below
the rate at which a queue forms: it goes up slowly while round trips are as short as the path, in
growing steps when there is room far above, and below what arrives when round trips get longer.
Segments lost at random do not lengthen round trips and so do not slow a link down.

A connection has at most `WINDOW_BYTES` on its way: what its send buffer holds. A lost segment keeps
everything that was sent after it in the buffer until it was sent again and acknowledged: another
round trip, or two where the repetition is lost too or BBR has to find its rate again. Where each
window loses something, connections that would fill a path without loss carry a half to two thirds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prfaas.units import BITS_PER_BYTE, NS_PER_S

LAN_RTT_NS = 2_000_000
"""Paths shorter than this are not paced: what is lost there is sent again at once."""
QUEUE_MIN_NS, QUEUE_SHARE = 2_500_000, 1 / 12
"""A queue is standing when it is longer than both: in time, and in round trips."""
CUT = 0.92
"""Below what arrives, so that the queue that was found drains."""
STEP_MIN, STEP_MAX = 0.01, 1 / 5
RAISE_NS = 6_000_000
"""A raise may add so much queue until it is seen, a round trip later; none follows before."""
NEAR = 0.96
"""Rate after a queue has drained, as a share of the rate at which it was found."""
NUM_SAMPLES = 6
"""Number of samples whose best is the arrival rate: retransmissions lower single ones."""
PAIR_NS = 150_000_000
"""Two samples that are not further apart count as one: what fills a gap that a lost segment left is
acknowledged at once, and missed in the sample before."""
COLLAPSE = 0.5
"""A sample below this share of what arrived before is believed: the path has become slower."""
HOLD_NS, HOLD_ROUND_TRIPS = 300_000_000, 4
"""A cut shows in the round trips after the longer of a time and some of them."""
VAIN_CUTS, HELD = 2, 0.93
"""Round trips that are as long after so many cuts in a row are those of the path, if this share of
the ceiling arrives; of a queue more does, and less under a ceiling that is too high."""
MEMORY_NS = 10 * NS_PER_S
"""Validity of the shortest round trip: the path can change."""
RATE_BITS_PER_S_MIN = 1_000_000
"""Minimum of the ceiling: a path that stalled for a moment is not a slow path."""
SLACK_MAX, SLACK_CONNECTIONS, SLACK_WEIGHT = 1.3, 1.2, 0.5
"""Limit of the sum of the connections' shares, relative to the ceiling, while less arrives: others
can use the share of a connection that recovers from a loss or is served late, and of so many
connections, which is less of the whole if there are more. What is too much shows in the next
sample; until then it fits into a short queue."""
SLOW_SAMPLES, RESTART_NS, RESTART_MAX_NS = 3, 300_000_000, 10 * NS_PER_S
"""A congestion control that leaves room below the ceiling for so many samples, with no queue on the
path, remembers a slower path: it is restarted, less and less often while that does not help."""
HELPED = 1.1
RENEW_NS = 8 * NS_PER_S
"""BBR sends next to nothing for 200 ms where it has seen no shortest round trip for 10 s, all
connections of a link at once. On a path without a queue each is restarted before, in turn."""
BOUND = 0.74
"""A link that carries this share of its ceiling is held by it."""


class Pace(NamedTuple):
    """Result of a measurement."""

    bits_per_s: int
    """The ceiling from now on; 0 is no ceiling."""
    restart: bool = False
    """True if congestion control should restart."""
    renew: bool = False
    """True if that of the connection whose turn it is should."""


class Pacer:
    """The ceiling of one link.

    Args:
        budget_bits_per_s: The operator's limit; the ceiling is never above it. 0 is no limit.
    """

    def __init__(self, budget_bits_per_s: int = 0) -> None:
        self._budget = budget_bits_per_s
        self.bits_per_s = budget_bits_per_s
        """The ceiling; 0 is no ceiling."""
        self.slack = 1.0
        """Sum of the connections' shares, relative to the ceiling."""
        self._num_slow = 0
        self._restart_at_ns = 0
        self._restart_wait_ns = RESTART_NS
        self._restart_bits_per_s = 0
        """Arrival rate at the last restart."""
        self._found_bits_per_s = 0
        """Arrival rate when a queue was last found."""
        self._step = STEP_MIN
        self._newest = (-PAIR_NS, 0)
        """Time and rate of the last sample."""
        self._recent: deque[int] = deque(maxlen=NUM_SAMPLES)
        self._hold_until_ns = 0
        self._rtt_at_cut_ns = 0
        self._vain_cuts = 0
        self._raised_at_ns = 0
        self._renewed_at_ns = 0
        self._rtts: deque[tuple[int, int]] = deque()

    @property
    def shortest_rtt_ns(self) -> int:
        """Round trip of the path without a queue; 0 if it is not known."""
        return self._rtts[0][1] if self._rtts else 0

    def limit(self, budget_bits_per_s: int) -> None:
        """Change the operator's limit; a ceiling that was the limit follows it up."""
        was_limit = self.bits_per_s >= self._budget
        self._budget = budget_bits_per_s
        if was_limit or self.bits_per_s > budget_bits_per_s:
            self.bits_per_s = budget_bits_per_s

    def sample(
        self, now_ns: int, arriving_bits_per_s: int, rtt_ns: int, num_connections: int = 1
    ) -> Pace:
        """Take a measurement in of a link that had something to send all the time.

        Args:
            arriving_bits_per_s: What was acknowledged since the sample before.
            rtt_ns: Smoothed round trip of its connections.
            num_connections: How many share the ceiling.
        """
        if not rtt_ns or not arriving_bits_per_s:
            return Pace(self.bits_per_s)
        before = self._newest
        self._newest = now_ns, arriving_bits_per_s
        if now_ns - before[0] <= PAIR_NS:
            arriving_bits_per_s = (before[1] + arriving_bits_per_s) // 2
        wanted = self.slack * self.bits_per_s / arriving_bits_per_s
        wanted = SLACK_WEIGHT * wanted + (1 - SLACK_WEIGHT) * self.slack
        slack_max = min(SLACK_MAX, 1 + SLACK_CONNECTIONS / max(1, num_connections))
        self.slack = max(1.0, min(slack_max, wanted))
        best = max(self._recent, default=0)
        if best >= BOUND * self.bits_per_s > 0 and arriving_bits_per_s < COLLAPSE * best:
            self._recent.clear()
        self._recent.append(arriving_bits_per_s)
        arriving_bits_per_s = max(self._recent)
        shortest = self._shortest(now_ns, rtt_ns)
        if shortest < LAN_RTT_NS:
            return Pace(self.bits_per_s)
        newest_bits_per_s = self._recent[-1]
        has_queue = rtt_ns - shortest > max(QUEUE_MIN_NS, shortest * QUEUE_SHARE)
        if has_queue:
            self.slack = 1.0
        restart = self._should_restart(now_ns, newest_bits_per_s, has_queue=has_queue)
        if now_ns >= self._hold_until_ns:
            if has_queue:
                self._cut(now_ns, arriving_bits_per_s, rtt_ns)
            elif self.bits_per_s and arriving_bits_per_s >= BOUND * self.bits_per_s:
                self._raise(now_ns, rtt_ns)
        renew = self.bits_per_s > 0 and not has_queue and not restart
        renew = renew and (now_ns - self._renewed_at_ns) * num_connections >= RENEW_NS
        if renew:
            self._renewed_at_ns = now_ns
        return Pace(self.bits_per_s, restart, renew)

    def _should_restart(self, now_ns: int, arriving_bits_per_s: int, *, has_queue: bool) -> bool:
        """Return True if congestion control holds the link, and not the ceiling."""
        is_slow = not has_queue and arriving_bits_per_s < BOUND * self.bits_per_s
        self._num_slow = self._num_slow + 1 if is_slow else 0
        restart = self._num_slow >= SLOW_SAMPLES and now_ns >= self._restart_at_ns
        if restart:
            has_helped = arriving_bits_per_s > HELPED * self._restart_bits_per_s
            longer_ns = min(RESTART_MAX_NS, 2 * self._restart_wait_ns)
            self._restart_wait_ns = RESTART_NS if has_helped else longer_ns
            self._restart_at_ns = now_ns + self._restart_wait_ns
            self._restart_bits_per_s = arriving_bits_per_s
            self._num_slow = 0
        return restart

    def _cut(self, now_ns: int, arriving_bits_per_s: int, rtt_ns: int) -> None:
        is_held = HELD * self.bits_per_s <= self._recent[-1] <= self.bits_per_s
        is_vain = is_held and 0 < 0.9 * self._rtt_at_cut_ns <= rtt_ns
        self._vain_cuts = self._vain_cuts + 1 if is_vain else 0
        if self._vain_cuts >= VAIN_CUTS:
            # All arrives, and the cuts before changed nothing: the path itself is longer.
            self._rtts = deque([(now_ns, rtt_ns)])
            self._rtt_at_cut_ns = self._vain_cuts = 0
            return
        self._rtt_at_cut_ns = rtt_ns
        self._found_bits_per_s = arriving_bits_per_s
        self._set(CUT * arriving_bits_per_s)
        self._step = STEP_MIN
        self._hold_until_ns = now_ns + max(HOLD_NS, HOLD_ROUND_TRIPS * rtt_ns)
        self._recent.clear()

    def _raise(self, now_ns: int, rtt_ns: int) -> None:
        if now_ns - self._raised_at_ns < rtt_ns:
            return
        self._raised_at_ns = now_ns
        self._rtt_at_cut_ns = 0
        near = int(NEAR * self._found_bits_per_s)
        if self.bits_per_s < near:
            self._set(min(near, self.bits_per_s * (1 + STEP_MAX)))
            return
        self._set(self.bits_per_s * (1 + self._step))
        self._step = min(STEP_MAX, max(STEP_MIN, RAISE_NS / rtt_ns), 2 * self._step)

    def _set(self, bits_per_s: float) -> None:
        wanted = max(RATE_BITS_PER_S_MIN, round(bits_per_s))
        self.bits_per_s = min(wanted, self._budget) if self._budget else wanted

    def _shortest(self, now_ns: int, rtt_ns: int) -> int:
        while self._rtts and now_ns - self._rtts[0][0] > MEMORY_NS:
            self._rtts.popleft()
        while self._rtts and self._rtts[-1][1] >= rtt_ns:
            self._rtts.pop()
        self._rtts.append((now_ns, rtt_ns))
        return self.shortest_rtt_ns


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
