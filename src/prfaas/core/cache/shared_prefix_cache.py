"""A prefix cache that tenants share, with reserves and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.prefix_cache import PrefixCache
from prfaas.core.cache.tenant_shares import Share, TenantShares


class SharedPrefixCache(PrefixCache):
    """A prefix cache that evicts like the pool nodes of tenants with shares.

    A block is of the tenant that `tenant` named when it was stored.

    Args:
        checkpoint_blocks: Size of one checkpoint, blocks; 0 for a model without linear state.
        on_evict: Called with the key and the tenant of everything that is evicted.
    """

    def __init__(
        self,
        capacity_blocks: int,
        checkpoint_blocks: int,
        shares: Mapping[str, Share],
        on_evict: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        super().__init__(capacity_blocks, checkpoint_blocks)
        self._capacity_blocks = capacity_blocks
        self._shares = shares
        self._on_eviction = on_evict
        self._owners: dict[int, str] = {}
        self.clear()
        self.tenant = ""
        """Tenant of the blocks that are stored from now on."""

    def touch(self, block_ids: Sequence[int], num_used: int) -> None:
        """Note that the first `num_used` blocks served a hit."""
        used = [*reversed(block_ids[:num_used])]
        if num_used:
            used.insert(0, ~block_ids[num_used - 1])
        for key in used:
            if key in self._owners:
                self._policy.used(key, self._owners[key], self._room(key))

    def clear(self) -> None:
        """Lose everything, as when a host restarts."""
        super().clear()
        self._owners.clear()
        self._policy: TenantShares[int] = TenantShares(LeastRecentlyUsed(), self._capacity_blocks)
        self._policy.assign(self._shares, ())

    def discard(self, key: int) -> None:
        """Drop one block or checkpoint without a call of `on_evict`."""
        if key in self._held:
            self._policy.removed(key, self._owners.pop(key), self._room(key))
        super().discard(key)

    def _hold(self, keys: Sequence[int], room: int) -> None:
        for key in reversed(keys):
            if key in self._owners:
                self._policy.used(key, self._owners[key], room)
                continue
            self._held[key] = None
            self._owners[key] = self.tenant
            self._used += room
            self._policy.added(key, self.tenant, room)

    def _evict(self) -> None:
        while self._policy.excess_bytes(self.tenant):
            self._drop(next(self._policy.own(self.tenant)))
        while self._used > self._capacity_blocks:
            self._drop(next(self._policy.order(self.tenant)))

    def _drop(self, key: int) -> None:
        tenant = self._owners[key]
        self.discard(key)
        self._on_eviction(key, tenant)
