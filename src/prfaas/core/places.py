"""Places for requests in the gateway, shared fairly between tenants when they run out. Pure."""

from __future__ import annotations

from prfaas.core.fair_share import FairSettings, FairShare

_REQUEST_WORK = 10**9
"""Every request counts alike."""


class Places:
    """So many requests at once.

    Args:
        num_places: Requests that may be in flight.
        settings: How tenants share.
    """

    def __init__(self, num_places: int, settings: FairSettings) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self._fair = FairShare(settings)

    def enter(self, tenant: str, now_ns: int) -> bool:
        """Take a place; False if there is none, or none for a tenant that has had more."""
        if self.num_taken >= self._fair.limit(tenant, self.num_places, now_ns):
            self._fair.refused(tenant, now_ns)
            return False
        self._fair.let_in(tenant, _REQUEST_WORK, now_ns)
        self.num_taken += 1
        return True

    def leave(self) -> None:
        """Give a place back."""
        self.num_taken -= 1
