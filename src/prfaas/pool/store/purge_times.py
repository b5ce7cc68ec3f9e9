"""Times of purges at a pool node: blocks of before them are misses, wherever they come from.

That a block is gone elsewhere is the word of others: of a pool node at the other end of a link, a
shared tier, or a disk that was restored. A block says when it was computed, to GRAIN_S, so what is
refused is certainly of before the purge.
"""

from __future__ import annotations

from prfaas.core.cache.eviction import GRAIN_S, UNKNOWN_S
from prfaas.pool.store.origins import Origin, Scope
from prfaas.wire.messages.fields import EVERY

SCOPES_MAX = 4096
"""Sources, and tenants, whose last purge is remembered; the oldest is forgotten."""


class PurgeTimes:
    """The last purge of each source and tenant. A look-up costs the same however many there are.

    Args:
        pool: Name of this pool node: what it has is of itself.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._tenants: dict[str, float] = {}
        self._sources: dict[str, float] = {}
        self._of_any = 0.0
        """The last purge of any source: what is EVERY's goes with each."""

    def note(self, scope: Scope, at_s: float) -> None:
        """A purge began, Unix time in seconds."""
        if scope.tenant is None:
            times, name, self._of_any = self._sources, scope.source, max(at_s, self._of_any)
        else:
            times, name = self._tenants, scope.tenant
        times[name] = max(at_s, times.pop(name, 0.0))
        if len(times) > SCOPES_MAX:
            del times[next(iter(times))]

    def is_before(self, origin: Origin) -> bool:
        """Return True if a block was certainly computed before a purge of its source or tenant."""
        if origin.born_s == UNKNOWN_S:
            return False
        until_s, sources = origin.born_s + GRAIN_S, self._sources
        if until_s <= self._tenants.get(origin.tenant, 0.0):
            return True
        if until_s > self._of_any:
            return False
        return (
            EVERY in origin.sources
            or until_s <= sources.get(self._pool, 0.0)
            or any(until_s <= sources.get(each, 0.0) for each in origin.sources)
        )
