"""Evidence for the threshold: recent requests, and the length at which all stages carry alike.

The plan's threshold is a guess about requests to come, and is wrong where they, the link or the
instances have become others. From what arrived lately and the cost model the best threshold for
exactly these requests follows: the one at which the busiest of local prefill, remote prefill and
link has least to do. With every request the plan counts less and the evidence more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import exp, log
from typing import NamedTuple

from prfaas.units import BITS_PER_BYTE, NS_PER_S

NUM_KEPT = 512
"""Number of recent requests: enough for the shares of work, few enough to follow the day."""
NUM_FOR_HALF = 128
"""Requests after which plan and evidence count alike."""


class Work(NamedTuple):
    """One request on either path.

    Attributes:
        num_new_tokens: Incremental length, tokens.
        local_ns: Prefill on a local instance.
        remote_ns: Prefill on a remote instance; None when it cannot go there.
        shipped_bytes: What the remote path ships.
    """

    num_new_tokens: int
    local_ns: int
    remote_ns: int | None
    shipped_bytes: int


class Balance:
    """Recent requests through one link, and the threshold that they ask for.

    Requests are kept in order of length with their sums, so the threshold costs O(`NUM_KEPT`)
    additions, and a request O(log `NUM_KEPT`) comparisons.

    Args:
        planned: t of the plan, tokens.
    """

    def __init__(self, planned: int) -> None:
        self._recent: deque[Work] = deque()
        self._movable: list[Work] = []
        """Those that can go to either cluster, the shortest first."""
        self._fixed_ns = self._remote_ns = self._shipped_bytes = 0
        """Local work of the others; remote work and bytes of those that can move."""
        self.replan(planned)

    def replan(self, planned: int) -> None:
        """Start over from another plan: what was seen is kept, and counts for nothing yet."""
        self._planned, self._num_seen = max(planned, 1), 0

    def note(self, work: Work) -> None:
        """Add a request; the oldest is forgotten once there are `NUM_KEPT`."""
        if len(self._recent) == NUM_KEPT:
            oldest = self._recent.popleft()
            if oldest.remote_ns is not None:
                del self._movable[bisect_left(self._movable, oldest)]
            self._add(oldest, -1)
        self._recent.append(work)
        if work.remote_ns is not None:
            insort(self._movable, work)
        self._add(work, 1)
        self._num_seen += 1

    def _add(self, work: Work, sign: int) -> None:
        if work.remote_ns is None:
            self._fixed_ns += sign * work.local_ns
        else:
            self._remote_ns += sign * work.remote_ns
            self._shipped_bytes += sign * work.shipped_bytes

    def threshold(self, num_local: float, num_remote: float, bits_per_s: float) -> int:
        """Return the threshold that plan and evidence give together, tokens.

        Args:
            num_local: Instances that prefill locally.
            num_remote: Instances of the remote cluster that this link has to itself.
            bits_per_s: What the link carries.
        """
        if not self._num_seen or num_local <= 0 or num_remote <= 0 or bits_per_s <= 0:
            return self._planned
        found = self._balanced(num_local, num_remote, bits_per_s)
        weight = self._num_seen / (self._num_seen + NUM_FOR_HALF)
        return max(1, round(exp((1 - weight) * log(self._planned) + weight * log(found))))

    def _balanced(self, num_local: float, num_remote: float, bits_per_s: float) -> int:
        """Increase the threshold from the shortest request until local prefill is the busiest."""
        ns_per_byte = BITS_PER_BYTE * NS_PER_S / bits_per_s
        local_ns, remote_ns = self._fixed_ns / num_local, self._remote_ns / num_remote
        link_ns = self._shipped_bytes * ns_per_byte
        threshold = 1
        for num_new_tokens, own_ns, away_ns, shipped_bytes in self._movable:
            local_ns += own_ns / num_local
            if local_ns > remote_ns and local_ns > link_ns:
                break
            remote_ns -= (away_ns or 0) / num_remote
            link_ns -= shipped_bytes * ns_per_byte
            threshold = num_new_tokens
        return max(threshold, 1)
