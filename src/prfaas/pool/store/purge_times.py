"""Times of purges at a pool node: blocks of before them are misses, wherever they come from.

That a block is gone elsewhere is the word of others: of a pool node at the other end of a link, a
shared tier, or a disk that was restored. A block says when it was computed, to GRAIN_S, so what is
refused is certainly of before the purge.
"""

from __future__ import annotations

from collections import OrderedDict

from prfaas.core.cache.ages import GRAIN_S, UNKNOWN_S
from prfaas.pool.store.origins import Origin, Scope
from prfaas.wire.messages.fields import EVERY

SCOPES_MAX = 4096
"""Scopes whose last purge is remembered; the oldest is forgotten."""


class PurgeTimes:
    """The last purge of each source and tenant. A look-up costs the same however many there are.

    Args:
        pool: Name of this pool node: what it has is of itself.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._times: OrderedDict[Scope, float] = OrderedDict()
        self._of_any = 0.0
        """The last purge of any source: what is EVERY's goes with each."""

    def note(self, scope: Scope, at_s: float) -> None:
        """A purge began, Unix time in seconds."""
        self._times[scope] = max(at_s, self._times.pop(scope, 0.0))
        if scope.tenant is None:
            self._of_any = max(at_s, self._of_any)
        if len(self._times) > SCOPES_MAX:
            self._times.popitem(last=False)

    def is_before(self, origin: Origin) -> bool:
        """Return True if a block was certainly computed before a purge of its source or tenant."""
        if origin.born_s == UNKNOWN_S:
            return False
        times, sources = self._times, origin.sources
        return origin.born_s + GRAIN_S <= max(
            times.get(Scope(tenant=origin.tenant), 0.0),
            times.get(Scope(self._pool), 0.0),
            self._of_any if EVERY in sources else 0.0,
            max((times.get(Scope(each), 0.0) for each in sources), default=0.0),
        )
