"""Writing to a disk tier: what is on disk, what waits for it, and which segment goes.

The index does no I/O: it is changed on the event loop, once a write, a scan or a removal is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.keep_rules import Matches, Origin
from prfaas.core.cache.tenant_shares import Held, Share, TenantShares
from prfaas.core.invariants import require
from prfaas.core.kv.blocks import BlockName
from prfaas.errors import without_frames
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.disk_segments import ALIGN_BYTES, DiskPlace, SegmentFiles, record_bytes
from prfaas.pool.store.origins import SLICE
from prfaas.pool.store.tier_ports import StoredBlock, TierOwner

T = TypeVar("T")
Buffer = bytearray | memoryview
log = logging.getLogger(__name__)

SEGMENTS_MIN = 8
"""A small tier has smaller segments, so that a deletion does not remove most of it."""
QUEUE_BYTES_MAX = 64 << 20
"""Blocks that wait for the disk; they stay where they are in memory."""
BATCH_BYTES = 16 << 20
"""Bytes that the writer takes at a time: the event loop can be busy between two calls."""


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Sizes and times of a disk tier."""

    segment_bytes: int = 64 << 20
    retry_s: float = 30.0
    """Wait before a disk that failed is tried again, seconds."""
    slice_blocks: int = SLICE
    """Blocks that a purge inspects before other work has its turn."""


LIMITS = DiskLimits()


Record = tuple[BlockName, DiskPlace]


