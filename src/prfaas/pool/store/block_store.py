"""The store of KV blocks: what is in memory and in the tiers below it, and who hears of changes.

A block that memory evicts stays in the store if a tier below has it (`memory_room.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.keep_rules import KeepRules, Matches, Origin
from prfaas.core.cache.tenant_shares import TenantShares
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.pool.store.memory_room import LOOSE_BYTES_MAX, MemoryRoom, owned
from prfaas.pool.store.origins import LOCAL
from prfaas.pool.store.tier_ports import (
    LowerTier,
    ReadBudget,
    StoredBlock,
    StoreObserver,
    TierList,
)


class BlockStore:
    """Blocks by layout and key. Lives on one event loop; buffers may be filled elsewhere.

    Args:
        capacity_bytes: Hard limit on memory (`MemoryRoom`).
        observer: Called for every added or removed block, in order.
        order: Order of eviction; by default the least recently used block of any tenant goes first.
        loose_bytes_max: Memory limit of blocks that are received beside the store, bytes.
        rules: What is kept, and what is missed, in memory and below; by default all is kept.

    Attributes:
        room: Memory for blocks.
        order: Order of eviction, with leases, pins and shares.
        tiers: The tiers below memory.
    """

    def __init__(
        self,
        capacity_bytes: int,
        observer: StoreObserver,
        order: TenantShares[BlockName] | None = None,
        loose_bytes_max: int = LOOSE_BYTES_MAX,
        rules: KeepRules | None = None,
    ) -> None:
        self.rules = rules or KeepRules()
        self.tiers = TierList(self.rules)
        self.order = order or TenantShares(LeastRecentlyUsed(), capacity_bytes)
        self.room = MemoryRoom(capacity_bytes, self.order, self.tiers, observer, loose_bytes_max)
        self._blocks = self.room.blocks
        self._observer = observer

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: BlockName) -> bool:
        block = self._blocks.get(name)
        if block is not None and self.rules.may_read(block.origin):
            return True
        return self.tiers.find(name) is not None

    def names(self) -> Iterator[BlockName]:
        """Names of all blocks: memory's in the order of eviction, then those below."""
        yield from self.order.everything()
        for tier in self.tiers:
            yield from (name for name in tier.names() if self._is_only_in(tier, name))

    def get(self, layout_id: bytes, key: BlockKey) -> StoredBlock | None:
        """A block in memory, which counts as used now; None if it is not there, or too old."""
        name = layout_id, key
        block = self._blocks.get(name)
        if block is None:
            return None
        if not self.rules.may_read(block.origin):
            self.drop([name])
            return None
        self.room.used(name, block)
        return block

    def tier_of(self, name: BlockName) -> str | None:
        """The tier below memory that a block would be read from; None if it is in memory, or
        nowhere."""
        tier = None if name in self._blocks else self.tiers.find(name)
        return None if tier is None else tier.label

    async def probe(self, layout_id: bytes, keys: Collection[BlockKey]) -> None:
        """Have tiers look for blocks that are in none above; a fraction of a second."""
        for tier in self.tiers:
            if tier.needs_probe:
                await tier.probe(list(self._not_above(tier, layout_id, keys)))

    def needs_probe(self, layout_id: bytes, keys: Collection[BlockKey]) -> bool:
        """Return True if `probe` may find blocks."""
        return any(
            tier.needs_probe and any(True for _ in self._not_above(tier, layout_id, keys))
            for tier in self.tiers
        )

    def _not_above(
        self, tier: LowerTier, layout_id: bytes, keys: Collection[BlockKey]
    ) -> Iterator[BlockName]:
        """Blocks that are neither in memory nor in a tier above one."""
        for key in keys:
            name = layout_id, key
            if name not in self._blocks and self.tiers.find(name) in (None, tier):
                yield name

    async def fetch(
        self, layout_id: bytes, key: BlockKey, budget: ReadBudget | None = None
    ) -> StoredBlock | None:
        """A block, promoted to memory if it is only below.

        Args:
            budget: Time limit of slow reads; unlimited if absent.

        Returns:
            None if it is missing or broken, it could not be read in time, or memory is full.
        """
        name = layout_id, key
        block = self.get(layout_id, key)
        tier = self.tiers.find(name)
        if block is not None or tier is None:
            return block
        num_bytes, tenant = tier.num_bytes(name), tier.origin(name).tenant
        while self.room.would_lose(num_bytes, tenant) and await self.room.has_written():
            pass
        if name not in tier:
            return self.get(layout_id, key)
        buffer = self.room.allocate(num_bytes, tenant=tenant)
        digest = None
        if buffer is not None:
            digest = await tier.read(name, buffer, budget or ReadBudget())
        if buffer is None or digest is None:
            return self.get(layout_id, key)
        return self.keep(layout_id, key, buffer, digest, tier.origin(name))

    def lease(self, name: BlockName, until_ns: int, *, is_copy: bool = False) -> None:
        """Evict a block after the others until it is used, `release`d or the time is over."""
        block = self._blocks.get(name)
        if block is not None:
            tenant, num_bytes = block.origin.tenant, len(block.data)
            self.order.lease(name, tenant, num_bytes, until_ns, is_copy=is_copy)

    def release(self, name: BlockName) -> None:
        """End the lease of a block."""
        block = self._blocks.get(name)
        if block is not None:
            self.order.release(name, block.origin.tenant)

    def pin(self, name: BlockName, until_ns: int) -> bool:
        """Keep a block in memory until a time; False if it is not in this memory."""
        block = self._blocks.get(name)
        if block is None or self.room.is_outside(name):
            return False
        self.order.pin(name, *owned(block), until_ns)
        return True

    def unpin(self, names: Iterable[BlockName]) -> None:
        """End pins."""
        for name in names:
            if (block := self._blocks.get(name)) is not None:
                self.order.unpin(name, block.origin.tenant)

    def expire(self, now_ns: int) -> None:
        """End expired leases and pins, and drop copies outside the memory that were read."""
        self.order.expire(now_ns)
        self.room.drop_outside()

    def discard(self, layout_id: bytes, key: BlockKey) -> None:
        """Drop a block from memory unless it is pinned; unknown ones are ignored."""
        block = self._blocks.get((layout_id, key))
        if block is not None and not block.pins:
            self.room.evict((layout_id, key))

    def origin_of(self, name: BlockName) -> Origin | None:
        """Origin of a block in any tier; None if it is not here."""
        block = self._blocks.get(name)
        if block is not None:
            return block.origin
        tier = self.tiers.find(name)
        return None if tier is None else tier.origin(name)

    def num_bytes(self, name: BlockName) -> int:
        """Size of a block in any tier; 0 if it is not here."""
        block, tier = self._blocks.get(name), self.tiers.find(name)
        if block is not None:
            return len(block.data)
        return 0 if tier is None else tier.num_bytes(name)

    def in_memory(self) -> list[BlockName]:
        """Names of all blocks in memory."""
        return list(self._blocks)

    def count(self, matches: Matches, names: Iterable[BlockName]) -> tuple[set[BlockName], int]:
        """Blocks in memory with a matching origin among some blocks, and their bytes."""
        blocks = ((name, self._blocks.get(name)) for name in names)
        found = {name: b for name, b in blocks if b is not None and matches(b.origin)}
        return set(found), sum(len(block.data) for block in found.values())

    def drop(self, names: Iterable[BlockName]) -> None:
        """Remove blocks from memory immediately, also pinned and leased ones: lookups miss them.

        Running reads complete; then the memory is freed.
        """
        for name in names:
            self.room.remove(name)
            self.room.clean_bytes = 0
            if self.tiers.find(name) is None:
                layout_id, key = name
                self._observer.evicted(layout_id, [key])

    def touch(self, layout_id: bytes, keys: Iterable[BlockKey]) -> None:
        """Count blocks as used now; unknown ones are ignored."""
        for key in keys:
            self.get(layout_id, key)

    def put(
        self,
        layout_id: bytes,
        key: BlockKey,
        data: bytes | bytearray | memoryview,
        digest: bytes,
        origin: Origin = LOCAL,
        lease_until_ns: int | None = None,
        *,
        is_copy: bool = False,
    ) -> bool:
        """Store a block; an existing one is not changed.

        Args:
            data: Its bytes, which are copied unless they are in a buffer of this store.
            digest: Over name and bytes.
            origin: Where it came from.
            lease_until_ns: When a lease on it ends; None for no lease. A block that was leased
                afterwards could be gone by then: room is kept at the expense of what is not leased.
            is_copy: Another host of the site has it: once its lease ends it is evicted first. It
                evicts other copies only, and stays outside the memory if they do not suffice. As
                many as lie outside then, the next one is stored like a block of this host.

        Returns:
            False if no room can be made because everything else is pinned, the block alone is
            over the limit, or blocks of its origin are barred.
        """
        name = layout_id, key
        if self.get(layout_id, key) is not None:
            if lease_until_ns is not None:
                self.lease(name, lease_until_ns)
            return True
        buffer = self.room.buffer_with(data, origin.tenant, is_copy=is_copy)
        if buffer is None:
            return False
        kept = self.keep(layout_id, key, buffer, digest, origin)
        if lease_until_ns is not None or is_copy:
            self.lease(name, lease_until_ns or 0, is_copy=is_copy)
            if lease_until_ns is None:
                self.release(name)  # A copy that no request waits for.
        self.room.keep_room()
        return kept is not None

    def keep(
        self,
        layout_id: bytes,
        key: BlockKey,
        buffer: bytearray | memoryview,
        digest: bytes,
        origin: Origin = LOCAL,
    ) -> StoredBlock | None:
        """Store a block with its bytes in a buffer of this store's memory, or of its loose memory.

        Returns:
            The block; what is there already under this name is kept as it is. None if blocks of
            its origin are barred.
        """
        known = self.get(layout_id, key)
        if known is not None:
            return known
        if not self.rules.may_keep(origin, key.block_hash):
            return None
        block = StoredBlock(buffer, digest, origin)
        self.room.add((layout_id, key), block)
        return block

    # --- events of the tiers below ---

    def found_below(self, tier: LowerTier, names: Iterable[BlockName]) -> None:
        """A tier has blocks that this process did not write, or that it could not read before."""
        _report(self._observer.stored, (n for n in names if self._is_only_in(tier, n)))

    def gone_below(self, names: Iterable[BlockName]) -> None:
        """A tier no longer has these."""
        self.room.clean_bytes = 0
        _report(self._observer.evicted, (name for name in names if name not in self))

    def _is_only_in(self, tier: LowerTier, name: BlockName) -> bool:
        return name not in self._blocks and self.tiers.find(name) is tier

    def validate(self) -> None:
        """Check the sums of memory, the rules, and that tiers know the blocks that they name;
        AssertionError if one does not hold."""
        self.room.validate()
        self.rules.validate()
        for tier in self.tiers:
            tier.validate()


def _report(event: Callable[[bytes, list[BlockKey]], None], names: Iterable[BlockName]) -> None:
    """Report blocks to an observer, those of a layout together."""
    by_layout: dict[bytes, list[BlockKey]] = {}
    for layout_id, key in names:
        by_layout.setdefault(layout_id, []).append(key)
    for layout_id, keys in by_layout.items():
        event(layout_id, keys)
