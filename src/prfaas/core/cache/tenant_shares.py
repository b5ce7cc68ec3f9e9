"""Shares of tenants in a tier: a reserve that others cannot evict, and a limit.

Of the blocks of a tenant those that were used last, up to its reserve, lie in the reserve. All
other blocks, and those of tenants without a reserve, lie in one order outside, and a block that has
to make room is the first of that order, whoever needs the room. So each eviction takes constant
time, whatever the number of tenants. A block that leaves a reserve counts as used at that moment.

A tenant at its limit makes room from its own blocks. Without any share the order is that of
`LeasedLast` alone. A pin is a lease that uses do not end.

Shares of owners with several tenants each: `TenantShares` by the owner of a tag.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from prfaas.core.cache.eviction import EvictionPolicy, LeasedLast
from prfaas.core.invariants import require

K = TypeVar("K", bound=Hashable)

RESERVES_MAX = 0.75
"""Sum of all reserves: the rest is what blocks of all tenants are received into and evicted from.
"""


@dataclass(frozen=True, slots=True)
class Share:
    """Share of a tenant in each tier, as ratios of its capacity."""

    reserve: float = 0.0
    """Blocks that no other tenant can evict."""
    limit: float = 1.0
    """The most that it may hold."""


class Held(NamedTuple, Generic[K]):
    """A block in a tier."""

    key: K
    tenant: str
    """Tag of the tenant that it belongs to; empty if unknown."""
    num_bytes: int


class _Account(Generic[K]):
    """A tenant with a share of its own."""

    def __init__(self, reserve_bytes: int, limit_bytes: int) -> None:
        self.reserve_bytes, self.limit_bytes = reserve_bytes, limit_bytes
        self.reserved: OrderedDict[K, int] = OrderedDict()
        """Sizes of the blocks in the reserve, the least recently used first."""
        self.reserved_bytes = 0
        self.leases: dict[K, tuple[int, int]] = {}
        """End and bytes of each lease on a block in the reserve."""
        self.outside: OrderedDict[K, None] = OrderedDict()
        """Its other blocks, the least recently used first."""


class TenantShares(Generic[K]):
    """Order of eviction of a tier that tenants share.

    Callers pass each block's tenant and size with every event, so that nothing is kept of a block
    but its place.

    Args:
        rest: Order of the blocks outside reserves.
    """

    def __init__(self, rest: EvictionPolicy[K], capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._outside = LeasedLast(rest)
        self._accounts: dict[str, _Account[K]] = {}
        self._shares: Mapping[str, Share] = {}
        self.held_bytes: dict[str, int] = {}
        """Bytes of each tenant with a block here, by its tag."""
        self._pins: dict[K, int] = {}
        """Sizes of pinned blocks."""
        self.pinned_bytes = 0
        """Bytes of pinned blocks."""

    def assign(self, shares: Mapping[str, Share], held: Iterable[Held[K]]) -> None:
        """Set the shares from now on.

        Reserves are granted in order while they are at most RESERVES_MAX together.

        Args:
            shares: By the tag of the tenant.
            held: All blocks; those in a reserve were used last.
        """
        if shares == self._shares:
            return
        blocks = {block.key: block for block in held}
        order = [*self.everything()]
        for account in self._accounts.values():
            while account.reserved:
                self._demote(account)
        self._shares, self._accounts, left = dict(shares), {}, RESERVES_MAX
        for tenant, share in shares.items():
            reserve = min(share.reserve, left)
            left -= reserve
            self._accounts[tenant] = _Account(
                int(reserve * self._capacity_bytes), int(share.limit * self._capacity_bytes)
            )
        for key in order:
            block = blocks[key]
            owner = self._accounts.get(block.tenant)
            if owner is not None:
                owner.outside[key] = None
                self._protect(owner, key, block.num_bytes)

    # --- blocks ---

    def added(self, key: K, tenant: str, num_bytes: int) -> None:
        """A block that was not there."""
        self._outside.added(key)
        self._count(tenant, num_bytes)
        account = self._accounts.get(tenant)
        if account is not None:
            account.outside[key] = None
            self._protect(account, key, num_bytes)

    def used(self, key: K, tenant: str, num_bytes: int) -> None:
        """A block served a hit: it moves to the reserve, and a lease ends."""
        account = self._accounts.get(tenant)
        if key in self._pins:
            return
        if account is None:
            self._outside.used(key)
        elif key in account.reserved:
            account.reserved.move_to_end(key)
            account.leases.pop(key, None)
        else:
            self._outside.used(key)
            account.outside.move_to_end(key)
            self._protect(account, key, num_bytes)

    def grown(self, key: K, tenant: str, num_bytes: int) -> None:
        """A block has `num_bytes` more; less if negative."""
        self._count(tenant, num_bytes)
        account = self._accounts.get(tenant)
        if account is not None and key in account.reserved:
            account.reserved[key] += num_bytes
            account.reserved_bytes += num_bytes
            self._shrink(account)

    def removed(self, key: K, tenant: str, num_bytes: int) -> None:
        """A block is gone."""
        self.pinned_bytes -= self._pins.pop(key, 0)
        self._count(tenant, -num_bytes)
        account = self._accounts.get(tenant)
        if account is not None and key in account.reserved:
            account.reserved_bytes -= account.reserved.pop(key)
            account.leases.pop(key, None)
            return
        self._outside.removed(key)
        if account is not None:
            del account.outside[key]

    # --- order of eviction ---

    def order(self, tenant: str = "", *, spare_leased: bool = False) -> Iterator[K]:
        """Blocks that may make room for one of `tenant`, those to evict first at the front.

        No block in another tenant's reserve is among them. Valid until the next change.

        Args:
            tenant: Tag of the tenant that needs room; empty if unknown.
            spare_leased: Leave out leased blocks.
        """
        yield from self._outside.unleased()
        if not spare_leased:
            yield from self._unpinned(self._outside.leased())
        account = self._accounts.get(tenant)
        if account is not None:
            yield from self._unpinned(_reserved(account, spare_leased=spare_leased))
        if self._pins and not spare_leased:
            yield from self._pinned(self._outside.leased())
            yield from self._pinned(() if account is None else account.reserved)

    def own(self, tenant: str, *, spare_leased: bool = False) -> Iterator[K]:
        """Blocks of a tenant with a share, those to evict first at the front."""
        account = self._accounts.get(tenant)
        if account is None:
            return
        for key in self._unpinned(account.outside):
            if not spare_leased or self._outside.lease_of(key) is None:
                yield key
        yield from self._unpinned(_reserved(account, spare_leased=spare_leased))
        if self._pins and not spare_leased:
            yield from self._pinned(account.outside)
            yield from self._pinned(account.reserved)

    def excess_bytes(self, tenant: str, num_bytes: int = 0) -> int:
        """Bytes of a tenant above its limit, with `num_bytes` more; at least 0."""
        account = self._accounts.get(tenant)
        if account is None:
            return 0
        return max(0, self.held_bytes.get(tenant, 0) + num_bytes - account.limit_bytes)

    def everything(self) -> Iterator[K]:
        """All blocks, those in reserves last."""
        yield from self._outside.order()
        for account in self._accounts.values():
            yield from account.reserved

    # --- leases ---

    @property
    def num_leased(self) -> int:
        """Leased blocks, without pinned ones."""
        leased = len(self._outside) + sum(len(each.leases) for each in self._accounts.values())
        return leased - len(self._pins)

    @property
    def leased_bytes(self) -> int:
        """Bytes of leased blocks, without pinned ones."""
        leases = (lease for each in self._accounts.values() for lease in each.leases.values())
        leased = self._outside.num_bytes + sum(num_bytes for _, num_bytes in leases)
        return leased - self.pinned_bytes

    def copies(self) -> Iterator[K]:
        """Copies without lease, in order of eviction."""
        return self._outside.copies()

    def is_copy(self, key: K) -> bool:
        """Return True if a block is a copy."""
        return self._outside.is_copy(key)

    @property
    def copy_bytes(self) -> int:
        """Bytes of leased copies. No reserve has copies."""
        return self._outside.copy_bytes

    def lease(
        self, key: K, tenant: str, num_bytes: int, until_ns: int, *, is_copy: bool = False
    ) -> None:
        """Lease a block; see `LeasedLast`."""
        account = self._accounts.get(tenant)
        if account is not None and key in account.reserved:
            if not is_copy:
                known_until_ns, num_bytes = account.leases.get(key, (0, num_bytes))
                account.leases[key] = max(until_ns, known_until_ns), num_bytes
                return
            self._demote(account, key)
        self._outside.lease(key, until_ns, num_bytes, is_copy=is_copy)

    def release(self, key: K, tenant: str) -> None:
        """End a lease; no effect if it is not leased, or pinned."""
        if key in self._pins:
            return
        account = self._accounts.get(tenant)
        if account is not None and key in account.reserved:
            account.leases.pop(key, None)
        else:
            self._outside.release(key)

    def expire(self, now_ns: int) -> None:
        """End the leases whose time is over."""
        self._outside.expire(now_ns)
        for account in self._accounts.values():
            for key in [key for key, (end, _) in account.leases.items() if end <= now_ns]:
                del account.leases[key]
        self._forget_pins()

    # --- pins ---

    def is_pinned(self, key: K) -> bool:
        """Return True if a block is pinned."""
        return key in self._pins

    def pin(self, key: K, tenant: str, num_bytes: int, until_ns: int) -> None:
        """Evict a block after all others until a time, also when it is used; it is no copy then."""
        if key not in self._pins:
            self.removed(key, tenant, num_bytes)
            self.added(key, tenant, num_bytes)
            self._pins[key] = num_bytes
            self.pinned_bytes += num_bytes
        self.lease(key, tenant, num_bytes, until_ns)

    def unpin(self, key: K, tenant: str) -> None:
        """End a pin; no effect without."""
        if key in self._pins:
            self.pinned_bytes -= self._pins.pop(key)
            self.release(key, tenant)

    def _pinned(self, keys: Iterable[K]) -> Iterator[K]:
        return (key for key in keys if key in self._pins)

    def _unpinned(self, keys: Iterable[K]) -> Iterator[K]:
        return (key for key in keys if key not in self._pins) if self._pins else iter(keys)

    def _forget_pins(self) -> None:
        """Forget pins whose time is over: their leases have ended."""
        if self._pins:
            leased = set(self._outside.leased()).union(*(a.leases for a in self._accounts.values()))
            self._pins = {key: size for key, size in self._pins.items() if key in leased}
            self.pinned_bytes = sum(self._pins.values())

    def validate(self, held: Iterable[Held[K]]) -> None:
        """Check orders, sums and leases against all blocks of the tier; AssertionError if one does
        not hold."""
        blocks = {block.key: block for block in held}
        sums = dict.fromkeys((block.tenant for block in blocks.values()), 0)
        for block in blocks.values():
            sums[block.tenant] += block.num_bytes
        order = [*self.everything()]
        require((len(order), set(order)) == (len(blocks), set(blocks)), "the order of eviction")
        require(self.held_bytes == {tag: held for tag, held in sums.items() if held}, "held bytes")
        require(self._pins == {key: blocks[key].num_bytes for key in self._pins}, "pins")
        require(self.pinned_bytes == sum(self._pins.values()), "pinned bytes")
        for tag, account in self._accounts.items():
            inside = {key: blocks[key].num_bytes for key in account.reserved}
            own = {key for key, block in blocks.items() if block.tenant == tag}
            require(account.reserved == inside, "sizes in a reserve")
            require(
                account.reserved_bytes == sum(inside.values()) <= account.reserve_bytes,
                "bytes in a reserve",
            )
            require(account.leases.keys() <= inside.keys(), "leases in a reserve")
            require(own == inside.keys() | account.outside.keys(), "blocks of a tenant")
        self._outside.validate()

    # --- reserves ---

    def _count(self, tenant: str, num_bytes: int) -> None:
        held = self.held_bytes.pop(tenant, 0) + num_bytes
        if held:
            self.held_bytes[tenant] = held

    def _protect(self, account: _Account[K], key: K, num_bytes: int) -> None:
        """Move a block from outside to the reserve of its tenant, at the expense of its others."""
        if num_bytes > account.reserve_bytes or self._outside.is_copy(key):
            return
        lease = self._outside.lease_of(key)
        self._outside.removed(key)
        del account.outside[key]
        account.reserved[key] = num_bytes
        account.reserved_bytes += num_bytes
        if lease is not None:
            account.leases[key] = lease
        self._shrink(account)

    def _shrink(self, account: _Account[K]) -> None:
        while account.reserved_bytes > account.reserve_bytes:
            self._demote(account)

    def _demote(self, account: _Account[K], key: K | None = None) -> None:
        """Move a block, by default the least recently used one, from a reserve to the outside."""
        key = next(iter(account.reserved)) if key is None else key
        account.reserved_bytes -= account.reserved.pop(key)
        self._outside.added(key)
        account.outside[key] = None
        lease = account.leases.pop(key, None)
        if lease is not None:
            self._outside.lease(key, *lease)


def _reserved(account: _Account[K], *, spare_leased: bool) -> Iterator[K]:
    return (key for key in account.reserved if not spare_leased or key not in account.leases)


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

    def validate(self, held: Iterable[Held[K]]) -> None:
        """See `TenantShares`."""
        super().validate(each._replace(tenant=self._owner(each.tenant)) for each in held)

    def _owner(self, tag: str) -> str:
        """The owner of a tag, the same for as long as blocks of it are counted."""
        if tag not in self._owners:
            # A tag that gets an owner later stays without: sums would not add up otherwise.
            self._owners[tag] = self._owner_of(tag) or ""
        return self._owners[tag]