class DiskIndex:
    """Blocks and segments of a disk tier. Others read its attributes, and change them by calls.

    Args:
        capacity_bytes: Of the tier.

    Attributes:
        order: Order in which segments go.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.order: TenantShares[int] = TenantShares(LeastRecentlyUsed(), capacity_bytes)
        self.places: dict[BlockName, DiskPlace] = {}
        self.segments: dict[int, list[BlockName]] = {}
        """Names of the records of each segment; not all of them are still in `places`."""
        self.sizes: dict[int, int] = {}
        self.tenants: dict[int, str] = {}
        """Tag of the tenant of each segment; empty if blocks of several may be in it."""
        self.used_bytes = 0
        """All segments together."""
        self._kinds: dict[int, set[tuple[frozenset[str], str]]] = {}
        """Sources and tenants of the records of each segment: a purge inspects those that may
        match."""
        self._unlisted: list[Record] = []
        """Records on disk that the index lacks and that the next start would find: they could not
        be read or marked, or there is another one of that name."""

    def share(self, shares: Mapping[str, Share]) -> None:
        """Set the tenants' shares from now on, by their tags."""
        sizes = self.sizes.items()
        self.order.assign(shares, (Held(each, self.tenants[each], size) for each, size in sizes))

    # --- segments ---

    def add(self, number: int, num_bytes: int, tenant: str) -> None:
        """Add a segment without blocks."""
        self.segments[number] = []
        self._kinds[number] = set()
        self.sizes[number] = num_bytes
        self.used_bytes += num_bytes
        self.tenants[number] = tenant
        self.order.added(number, tenant, num_bytes)

    def grow(self, number: int, num_bytes: int) -> None:
        """Change the size of a segment; a negative number of bytes shrinks it."""
        self.order.grown(number, self.tenants[number], num_bytes)
        self.sizes[number] += num_bytes
        self.used_bytes += num_bytes

    def append(self, number: int, records: Iterable[Record]) -> None:
        """Add records that were written to a segment, the size of which counts them already."""
        names, kinds = self.segments[number], self._kinds[number]
        for name, place in records:
            self.places[name] = place
            names.append(name)
            kinds.add(_kind(place.origin))

    def take_in(self, number: int, num_bytes: int, records: Sequence[Record]) -> list[BlockName]:
        """Add a segment that was found on disk, and return those of its blocks that are new."""
        tags = {place.origin.tenant for _, place in records}
        self.add(number, num_bytes, tags.pop() if len(tags) == 1 else "")
        new: list[BlockName] = []
        for name, place in records:
            earlier = self.places.get(name)
            if earlier is None:
                new.append(name)
            else:
                self._unlisted.append((name, earlier))
            self.places[name] = place  # A segment may have two records of a name.
        self.segments[number] = [name for name, _ in records]
        self._kinds[number] = {_kind(place.origin) for _, place in records}
        return new

    def remove(self, number: int) -> list[BlockName]:
        """Remove a segment that is no longer on disk, and return the blocks that are gone."""
        size, tenant = self.sizes.pop(number), self.tenants.pop(number)
        self.used_bytes -= size
        self.order.removed(number, tenant, size)
        self._unlisted = [record for record in self._unlisted if record[1].segment != number]
        del self._kinds[number]
        gone: list[BlockName] = []
        for name in self.segments.pop(number):
            place = self.places.get(name)
            if place is not None and place.segment == number:
                del self.places[name]
                gone.append(name)
        return gone

    def is_live(self, number: int) -> bool:
        """Return True if a segment has a block; the last one, most often."""
        places = (self.places.get(name) for name in reversed(self.segments[number]))
        return any(place is not None and place.segment == number for place in places)

    # --- blocks ---

    def may_match(self, number: int, matches: Matches) -> bool:
        """Return True if a segment may have blocks with a matching origin."""
        kinds = self._kinds.get(number, ())
        return any(matches(Origin(sources, tenant=tag)) for sources, tag in kinds)

    def matching(
        self, number: int, names: Sequence[BlockName], matches: Matches
    ) -> dict[BlockName, DiskPlace]:
        """Those of some blocks that are in a segment and have a matching origin."""
        places = {name: place for name in names if (place := self.places.get(name)) is not None}
        return {
            name: place
            for name, place in places.items()
            if place.segment == number and matches(place.origin)
        }

    def forget(self, records: Mapping[BlockName, DiskPlace]) -> None:
        """Miss blocks from now on; their records stay on disk."""
        for name in records:
            del self.places[name]
        self._unlisted += records.items()

    def forgotten(self, matches: Matches) -> list[Record]:
        """Records on disk that the next start would find, with a matching origin."""
        return [record for record in self._unlisted if matches(record[1].origin)]

    def erased(self, records: Collection[Record]) -> None:
        """Forgotten records were marked on disk: the next start will not find them."""
        marked = set(records)
        self._unlisted = [record for record in self._unlisted if record not in marked]

    def validate(self) -> None:
        """Check that places and segments name the same blocks, and the sums; AssertionError if one
        does not hold."""
        in_segments = {number: set(names) for number, names in self.segments.items()}
        require(
            all((name in in_segments[place.segment] for name, place in self.places.items())),
            "index and segments",
        )
        require(
            self.segments.keys() == self.sizes.keys() == self.tenants.keys() == self._kinds.keys(),
            "segments",
        )
        require(self.used_bytes == sum(self.sizes.values()), "bytes of segments")
        for place in self.places.values():
            require(_kind(place.origin) in self._kinds[place.segment], "kinds of a segment")
            require(
                place.offset + place.record_bytes <= self.sizes[place.segment], "a record's end"
            )
        sizes = self.sizes.items()
        self.order.validate(Held(each, self.tenants[each], size) for each, size in sizes)


def _kind(origin: Origin) -> tuple[frozenset[str], str]:
    return origin.sources, origin.tenant


class _Offer(NamedTuple):
    """A block to be written."""

    name: BlockName
    block: StoredBlock
    done: Callable[[], None]


