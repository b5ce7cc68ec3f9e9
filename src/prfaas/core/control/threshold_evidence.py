"""Evidence for the threshold: recent requests, and the length at which all stages carry alike.

The plan's threshold is a guess about requests to come, and is wrong where they, the link or the
instances have become others. From what arrived lately and the cost model the best threshold for
exactly these requests follows: the one at which the busiest of local prefill, remote prefill and
link has least to do. With every request the plan counts less and the evidence more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import exp, log
from typing import NamedTuple

from prfaas.core.routing.predictions import PathWork
from prfaas.units import BITS_PER_BYTE, NS_PER_S

NUM_KEPT = 512
"""Number of recent requests: enough for the shares of work, few enough to follow the day."""
NUM_FOR_HALF = 128
"""Requests after which plan and evidence count alike."""
CHANGE_MIN = 0.03
"""Smaller changes of a threshold are not made, ln(tokens): 3 %. With 5 %, 1 % fewer requests are in
time under a stale plan."""


class Evidence(NamedTuple):
    """The threshold that plan and recent requests give together, and what it follows from.

    Attributes:
        threshold: Plan and requests together, tokens.
        balanced: The requests alone, tokens: all stages carry alike there.
        weight: Weight of the requests beside the plan, in [0, 1).
        num_local: Instances that prefill locally.
        num_remote: Instances of the remote cluster that the link has to itself.
        bits_per_s: Rate of the link.
    """

    threshold: int
    balanced: int
    weight: float
    num_requests: int
    num_local: float
    num_remote: float
    bits_per_s: float


class Balance:
    """Recent requests through one link, and the threshold that they ask for.

    Requests are kept in order of length, with sums for each side of the last threshold: the next
    one costs an addition for each request that changes sides, and a request O(log `NUM_KEPT`)
    comparisons.

    Args:
        planned: t of the plan, tokens.
    """

    def __init__(self, planned: int) -> None:
        self._recent: deque[PathWork] = deque()
        self._movable: list[PathWork] = []
        """Those that can go to either cluster, the shortest first."""
        self._num_short = 0
        """Number of them up to the last threshold."""
        self._local_ns = self._remote_ns = self._shipped_bytes = 0
        """Local work of these and of those that cannot move; remote work and bytes of the rest."""
        self.replan(planned)

    def replan(self, planned: int) -> None:
        """Start over from another plan: what was seen is kept, and counts for nothing yet."""
        self._planned, self._num_seen = max(planned, 1), 0

    def note(self, work: PathWork) -> None:
        """Add a request; the oldest is forgotten once there are `NUM_KEPT`."""
        if len(self._recent) == NUM_KEPT:
            self._count(self._recent.popleft(), -1)
        self._recent.append(work)
        self._count(work, 1)
        self._num_seen += 1

    def _count(self, work: PathWork, sign: int) -> None:
        """Add a request on its side of the threshold, or take it out."""
        if work.remote_ns is None:
            self._local_ns += sign * work.local_ns
            return
        index = bisect_left(self._movable, work)
        if sign > 0:
            self._movable.insert(index, work)
        else:
            del self._movable[index]
        if index < self._num_short:
            self._num_short += sign
            self._local_ns += sign * work.local_ns
        else:
            self._remote_ns += sign * work.remote_ns
            self._shipped_bytes += sign * work.shipped_bytes

    def evidence(self, num_local: float, num_remote: float, bits_per_s: float) -> Evidence | None:
        """Return the threshold that plan and evidence give together; None without any evidence.

        Args:
            num_local: Instances that prefill locally.
            num_remote: Instances of the remote cluster that this link has to itself.
            bits_per_s: What the link carries.
        """
        if not self._num_seen or num_local <= 0 or num_remote <= 0 or bits_per_s <= 0:
            return None
        found = self._balanced(num_local, num_remote, bits_per_s)
        weight = self._num_seen / (self._num_seen + NUM_FOR_HALF)
        both = max(1, round(exp((1 - weight) * log(self._planned) + weight * log(found))))
        seen = len(self._recent), num_local, num_remote, bits_per_s
        return Evidence(both, found, weight, *seen)

    def _balanced(self, num_local: float, num_remote: float, bits_per_s: float) -> int:
        """Move the threshold up to the shortest request that makes local prefill the busiest."""
        ns_per_byte, movable = BITS_PER_BYTE * NS_PER_S / bits_per_s, self._movable

        def is_busiest() -> bool:
            local_ns = (self._local_ns + movable[self._num_short].local_ns) / num_local
            link_ns = self._shipped_bytes * ns_per_byte
            return local_ns > self._remote_ns / num_remote and local_ns > link_ns

        if self._num_short:
            self._pass(-1)
        while self._num_short and is_busiest():
            self._pass(-1)
        while self._num_short < len(movable) and not is_busiest():
            self._pass(1)
        return max(movable[self._num_short - 1].num_new_tokens, 1) if self._num_short else 1

    def _pass(self, sign: int) -> None:
        """Move the threshold beyond the next longer request, or back before the last one."""
        _, local_ns, remote_ns, shipped_bytes = self._movable[self._num_short - (sign < 0)]
        self._num_short += sign
        self._local_ns += sign * local_ns
        self._remote_ns -= sign * (remote_ns or 0)
        self._shipped_bytes -= sign * shipped_bytes
