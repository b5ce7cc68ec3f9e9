"""Tenants at a pool node: the shares that gateways announce, and what each tenant holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import nlargest

from prfaas.core.cache.tenant_shares import Share
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.wire.messages.fields import TENANTS_HELD_MAX
from prfaas.wire.messages.gateway import Subscribe, TenantUse


class AnnouncedShares:
    """Shares of all gateways, by tag. What a gateway announced holds until it subscribes again.

    Args:
        assign: Called with all shares when a gateway has announced its own.
    """

    def __init__(self, assign: Callable[[Mapping[str, Share]], None]) -> None:
        self._assign = assign
        self._by_gateway: dict[str, dict[str, Share]] = {}

    def announced(self, gateway: str, message: Subscribe) -> None:
        """A gateway has subscribed. Gateways of one deployment announce the same shares."""
        self._by_gateway[gateway] = {
            tenant: Share(reserve, limit)
            for tenant, (reserve, limit) in message.shares.items()
            if tenant
        }
        shares: dict[str, Share] = {}
        for each in self._by_gateway.values():
            shares |= each
        self._assign(shares)


def tenant_uses(store: BlockStore, disk: DiskTier | None) -> dict[str, TenantUse]:
    """Bytes of each tenant, by its tag: of those that hold the most, TENANTS_HELD_MAX at most."""
    in_memory = store.room.held_bytes
    on_disk: Mapping[str, int] = {} if disk is None else disk.held_bytes

    def held(tag: str) -> int:
        return in_memory.get(tag, 0) + on_disk.get(tag, 0)

    tags = nlargest(TENANTS_HELD_MAX, (in_memory.keys() | on_disk.keys()) - {""}, held)
    return {
        tag: TenantUse(host_bytes=in_memory.get(tag, 0), disk_bytes=on_disk.get(tag, 0))
        for tag in tags
    }
