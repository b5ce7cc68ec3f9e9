"""Places for requests in the gateway, shared fairly between tenants when they run out. Pure.

The number of sequences that an engine really runs at once, learnt from its reports. Pure.

A setting may be wrong, and an engine whose KV cache is full runs fewer than it could. Both show in
an engine that lets requests wait and does not run more than before. The limit falls to the most
that it ran meanwhile, and rises again while nothing waits.
"""

from __future__ import annotations

from prfaas.core.admission.fair_slots import FairSettings, FairShare

_SEQUENCE_WORK = 10**9
"""Every sequence counts alike."""


class ConcurrencySlots:
    """Slots for concurrent sequences.

    Args:
        num_places: Sequences that may be in flight.
    """

    def __init__(self, num_places: int, settings: FairSettings) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self._fair = FairShare(settings)

    def enter(self, tenant: str, now_ns: int, num: int = 1) -> bool:
        """Take slots; False if none is free for this tenant."""
        if self.num_taken + num > self._fair.limit(tenant, self.num_places, now_ns):
            self._fair.refused(tenant, now_ns)
            return False
        self._fair.let_in(tenant, num * _SEQUENCE_WORK, now_ns)
        self.num_taken += num
        return True

    def leave(self, num: int = 1) -> None:
        """Give places back."""
        self.num_taken -= num


GROWTH_OF = 8
"""The limit rises by one of so many at each report, at least by 1."""
NUM_STABLE = 3
"""Reports in a row of requests that wait, and of no more that run, before the limit falls."""


class SlotLimit:
    """Limit of the concurrent sequences of one engine.

    Args:
        most: Its limit by its settings, at least 1.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.now = most
        """As far as is known."""
        self._peak = self._num_stable = 0

    def report(self, num_running: int, num_waiting: int, num_expected: int) -> None:
        """Handle a report of an engine.

        Args:
            num_running: Sequences in its batch.
            num_waiting: Requests that wait there.
            num_expected: Those among them that may wait for something else than a place in the
                batch: blocks in transit, or prefill before them.
        """
        if num_waiting <= num_expected or not num_running:
            self._peak = self._num_stable = 0
            if not num_waiting and num_running >= self.now:
                self.now = min(self.most, self.now + max(1, self.now // GROWTH_OF))
        elif num_running > self._peak:
            self._peak, self._num_stable = num_running, 0
        else:
            self._num_stable += 1
            if self._num_stable >= NUM_STABLE:
                self.now = min(self.most, self._peak)
