"""Room in memory for blocks: one limit, and who makes way for whom.

Blocks are offered to a tier that is written in advance while they are still in memory, those first
that would be evicted next, so that making room never waits for it. What it was too slow for is
dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial

from prfaas.core.cache.tenant_shares import Held, Share, TenantShares
from prfaas.core.invariants import require
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.store.arena import Arena, LooseMemory, charged_bytes
from prfaas.pool.store.tier_ports import StoredBlock, StoreObserver, TierList

RECEIVE_RATIO, RECEIVE_BYTES_MAX = 0.125, 64 << 20
"""Share of memory that is kept free for blocks that are being received, and where that ends."""
LOOSE_BYTES_MAX = 32 << 20
"""Limit of blocks that are received outside the memory of a full store."""
OUTSIDE_RATIO = 0.5
"""Share of that limit for copies that stay outside; the rest is for blocks that are received."""
CLEAN_RATIO, CLEAN_BYTES_MAX = 0.25, 512 << 20
"""Share of memory that is free or in a tier below as well: what may come before that tier has
caught up. It ends where looking through it would keep the event loop busy."""


class MemoryRoom:
    """The memory of a store. Lives on its event loop.

    Args:
        capacity_bytes: Hard limit on memory: all blocks, and the buffers that blocks are received
            into, together. What is being received when all of it is taken lies outside until it is
            put, `loose_bytes_max` at most (`receive_buffer`). Copies without room stay outside.
        order: Order of eviction of all blocks.
        tiers: What is in one of them is not lost when it is evicted.
        observer: Called for every block that comes or goes.

    Attributes:
        blocks: Blocks in memory. To be read only.
        used_bytes: Bytes of all of them.
        clean_bytes: Minimum bytes that can arrive before an eviction of a block that was not
            offered to the tier written in advance; 0 if that has to be looked for.
    """

    def __init__(
        self,
        capacity_bytes: int,
        order: TenantShares[BlockName],
        tiers: TierList,
        observer: StoreObserver,
        loose_bytes_max: int,
    ) -> None:
        self.arena = Arena(capacity_bytes)
        self.blocks: dict[BlockName, StoredBlock] = {}
        self.used_bytes = 0
        self.clean_bytes = 0
        self._order, self._tiers, self._observer = order, tiers, observer
        self._loose = LooseMemory(loose_bytes_max)
        self._outside: dict[BlockName, int] = {}
        """Copies that stay in loose memory until they are read, and their bytes."""
        self._outside_max = int(loose_bytes_max * OUTSIDE_RATIO)
        self._arena_stored_bytes = 0
        """Memory of the arena that stored blocks take; the rest is being received into."""
        self._short_bytes = 0
        """The largest block that was received without free memory."""
        self._writing: set[BlockName] = set()
        """Blocks that a tier has taken and not written yet; pinned."""
        self._waiting: list[asyncio.Future[None]] = []
        self._is_refused = False
        """True if the tier took no more, and has written nothing since."""

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def capacity_bytes(self) -> int:
        """The limit on memory."""
        return self.arena.capacity_bytes

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Memory of each tenant's blocks, by its tag; empty for blocks of an unknown tenant."""
        return self._order.held_bytes

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned by readers."""
        return sum(block.pins > 0 for block in self.blocks.values())

    @property
    def loose_bytes(self) -> int:
        """Memory in use beside stored blocks: blocks being received or still being read."""
        outside = self._loose.used_bytes - self.outside_bytes
        return self.arena.used_bytes - self._arena_stored_bytes + outside

    @property
    def outside_bytes(self) -> int:
        """Bytes of the copies that are kept in loose memory."""
        return sum(self._outside.values())

    def is_outside(self, name: BlockName) -> bool:
        """Return True for a copy that is kept in loose memory."""
        return name in self._outside

    def share(self, shares: Mapping[str, Share]) -> None:
        """Set the tenants' shares of memory from now on, by their tags."""
        self._order.assign(shares, (Held(name, *owned(b)) for name, b in self.blocks.items()))

    # --- buffers ---

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
        """A buffer for a block; others are evicted for it; returns none if not enough memory can be
        freed.

        Args:
            tenant: Tag of the tenant that the block belongs to.
            spare_leased: Evict no leased block.
            spare_own: Evict copies without lease only, except for the limit of the tenant.
        """
        is_within = self._make_way(tenant, charged_bytes(num_bytes), spare_leased=spare_leased)
        spared = {"spare_leased": spare_leased, "spare_own": spare_own}
        if not is_within or self._victims(num_bytes, tenant, **spared) is None:
            return None
        while (buffer := self.arena.allocate(num_bytes)) is None:
            victim = next(self._evictable(tenant, **spared), None)
            if victim is None:
                return None
            self.evict(victim)
        self.clean_bytes -= charged_bytes(num_bytes)
        return buffer

    def buffer_with(
        self, data: bytes | bytearray | memoryview, tenant: str, *, is_copy: bool
    ) -> bytearray | memoryview | None:
        """A buffer with the bytes of a block: its own if they are in this memory already; returns
        none if not enough memory can be freed.

        A copy costs no block of this host, or content of the site would be lost: without such room
        it stays in loose memory. Where that is full, it is a block like others.
        """
        if isinstance(data, memoryview) and self.arena.owns(data):
            return data
        buffer = self.allocate(len(data), tenant=tenant, spare_own=True) if is_copy else None
        if buffer is None and is_copy and not isinstance(data, bytes):
            is_within = self.outside_bytes + len(data) <= self._outside_max
            if is_within and LooseMemory.owns(data):
                return data
        if buffer is None:
            buffer = self.allocate(len(data), tenant=tenant)
        if buffer is not None:
            buffer[:] = data
        return buffer

    # --- blocks ---

    def add(self, name: BlockName, block: StoredBlock) -> None:
        """Keep a block that is not in memory; others of its tenant may have to make way."""
        is_new = self._tiers.find(name) is None
        size, tenant = len(block.data), block.origin.tenant
        charged = charged_bytes(size)
        self.blocks[name] = block
        self.used_bytes += size
        if LooseMemory.owns(block.data):
            self._outside[name] = size
        else:
            self._arena_stored_bytes += charged
        self._order.added(name, tenant, charged)
        self.clean_bytes -= charged
        if is_new:
            layout_id, key = name
            self._observer.stored(layout_id, [key])
            self._tiers.offer(name, block)
        self._make_way(tenant)
        self.spill()

    def used(self, name: BlockName, block: StoredBlock) -> None:
        """A block was used just now."""
        size = charged_bytes(len(block.data))
        self._order.used(name, block.origin.tenant, size)
        self.clean_bytes -= size

    def remove(self, name: BlockName) -> None:
        """A block is gone from memory."""
        self._arena_stored_bytes -= self._arena_bytes(name)
        block = self.blocks.pop(name)
        self.used_bytes -= len(block.data)
        self._outside.pop(name, None)
        self._order.removed(name, *owned(block))

    def evict(self, name: BlockName) -> None:
        """Remove a block, and report it if no tier has it."""
        self.remove(name)
        if self._tiers.find(name) is None:
            layout_id, key = name
            if self._tiers.in_advance is not None:
                self._tiers.in_advance.missed()
            self._observer.evicted(layout_id, [key])

    # --- free memory ---

    def drop_outside(self) -> None:
        """Drop the copies outside the memory that no request waits for."""
        if self._outside:
            for name in [name for name in self._order.copies() if name in self._outside]:
                if not self.blocks[name].pins:
                    self.evict(name)

    def _leased_outside_bytes(self) -> int:
        """Bytes of leased copies outside the memory."""
        unleased = set(self._order.copies()) if self._outside else ()
        return sum(size for name, size in self._outside.items() if name not in unleased)

    def _arena_bytes(self, name: BlockName) -> int:
        """Memory of the arena that a stored block takes."""
        return 0 if name in self._outside else charged_bytes(len(self.blocks[name].data))

    def _evictable(
        self, tenant: str = "", *, spare_leased: bool = False, spare_own: bool = False
    ) -> Iterator[BlockName]:
        names = self._order.order(tenant, spare_leased=spare_leased)
        names = self._order.copies() if spare_own else names
        return (name for name in names if not self.blocks[name].pins)

    def _make_way(self, tenant: str, num_bytes: int = 0, *, spare_leased: bool = False) -> bool:
        """Evict blocks of a tenant until `num_bytes` more are within its limit; False if pinned or
        leased ones are in the way, or the limit is smaller."""
        while self._order.excess_bytes(tenant, num_bytes):
            own = self._order.own(tenant, spare_leased=spare_leased)
            victim = next((name for name in own if not self.blocks[name].pins), None)
            if victim is None:
                return False
            self.evict(victim)
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
        self.drop_outside()
        room -= min(room, self._order.copy_bytes - self._leased_outside_bytes())
        while self._short_bytes and self._is_short(room, waited):
            victim = next(self._evictable(spare_leased=True), None)
            if victim is None:
                return
            if not self._order.is_copy(victim):
                # Copies that are left without a lease are read at present.
                read = sum(map(self._arena_bytes, self._order.copies()))
                if not self._is_short(room - read, waited):
                    return
            if self._tiers.in_advance is not None and victim not in self._tiers.in_advance:
                self.clean_bytes = 0
                self.spill()
                if self._writing:
                    return  # Once the tier has written something this is tried again.
            self.evict(victim)

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

    def would_lose(self, num_bytes: int, tenant: str) -> bool:
        """Return True if a buffer of that size costs a block that a tier could still take."""
        victims = None if self._tiers.in_advance is None else self._victims(num_bytes, tenant)
        return any(self._tiers.find(name) is None for name in victims or [])

    # --- writing in advance ---

    @property
    def is_writing(self) -> bool:
        """Return True if the tier has not written all that was offered to it."""
        return bool(self._writing)

    def spill(self, *, again: bool = False) -> None:
        """Offer to the tier written in advance what would be evicted next, if it is not there yet.

        Args:
            again: Even if it refused before and has written nothing since: it may have recovered.
        """
        tier = self._tiers.in_advance
        wanted = min(int(self.capacity_bytes * CLEAN_RATIO), CLEAN_BYTES_MAX)
        if tier is None or self.clean_bytes > wanted // 2 or (self._is_refused and not again):
            return
        self._is_refused = False
        clean = self.capacity_bytes - self.arena.used_bytes
        for name in self._order.everything():
            if clean >= wanted:
                break
            block = self.blocks[name]
            if name not in self._writing and name not in tier:
                if not tier.offer(name, block, partial(self._written, name, block)):
                    self._is_refused = True
                    return
                block.pins += 1
                self._writing.add(name)
            clean += self._arena_bytes(name)
        self.clean_bytes = clean

    async def has_written(self) -> bool:
        """Wait for the next block that the tier writes; False if it writes none."""
        self.clean_bytes = 0
        self.spill(again=True)
        if not self._writing:
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter
        return True

    def _written(self, name: BlockName, block: StoredBlock) -> None:
        block.pins -= 1
        self._writing.discard(name)
        self._is_refused = False
        if self._tiers.in_advance is None or name not in self._tiers.in_advance:
            self.clean_bytes = 0  # It failed: this block was counted as clean.
        self.spill()
        self.keep_room()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def validate(self) -> None:
        """Check sums, limits and pins; AssertionError if one does not hold."""
        sizes = {name: len(block.data) for name, block in self.blocks.items()}
        outside = {n: sizes[n] for n, b in self.blocks.items() if LooseMemory.owns(b.data)}
        stored = sum(map(self._arena_bytes, sizes))
        require(self.used_bytes == sum(sizes.values()), "bytes of blocks")
        require(self._outside == outside, "copies outside the memory")
        require(self.outside_bytes <= self._loose.used_bytes, "bytes outside the memory")
        require(self._arena_stored_bytes == stored, "memory of blocks")
        require(stored <= self.arena.used_bytes <= self.capacity_bytes, "limit of memory")
        require(all(block.pins >= 0 for block in self.blocks.values()), "pins")
        require(all(n not in sizes or self.blocks[n].pins for n in self._writing), "pins of writes")
        self.arena.validate()
        self._order.validate(Held(name, *owned(block)) for name, block in self.blocks.items())


def owned(block: StoredBlock) -> tuple[str, int]:
    """Tag of the tenant of a block, and the memory that it takes."""
    return block.origin.tenant, charged_bytes(len(block.data))
