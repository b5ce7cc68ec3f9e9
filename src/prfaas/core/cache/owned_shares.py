"""Shares of owners with several tenants each: `TenantShares` by the owner of a tag."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from prfaas.core.cache.eviction import EvictionPolicy
from prfaas.core.cache.tenant_shares import Held, Share, TenantShares

K = TypeVar("K", bound=Hashable)


class OwnedShares(TenantShares[K]):
    """Order of eviction of a tier that sites share. Callers pass tags of tenants, as before.

    Args:
        rest: Order of the blocks outside reserves.
        owner_of: Name of the owner of a tag; None while it has none. The first answer counts.
    """

    def __init__(
        self,
        rest: EvictionPolicy[K],
        capacity_bytes: int,
        owner_of: Callable[[str], str | None],
    ) -> None:
        super().__init__(rest, capacity_bytes)
        self._owner_of = owner_of
        self._owners: dict[str, str] = {}

    def assign(self, shares: Mapping[str, Share], held: Iterable[Held[K]]) -> None:
        """See `TenantShares`; shares are by owner."""
        super().assign(shares, (each._replace(tenant=self._owner(each.tenant)) for each in held))

    def added(self, key: K, tenant: str, num_bytes: int) -> None:
        """See `TenantShares`."""
        super().added(key, self._owner(tenant), num_bytes)

    def used(self, key: K, tenant: str, num_bytes: int) -> None:
        """See `TenantShares`."""
        super().used(key, self._owner(tenant), num_bytes)

    def grown(self, key: K, tenant: str, num_bytes: int) -> None:
        """See `TenantShares`."""
        super().grown(key, self._owner(tenant), num_bytes)

    def removed(self, key: K, tenant: str, num_bytes: int) -> None:
        """See `TenantShares`."""
        super().removed(key, self._owner(tenant), num_bytes)

    def order(self, tenant: str = "", *, spare_leased: bool = False) -> Iterator[K]:
        """See `TenantShares`."""
        return super().order(self._owner(tenant), spare_leased=spare_leased)

    def own(self, tenant: str, *, spare_leased: bool = False) -> Iterator[K]:
        """See `TenantShares`."""
        return super().own(self._owner(tenant), spare_leased=spare_leased)

    def excess_bytes(self, tenant: str, num_bytes: int = 0) -> int:
        """See `TenantShares`."""
        return super().excess_bytes(self._owner(tenant), num_bytes)

    def lease(
        self, key: K, tenant: str, num_bytes: int, until_ns: int, *, is_copy: bool = False
    ) -> None:
        """See `TenantShares`."""
        super().lease(key, self._owner(tenant), num_bytes, until_ns, is_copy=is_copy)

    def release(self, key: K, tenant: str) -> None:
        """See `TenantShares`."""
        super().release(key, self._owner(tenant))

    def _owner(self, tag: str) -> str:
        """The owner of a tag, the same for as long as blocks of it are counted."""
        if tag not in self._owners:
            # A tag that gets an owner later stays without: sums would not add up otherwise.
            self._owners[tag] = self._owner_of(tag) or ""
        return self._owners[tag]