class DiskWriter:
    """The queue of blocks, and the thread that writes them and removes segments.

    Args:
        index: Of the tier.
        capacity_bytes: Hard limit on all files together.
        owner: Is told of blocks that go with a segment.

    Attributes:
        turn: Held while blocks are written, or marked as dropped.
        is_open: False while no block is taken.
    """

    def __init__(
        self,
        files: SegmentFiles,
        index: DiskIndex,
        capacity_bytes: int,
        limits: DiskLimits,
        metrics: PoolMetrics,
        owner: TierOwner,
    ) -> None:
        self._files, self._index, self._capacity_bytes = files, index, capacity_bytes
        self._limits, self._metrics, self._owner = limits, metrics, owner
        self._shares: Mapping[str, Share] = {}
        self._apart: Set[str] = frozenset()
        """Tags of tenants without a share that have segments of their own: blocks of a segment
        get too old together."""
        self._segment_bytes = min(limits.segment_bytes, capacity_bytes // SEGMENTS_MIN)
        self._active: dict[str, int] = {}
        """Segments that are being written, by the tag of their tenant."""
        self._queue: deque[_Offer] = deque()
        self._queued_bytes = 0
        self._work = asyncio.Event()
        self.turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "prfaas-disk-writer")
        self.is_open = False
        self._has_failed = False

    def share(self, shares: Mapping[str, Share]) -> None:
        """Set the tenants' shares from now on, by their tags."""
        self._shares = dict(shares)
        self._keep_active()

    def keep_apart(self, tenants: Set[str]) -> None:
        """Write blocks of tenants, by their tags, to segments of their own from now on."""
        self._apart = tenants
        self._keep_active()

    def _keep_active(self) -> None:
        own = {"", *self._shares, *self._apart}
        self._active = {tag: each for tag, each in self._active.items() if tag in own}

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block to be written; `done` is called from the loop when its turn is over.

        Returns:
            False if the queue is full, the disk has failed, or start is not over.
        """
        size = len(block.data)
        is_full = self._queued_bytes and self._queued_bytes + size > QUEUE_BYTES_MAX
        if not self.is_open or self._has_failed or is_full:
            return False
        self._queue.append(_Offer(name, block, done))
        self._queued_bytes += size
        self._work.set()
        return True

    def drop(self, is_gone: Callable[[BlockName, Origin], bool]) -> None:
        """Drop blocks that wait."""
        for offer in [each for each in self._queue if is_gone(each.name, each.block.origin)]:
            self._queue.remove(offer)
            self._queued_bytes -= len(offer.block.data)
            offer.done()

    def first_active(self) -> int:
        """The first segment that may get blocks from now on."""
        next_number = max(self._index.segments, default=-1) + 1
        return min(self._active.values(), default=next_number)

    async def run(self) -> None:
        """Write offered blocks until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._queue:
                async with self.turn:
                    await self._write_some()

    def close_queue(self) -> None:
        """Take no more blocks, and drop those that wait."""
        self.is_open = False
        self.drop(lambda _name, _origin: True)

    def close(self) -> None:
        """Wait for running writes."""
        self._thread.shutdown()

    async def in_thread(self, what: Callable[..., T], *about: object) -> T:
        """Call a method of the files, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, what, *about)

    async def remove(self, number: int) -> None:
        """Remove a segment and its blocks."""
        await self.in_thread(self._files.remove, number)
        tenant = self._index.tenants[number]
        if self._active.get(tenant) == number:
            del self._active[tenant]
        self._owner.gone_below(self._index.remove(number))

    async def _write_some(self) -> None:
        """Write the front of the queue: as much as the segment takes, in one go."""
        if not self._queue:
            return
        batch = [self._queue.popleft()]
        try:
            if not self._has_failed:
                await self._write(batch)
        except OSError as error:
            self._fail(error)
        finally:
            for offer in batch:
                self._queued_bytes -= len(offer.block.data)
                offer.done()

    async def _write(self, batch: list[_Offer]) -> None:
        """Write a block, and those of its tenant behind it that fit.

        They are moved from the queue to `batch`.
        """
        size, tenant = self._size_of(batch[0]), self._writer_of(batch[0])
        if size > self._capacity_bytes:
            self._metrics.blocks_dropped.labels(reason="disk_too_small").inc()
            return
        active = await self._segment_for(tenant, size)
        largest = max(self._segment_bytes_of(tenant), size)
        room = min(largest - self._index.sizes[active], max(BATCH_BYTES, size))
        while self._queue and size < room and self._writer_of(self._queue[0]) == tenant:
            following = self._size_of(self._queue[0])
            if size + following > room:
                break
            batch.append(self._queue.popleft())
            size += following
        if not await self._make_room(tenant, active, size):
            self._metrics.blocks_dropped.labels(reason="disk_share").inc(len(batch))
            return
        self._index.grow(active, size)
        lent = [
            (active, offer.name, offer.block.data, offer.block.digest, offer.block.origin)
            for offer in batch
        ]
        places, error = await self.in_thread(self._append_lent, lent)
        written = zip(batch, places, strict=False)
        self._index.append(active, ((offer.name, place) for offer, place in written))
        self._metrics.blocks_spilled.inc(len(places))
        if error is not None:
            self._index.grow(active, sum(place.record_bytes for place in places) - size)
            if not self._index.segments[active]:
                with contextlib.suppress(OSError):  # Or every retry would leave an empty file.
                    await self.remove(active)
            raise error

    def _writer_of(self, offer: _Offer) -> str:
        """Tag of the tenant in whose segments a block is written."""
        tag = offer.block.origin.tenant
        return tag if tag in self._shares or tag in self._apart else ""

    def _segment_bytes_of(self, tenant: str) -> int:
        """Largest segment of a tenant: a small share has several."""
        share = self._shares.get(tenant)
        if share is None:
            return self._segment_bytes
        least = min(share.reserve or share.limit, share.limit) * self._capacity_bytes
        return min(self._segment_bytes, max(ALIGN_BYTES, int(least) // SEGMENTS_MIN))

    async def _make_room(self, tenant: str, active: int, size: int) -> bool:
        """Drop segments until the active one of a tenant can grow; False if that is not allowed."""
        while self._index.order.excess_bytes(tenant, size):
            own = (number for number in self._index.order.own(tenant) if number != active)
            if (number := next(own, None)) is None:
                return False
            await self.remove(number)
        while self._index.used_bytes + size > self._capacity_bytes:
            others = (number for number in self._index.order.order(tenant) if number != active)
            if (number := next(others, None)) is None:
                return False
            await self.remove(number)
        return True

    async def _segment_for(self, tenant: str, size: int) -> int:
        """The segment of a tenant that takes a record of that size."""
        active = self._active.get(tenant)
        largest = max(self._segment_bytes_of(tenant), size)
        if active is None or self._index.sizes[active] + size > largest:
            self._active.pop(tenant, None)
            await self.in_thread(self._files.seal, frozenset(self._active.values()))
            active = await self.in_thread(self._files.start)
            self._index.add(active, 0, tenant)
            self._active[tenant] = active
        return active

    # An executor holds the arguments of a call for a moment longer than the call takes. The memory
    # of a block has to come back before that, so they are lent a list that is emptied.

    def _append_lent(
        self, lent: list[tuple[int, BlockName, Buffer, bytes, Origin]]
    ) -> tuple[list[DiskPlace], OSError | None]:
        places: list[DiskPlace] = []
        lent.reverse()
        try:
            while lent:
                places.append(self._files.append(*lent.pop()))
        except OSError as error:
            lent.clear()
            return places, without_frames(error)
        return places, None

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        self._active.clear()
        self._metrics.disk_up.set(0)
        log.error(
            "disk tier: %s cannot be written: %s; blocks are kept only in memory, and the disk is "
            "tried again every %.0f s",
            self._files.folder,
            error.strerror or error,
            self._limits.retry_s,
        )
        asyncio.get_running_loop().call_later(self._limits.retry_s, self._try_again)

    def _try_again(self) -> None:
        self._has_failed = False
        self._metrics.disk_up.set(1)

    def _size_of(self, offer: _Offer) -> int:
        is_sealed = self._files.keyring is not None
        return record_bytes(len(offer.block.data), offer.block.origin, is_sealed=is_sealed)

    def validate(self) -> None:
        """Check the bytes that wait; AssertionError if they do not add up."""
        waiting = sum(len(offer.block.data) for offer in self._queue)
        require(self._queued_bytes >= waiting, "bytes that wait")
        require(self._queued_bytes == waiting or self.turn.locked(), "bytes that wait")
        require(set(self._active.values()) <= self._index.segments.keys(), "segments being written")
