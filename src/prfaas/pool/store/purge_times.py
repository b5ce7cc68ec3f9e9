"""Times of purges at a pool node: blocks of before them are misses, wherever they come from.

That a block is gone elsewhere is the word of others: of a pool node at the other end of a link, a
shared tier, or a disk that was restored. A block says when it was computed, to GRAIN_S, so what is
refused is certainly of before the purge.
"""

from __future__ import annotations

from collections import OrderedDict

from prfaas.core.cache.ages import GRAIN_S, UNKNOWN_S
from prfaas.pool.store.origins import Origin, Scope

SCOPES_MAX = 4096
"""Scopes whose last purge is remembered; the oldest is forgotten."""


class PurgeTimes:
    """The last purge of each scope.

    Args:
        pool: Name of this pool node: what it has is of itself.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._times: OrderedDict[Scope, float] = OrderedDict()

    def note(self, scope: Scope, at_s: float) -> None:
        """A purge began, Unix time in seconds."""
        self._times[scope] = max(at_s, self._times.pop(scope, 0.0))
        if len(self._times) > SCOPES_MAX:
            self._times.popitem(last=False)

    def is_before(self, origin: Origin) -> bool:
        """Return True if a block was certainly computed before a purge of its source or tenant."""
        if origin.born_s == UNKNOWN_S:
            return False
        until_s = origin.born_s + GRAIN_S
        tenant = self._times.get(Scope(tenant=origin.tenant))
        if tenant is not None and until_s <= tenant:
            return True
        return any(
            until_s <= at_s and scope.tenant is None and scope.covers(origin, self._pool)
            for scope, at_s in self._times.items()
        )
