"""Places for requests in the gateway, shared fairly between tenants when they run out. Pure."""

from __future__ import annotations

from prfaas.core.admission.fair_share import FairSettings, FairShare

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
