"""The store of KV blocks: host memory up to a hard limit, and tiers below it.

A block that memory evicts stays in the store if a tier below has it. Blocks are written to the
disk while they are still in memory (`spilling.py`); what the disk was too slow for is dropped. A
tier that several pool nodes share is offered every block once, when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from prfaas.core.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from prfaas.core.cache.keep_rules import KeepRules, Matches, Origin
from prfaas.core.cache.tenant_shares import Held, OwnedShares, Share, TenantShares
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.pool.store.arena import Arena, charged_bytes
from prfaas.pool.store.origins import LOCAL
from prfaas.pool.store.overflow_buffers import LooseMemory
from prfaas.pool.store.spilling import Spilling
from prfaas.pool.store.tier_ports import LowerTier, ReadBudget, StoredBlock, StoreObserver

RECEIVE_RATIO, RECEIVE_BYTES_MAX = 0.125, 64 << 20
"""Share of memory that is kept free for blocks that are being received, and where that ends."""
LOOSE_BYTES_MAX = 32 << 20
"""Limit of blocks that are received outside the memory of a full store."""
OUTSIDE_RATIO = 0.5
"""Share of that limit for copies that stay outside; the rest is for blocks that are received."""


class BlockStore:
    """Blocks by layout and key. Lives on one event loop; buffers may be filled elsewhere.

    Args:
        capacity_bytes: Hard limit on memory: all blocks, and the buffers that blocks are received
            into, together. What is being received when all of it is taken lies outside until it is
            put, `loose_bytes_max` at most (`receive_buffer`). Copies without room stay outside.
        observer: Called for every added or removed block, in order.
        policy: Order of eviction of blocks without lease and outside reserves.
        on_lost: Called for every block dropped before the disk had written it.
        loose_bytes_max: Memory limit of blocks that are received beside the store, bytes.
        owner_of: Owner of a tenant's tag, where shares are those of owners and not of tenants.
        rules: Blocks that may be kept and read, in memory and below; the default allows all.
    """

    def __init__(
        self,
        capacity_bytes: int,
        observer: StoreObserver,
        policy: EvictionPolicy[BlockName] | None = None,
        on_lost: Callable[[], None] = lambda: None,
        loose_bytes_max: int = LOOSE_BYTES_MAX,
        owner_of: Callable[[str], str | None] | None = None,
        rules: KeepRules | None = None,
    ) -> None:
        self.rules = rules or KeepRules()
        self.arena = Arena(capacity_bytes)
        self.used_bytes = 0
        self._observer = observer
        rest = policy or LeastRecentlyUsed[BlockName]()
        self._policy: TenantShares[BlockName] = (
            TenantShares(rest, capacity_bytes)
            if owner_of is None
            else OwnedShares(rest, capacity_bytes, owner_of)
        )
        self._on_lost = on_lost
        self._blocks: dict[BlockName, StoredBlock] = {}
        self._disk: LowerTier | None = None
        self._shared: LowerTier | None = None
        self._lower: list[LowerTier] = []
        """The tiers below, the fastest first."""
        self._loose = LooseMemory(loose_bytes_max)
        self._outside: dict[BlockName, int] = {}
        """Copies that stay in loose memory until they are read, and their bytes."""
        self._outside_max = int(loose_bytes_max * OUTSIDE_RATIO)
        self._arena_stored_bytes = 0
        """Memory of the arena that stored blocks take; the rest is being received into."""
        self._short_bytes = 0
        """The largest block that was received without free memory."""
        self._spilling = Spilling(
            self.arena, self._blocks, self._policy.everything, self._arena_bytes, self.keep_room
        )

    def share(self, shares: Mapping[str, Share]) -> None:
        """Set the tenants' shares of memory from now on, by their tags."""
        self._policy.assign(shares, (Held(name, *_owned(b)) for name, b in self._blocks.items()))

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Memory of each tenant's blocks, by its tag; empty for blocks of an unknown tenant."""
        return self._policy.held_bytes

    def spill_to(self, disk: LowerTier) -> None:
        """Have a disk below, from now on."""
        self._disk = self._spilling.disk = disk
        self._lower.insert(0, disk)

    def share_with(self, shared: LowerTier) -> None:
        """Have a tier below, from now on, that other pool nodes use too."""
        self._shared = shared
        self._lower.append(shared)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: BlockName) -> bool:
        block = self._blocks.get(name)
        if block is not None and self.rules.may_read(block.origin):
            return True
        return self._below(name) is not None

    @property
    def num_pinned(self) -> int:
        """Blocks in memory that are pinned by readers."""
        return sum(block.pins > 0 for block in self._blocks.values())

    @property
    def loose_bytes(self) -> int:
        """Memory in use beside stored blocks: blocks being received or still being read."""
        outside = self._loose.used_bytes - self.outside_bytes
        return self.arena.used_bytes - self._arena_stored_bytes + outside

    @property
    def outside_bytes(self) -> int:
        """Bytes of the copies that are kept in loose memory."""
        return sum(self._outside.values())

    @property
    def capacity_bytes(self) -> int:
        """The limit on memory."""
        return self.arena.capacity_bytes

    def names(self) -> Iterator[BlockName]:
        """Names of all blocks: memory's in the order of eviction, then those below."""
        yield from self._policy.everything()
        for tier in self._lower:
            yield from (name for name in tier.names() if self._is_only_in(tier, name))

    def get(self, layout_id: bytes, key: BlockKey) -> StoredBlock | None:
        """A block in memory, which counts as used now; None if it is not there, or too old."""
        name = layout_id, key
        block = self._blocks.get(name)
        if block is not None and not self.rules.may_read(block.origin):
            self.drop([name])
            return None
        if block is not None:
            self._use(name, block)
        return block

    @property
    def is_writing(self) -> bool:
        """Return True if the disk has not taken all that was offered to it."""
        return bool(self._spilling.writing)

    def tier_of(self, name: BlockName) -> str | None:
        """The tier below memory that a block would be read from; None if it is in memory, or
        nowhere."""
        tier = None if name in self._blocks else self._below(name)
        return None if tier is None else tier.label

    async def probe(self, layout_id: bytes, keys: Collection[BlockKey]) -> None:
        """Have the shared tier look for blocks that this node does not hold; a fraction of a
        second."""
        if self._shared is not None:
            await self._shared.probe(list(self._not_held(layout_id, keys)))

    def needs_probe(self, layout_id: bytes, keys: Collection[BlockKey]) -> bool:
        """Return True if `probe` may find blocks."""
        if self._shared is None or not self._shared.needs_probe:
            return False
        return next(self._not_held(layout_id, keys), None) is not None

    def _not_held(self, layout_id: bytes, keys: Collection[BlockKey]) -> Iterator[BlockName]:
        """Blocks that are neither in memory nor on disk."""
        for key in keys:
            name = layout_id, key
            if name not in self._blocks and self._below(name) in (None, self._shared):
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
        tier = self._below(name)
        if block is not None or tier is None:
            return block
        num_bytes, tenant = tier.num_bytes(name), tier.origin(name).tenant
        while self._would_lose(num_bytes, tenant) and await self._spilling.has_written():
            pass
        if name not in tier:
            return self.get(layout_id, key)
        buffer = self.allocate(num_bytes, tenant=tenant)
        digest = None
        if buffer is not None:
            digest = await tier.read(name, buffer, budget or ReadBudget())
        if buffer is None or digest is None:
            return self.get(layout_id, key)
        return self.keep(layout_id, key, buffer, digest, tier.origin(name))

    @property
    def num_leased(self) -> int:
        """Leased blocks."""
        return self._policy.num_leased

    @property
    def leased_bytes(self) -> int:
        """Bytes of leased blocks."""
        return self._policy.leased_bytes

    def lease(self, name: BlockName, until_ns: int, *, is_copy: bool = False) -> None:
        """Evict a block after the others until it is used, `release`d or the time is over."""
        block = self._blocks.get(name)
        if block is not None:
            tenant, num_bytes = block.origin.tenant, len(block.data)
            self._policy.lease(name, tenant, num_bytes, until_ns, is_copy=is_copy)

    def release(self, name: BlockName) -> None:
        """End the lease of a block."""
        block = self._blocks.get(name)
        if block is not None:
            self._policy.release(name, block.origin.tenant)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned blocks."""
        return self._policy.pinned_bytes

    def pin(self, name: BlockName, until_ns: int) -> bool:
        """Keep a block in memory until a time; False if it is not in this memory."""
        block = self._blocks.get(name)
        if block is None or name in self._outside:
            return False
        self._policy.pin(name, *_owned(block), until_ns)
        return True

    def unpin(self, names: Iterable[BlockName]) -> None:
        """End pins."""
        for name in names:
            if (block := self._blocks.get(name)) is not None:
                self._policy.unpin(name, block.origin.tenant)

    def is_pinned(self, name: BlockName) -> bool:
        """Return True if a block is pinned."""
        return self._policy.is_pinned(name)

    def expire(self, now_ns: int) -> None:
        """End expired leases and pins, and drop copies outside the memory that were read."""
        self._policy.expire(now_ns)
        self._drop_outside()

    def discard(self, layout_id: bytes, key: BlockKey) -> None:
        """Drop a block from memory unless it is pinned; unknown ones are ignored."""
        block = self._blocks.get((layout_id, key))
        if block is not None and not block.pins:
            self._evict((layout_id, key))

    def origin_of(self, name: BlockName) -> Origin | None:
        """Origin of a block in any tier; None if it is not here."""
        block = self._blocks.get(name)
        if block is not None:
            return block.origin
        tier = self._below(name)
        return None if tier is None else tier.origin(name)

    def num_bytes(self, name: BlockName) -> int:
        """Size of a block in any tier; 0 if it is not here."""
        block, tier = self._blocks.get(name), self._below(name)
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
            self._remove(name)
            self._spilling.clean_bytes = 0
            if self._below(name) is None:
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
        if isinstance(data, memoryview) and self.arena.owns(data):
            buffer: bytearray | memoryview | None = data
        else:
            buffer = self._room_for_copy(data, origin.tenant) if is_copy else None
            if buffer is None:
                buffer = self.allocate(len(data), tenant=origin.tenant)
        if buffer is None:
            return False
        if buffer is not data:
            buffer[:] = data
        kept = self.keep(layout_id, key, buffer, digest, origin)
        if lease_until_ns is not None or is_copy:
            self.lease(name, lease_until_ns or 0, is_copy=is_copy)
            if lease_until_ns is None:
                self.release(name)  # A copy that no request waits for.
        self.keep_room()
        return kept is not None

    def receive_buffer(self, num_bytes: int) -> bytearray | memoryview | None:
        """Memory to receive a block into before it is put. Any thread may ask.

        Where all memory is taken it is a buffer of its own, and from then on some is kept free.

        Returns:
            None if memory is full; `keep_room` frees some for the next.
        """
        if num_bytes > self.capacity_bytes:
            return None
        buffer = self.arena.allocate(num_bytes)
        if buffer is not None:
            return buffer
        self._short_bytes = max(self._short_bytes, num_bytes)
        return self._loose.allocate(num_bytes)

    def allocate(
        self,
        num_bytes: int,
        *,
        tenant: str = "",
        spare_leased: bool = False,
        spare_own: bool = False,
    ) -> memoryview | None:
        """A buffer for a block, from the memory of this store; others are evicted for it.

        Args:
            tenant: Tag of the tenant that the block belongs to.
            spare_leased: Evict no leased block.
            spare_own: Evict copies without lease only, except for the limit of the tenant.

        Returns:
            None if not enough memory can be freed.
        """
        is_within = self._make_way(tenant, charged_bytes(num_bytes), spare_leased=spare_leased)
        spared = {"spare_leased": spare_leased, "spare_own": spare_own}
        if not is_within or self._victims(num_bytes, tenant, **spared) is None:
            return None
        while (buffer := self.arena.allocate(num_bytes)) is None:
            victim = next(self._evictable(tenant, **spared), None)
            if victim is None:
                return None
            self._evict(victim)
        self._spilling.clean_bytes -= charged_bytes(num_bytes)
        return buffer

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
        name = layout_id, key
        known = self.get(layout_id, key)
        if known is not None:
            return known
        if not self.rules.may_keep(origin, key.block_hash):
            return None
        is_new = name not in self
        block = self._blocks[name] = StoredBlock(buffer, digest, origin)
        self.used_bytes += len(buffer)
        if LooseMemory.owns(buffer):
            self._outside[name] = len(buffer)
        self._arena_stored_bytes += self._arena_bytes(name)
        self._policy.added(name, *_owned(block))
        self._spilling.clean_bytes -= charged_bytes(len(buffer))
        if is_new:
            self._observer.stored(layout_id, [key])
            self._share(name, block)
        self._make_way(origin.tenant)
        self._spilling.spill()
        return block

    def _share(self, name: BlockName, block: StoredBlock) -> None:
        """Offer a new block to the shared tier."""
        if self._shared is not None and self._shared.offer(name, block, partial(_unpin, block)):
            block.pins += 1

    def spill(self, *, again: bool = False) -> None:
        """Offer to the disk what would be evicted next, if it is not there yet.

        Args:
            again: Even if it refused before and has written nothing since: it may have recovered.
        """
        self._spilling.spill(again=again)

    # --- callbacks of the tiers below ---

    def found_below(self, tier: LowerTier, names: Iterable[BlockName]) -> None:
        """A tier has blocks that this process did not write, or that it could not read before."""
        _report(self._observer.stored, (n for n in names if self._is_only_in(tier, n)))

    def gone_below(self, names: Iterable[BlockName]) -> None:
        """A tier no longer has these."""
        self._spilling.clean_bytes = 0
        _report(self._observer.evicted, (name for name in names if name not in self))

    def _below(self, name: BlockName) -> LowerTier | None:
        """The fastest tier below memory that has a block, which is not too old."""
        found = (tier for tier in self._lower if name in tier)
        return next((tier for tier in found if self.rules.may_read(tier.origin(name))), None)

    def _is_only_in(self, tier: LowerTier, name: BlockName) -> bool:
        return name not in self._blocks and self._below(name) is tier

    # --- free memory ---

    def _use(self, name: BlockName, block: StoredBlock) -> None:
        self._policy.used(name, *_owned(block))
        self._spilling.clean_bytes -= charged_bytes(len(block.data))

    def _room_for_copy(
        self, data: bytes | bytearray | memoryview, tenant: str
    ) -> bytearray | memoryview | None:
        """A buffer for a copy that costs no block of this host; None if there is none.

        A copy that replaced such a block would lose content of the site.
        """
        buffer = self.allocate(len(data), tenant=tenant, spare_own=True)
        if buffer is not None:
            return buffer
        is_within = self.outside_bytes + len(data) <= self._outside_max
        if not is_within or isinstance(data, bytes) or not LooseMemory.owns(data):
            return None
        return data

    def _drop_outside(self) -> None:
        """Drop the copies outside the memory that no request waits for."""
        if self._outside:
            for name in [name for name in self._policy.copies() if name in self._outside]:
                self.discard(*name)

    def _leased_outside_bytes(self) -> int:
        """Bytes of leased copies outside the memory."""
        unleased = set(self._policy.copies()) if self._outside else ()
        return sum(size for name, size in self._outside.items() if name not in unleased)

    def _arena_bytes(self, name: BlockName) -> int:
        """Memory of the arena that a stored block takes."""
        return 0 if name in self._outside else charged_bytes(len(self._blocks[name].data))

    def _evictable(
        self, tenant: str = "", *, spare_leased: bool = False, spare_own: bool = False
    ) -> Iterator[BlockName]:
        names = self._policy.order(tenant, spare_leased=spare_leased)
        names = self._policy.copies() if spare_own else names
        return (name for name in names if not self._blocks[name].pins)

    def _make_way(self, tenant: str, num_bytes: int = 0, *, spare_leased: bool = False) -> bool:
        """Evict blocks of a tenant until `num_bytes` more are within its limit; False if pinned or
        leased ones are in the way, or the limit is smaller."""
        while self._policy.excess_bytes(tenant, num_bytes):
            own = self._policy.own(tenant, spare_leased=spare_leased)
            victim = next((name for name in own if not self._blocks[name].pins), None)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def keep_room(self, *, is_waited: bool = False) -> None:
        """Evict blocks until others can be received without a wait for memory, if one had none.

        Args:
            is_waited: A link waits for memory: free a block's, however much is being received.
                Blocks can all wait for fragments that come behind those of another.

        Leased blocks stay: a few blocks can be received outside the memory of the store. Leased
        copies, and those that are read, count as free memory: they go first once they are loaded,
        and the blocks of this host that would be evicted in their place are nowhere else.
        """
        room = min(self.capacity_bytes * RECEIVE_RATIO, RECEIVE_BYTES_MAX)
        room = max(room, charged_bytes(self._short_bytes))
        waited = charged_bytes(self._short_bytes) if is_waited else 0
        self._drop_outside()
        room -= min(room, self._policy.copy_bytes - self._leased_outside_bytes())
        while self._short_bytes and self._is_short(room, waited):
            victim = next(self._evictable(spare_leased=True), None)
            if victim is None:
                return
            if not self._policy.is_copy(victim):
                # Copies that are left without a lease are read at present.
                read = sum(map(self._arena_bytes, self._policy.copies()))
                if not self._is_short(room - read, waited):
                    return
            if self._disk is not None and victim not in self._disk:
                self._spilling.clean_bytes = 0
                self._spilling.spill()
                if self._spilling.writing:
                    return  # Once the disk has written something this is tried again.
            self._evict(victim)

    def _is_short(self, room: float, waited: int) -> bool:
        """Return True if less than `room` is free or being received into, or less than `waited` is
        free. An I/O thread may take what was just freed: that is what the room is for."""
        received = self.arena.used_bytes - self._arena_stored_bytes
        return self._arena_stored_bytes + max(room, received + waited) > self.capacity_bytes

    def _victims(
        self,
        num_bytes: int,
        tenant: str,
        *,
        spare_leased: bool = False,
        spare_own: bool = False,
    ) -> list[BlockName] | None:
        """Blocks to evict for a buffer of that size; None if not enough can be evicted."""
        wanted = charged_bytes(num_bytes)
        if wanted > self.capacity_bytes:
            return None
        free = self.capacity_bytes - self.arena.used_bytes
        victims: list[BlockName] = []
        candidates = self._evictable(tenant, spare_leased=spare_leased, spare_own=spare_own)
        while free < wanted:
            victim = next(candidates, None)
            if victim is None:
                return None
            victims.append(victim)
            free += self._arena_bytes(victim)
        return victims

    def _would_lose(self, num_bytes: int, tenant: str) -> bool:
        """Return True if a buffer of that size costs a block that the disk could still take."""
        victims = None if self._disk is None else self._victims(num_bytes, tenant)
        return any(self._below(name) is None for name in victims or [])

    def _remove(self, name: BlockName) -> None:
        self._arena_stored_bytes -= self._arena_bytes(name)
        block = self._blocks.pop(name)
        self.used_bytes -= len(block.data)
        self._outside.pop(name, None)
        self._policy.removed(name, *_owned(block))

    def _evict(self, name: BlockName) -> None:
        self._remove(name)
        if self._below(name) is None:
            layout_id, key = name
            if self._disk is not None:
                self._on_lost()
            self._observer.evicted(layout_id, [key])


def _owned(block: StoredBlock) -> tuple[str, int]:
    """Tag of the tenant of a block, and the memory that it takes."""
    return block.origin.tenant, charged_bytes(len(block.data))


def _unpin(block: StoredBlock) -> None:
    block.pins -= 1


def _report(event: Callable[[bytes, list[BlockKey]], None], names: Iterable[BlockName]) -> None:
    """Report blocks to an observer, those of a layout together."""
    by_layout: dict[bytes, list[BlockKey]] = {}
    for layout_id, key in names:
        by_layout.setdefault(layout_id, []).append(key)
    for layout_id, keys in by_layout.items():
        event(layout_id, keys)
