"""The disk tier: blocks in segment files, up to a hard limit, with its own threads.

The event loop keeps the index (`disk_index.py`) and decides; one thread writes, a few read. A
segment goes as a whole, the least recently used first. Tenants with a share have segments of their
own. When the disk fails, the node continues without it: nothing is written for a while, readable
blocks are still read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from prfaas.core.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from prfaas.core.cache.keep_rules import KeepRules, Matches, Origin, Scope
from prfaas.core.cache.tenant_shares import Share, TenantShares
from prfaas.core.kv.blocks import BlockName
from prfaas.errors import ConfigError, without_frames
from prfaas.pool.keys.wrapping import KeyWrapper
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.disk_index import DiskIndex
from prfaas.pool.store.disk_records import ALIGN_BYTES, DiskPlace, record_bytes
from prfaas.pool.store.disk_segments import FoundSegment, Scan, SegmentFiles
from prfaas.pool.store.origins import SLICE, sliced
from prfaas.pool.store.tier_ports import ReadBudget, StoredBlock
from prfaas.units import format_size

T = TypeVar("T")
Buffer = bytearray | memoryview
log = logging.getLogger(__name__)

SEGMENTS_MIN = 8
"""A small tier has smaller segments, so that a deletion does not remove most of it."""
CAPACITY_BYTES_MIN = SEGMENTS_MIN * ALIGN_BYTES
QUEUE_BYTES_MAX = 64 << 20
"""Blocks that wait for the disk; they stay where they are in memory."""
BATCH_BYTES = 16 << 20
"""Bytes that the writer takes at a time: the event loop can be busy between two calls."""
READERS = 4
PROGRESS_SEGMENTS = 256
"""Segments found at start per line in the log: 16 GiB."""


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Sizes and times of a disk tier.

    Attributes:
        retry_s: Wait before a disk that failed is tried again, seconds.
        slice_blocks: Blocks that a purge inspects before other work has its turn.
    """

    segment_bytes: int = 64 << 20
    retry_s: float = 30.0
    slice_blocks: int = SLICE


LIMITS = DiskLimits()


class _Offer(NamedTuple):
    """A block to be written."""

    name: BlockName
    block: StoredBlock
    done: Callable[[], None]


class DiskTier:
    """Blocks below memory.

    Args:
        capacity_bytes: Hard limit on all files together.
        on_found: Called for blocks found at start.
        on_gone: Called for removed blocks.
        policy: Which segment outside reserves goes first.
        rules: Regions where its blocks may rest: what it has from others is dropped. Blocks that
            are too old, or of a purge.
        wrapper: Wraps the keys that seal blocks; None leaves them in the clear.
        is_new_key: The wrapper's key was made for this start: an old keyring is removed.

    Raises:
        ConfigError: The folder cannot be used, or the limit is too small for any block.
    """

    label = "disk"

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        metrics: PoolMetrics,
        on_found: Callable[[Iterable[BlockName]], None],
        on_gone: Callable[[Iterable[BlockName]], None],
        policy: EvictionPolicy[int] | None = None,
        limits: DiskLimits = LIMITS,
        rules: KeepRules | None = None,
        wrapper: KeyWrapper | None = None,
        *,
        is_new_key: bool = False,
    ) -> None:
        self._limits, self._rules = limits, rules or KeepRules()
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise ConfigError(
                f"the disk tier in {folder} is limited to {format_size(capacity_bytes)}; "
                f"give it at least {format_size(CAPACITY_BYTES_MIN)}"
            )
        self.capacity_bytes = capacity_bytes
        self._files = SegmentFiles(folder, self._rules.regions, wrapper, is_new_key=is_new_key)
        self._folder = folder
        self._metrics = metrics
        self._on_found = on_found
        self._on_gone = on_gone
        self._policy = TenantShares(policy or LeastRecentlyUsed(), capacity_bytes)
        self._shares: Mapping[str, Share] = {}
        self._apart: Set[str] = frozenset()
        """Tags of tenants without a share that have segments of their own: blocks of a segment
        get too old together."""
        self._segment_bytes = min(limits.segment_bytes, capacity_bytes // SEGMENTS_MIN)
        self._index = DiskIndex(self._policy)
        self._active: dict[str, int] = {}
        """Segments that are being written, by the tag of their tenant."""
        self._queue: deque[_Offer] = deque()
        self._queued_bytes = 0
        self._work = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held while blocks are written, or marked as dropped."""
        self._writer = ThreadPoolExecutor(1, "prfaas-disk-writer")
        self._readers = ThreadPoolExecutor(READERS, "prfaas-disk-reader")
        self._is_ready = False
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._index.places)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._index.places

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments."""
        return self._index.used_bytes

    @property
    def is_sealed(self) -> bool:
        """Return True if blocks are sealed with keys of their tenants."""
        return self._files.keyring is not None

    @property
    def num_keys(self) -> int:
        """Keys that seal blocks."""
        keyring = self._files.keyring
        return 0 if keyring is None else len(keyring)

    async def destroy_keys(self, tenant: str) -> None:
        """Destroy the keys of a tenant: what is sealed with them is lost for good.

        Raises:
            OSError: They cannot be destroyed.
        """
        async with self._turn:
            await self._in_writer(self._files.destroy_keys, tenant)

    @property
    def is_ready(self) -> bool:
        """Return True if all that was there at start is known."""
        return self._is_ready

    def share(self, shares: Mapping[str, Share]) -> None:
        """Set the tenants' shares of the disk from now on, by their tags.

        Blocks that a tenant wrote before it had a share stay where they are, outside its reserve.
        """
        self._shares = dict(shares)
        if self._files.keyring is not None:
            self._files.keyring.keep({tag for tag, share in shares.items() if share.reserve})
        self._keep_active()
        self._index.share(shares)

    def keep_apart(self, tenants: Set[str]) -> None:
        """Write blocks of tenants, by their tags, to segments of their own from now on."""
        self._apart = tenants
        self._keep_active()

    def _keep_active(self) -> None:
        own = {"", *self._shares, *self._apart}
        self._active = {tag: each for tag, each in self._active.items() if tag in own}

    async def expire(self, names: Collection[BlockName]) -> int:
        """Remove those of some blocks that are too old, and segments without others.

        Marks nothing on disk: a record has the time at which its block was computed.
        """
        found = ((name, self._index.places.get(name)) for name in names)
        old = {name: place for name, place in found if place and self._rules.is_over(place.origin)}
        self._index.forget(old)
        self._on_gone(old)
        for number in sorted({place.segment for place in old.values()}):
            async with self._turn:
                if number in self._index.segments and not self._index.is_live(number):
                    await self._drop(number)
        return len(old)

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of the segments of each tenant with segments of its own, by its tag."""
        return self._policy.held_bytes

    def names(self) -> Iterator[BlockName]:
        """All blocks."""
        return iter(self._index.places)

    def num_bytes(self, name: BlockName) -> int:
        """Size of a block."""
        return self._index.places[name].num_bytes

    def origin(self, name: BlockName) -> Origin:
        """Origin of a block."""
        return self._index.places[name].origin

    async def count(self, scope: Scope) -> tuple[set[BlockName], int]:
        """Blocks of a scope, and their bytes; other work continues in the meantime."""
        return await self._find(scope, list(self._index.segments), drop=False)

    async def drop(self, scope: Scope) -> None:
        """Drop blocks of a scope, also those that wait to be written, for good.

        Of a tenant its keys are destroyed. Otherwise dropped blocks are marked on disk, so that
        they do not reappear after a restart; of a prompt, all of its tenant that were dropped.

        Raises:
            OSError: Not all could be marked, or the keys not destroyed.
            ConfigError: The segments on disk are not read yet.
        """
        matches = self._rules.matcher(scope)
        queued = [o for o in self._queue if scope.has(o.name) and matches(o.block.origin)]
        for offer in queued:
            self._queue.remove(offer)
            self._queued_bytes -= len(offer.block.data)
            offer.done()
        next_number = max(self._index.segments, default=-1) + 1
        since = min(self._active.values(), default=next_number)
        await self._find(scope, list(self._index.segments), drop=True)
        async with self._turn:  # Blocks that were written meanwhile.
            recent = [number for number in self._index.segments if number >= since]
            await self._find(scope, recent, drop=True)
        if scope.tenant is None or scope.hashes is not None or not self.is_sealed:
            await self._erase(matches)
            return
        try:
            await self.destroy_keys(scope.tenant)
        except OSError as error:
            await self._erase(matches)
            raise OSError(f"the tenant's keys: {error}") from error

    async def _erase(self, matches: Matches) -> None:
        """Mark dropped blocks on disk."""
        if not self._is_ready:
            raise ConfigError(f"{self._folder} is still being read")
        async with self._turn:
            gone = self._index.forgotten(matches)
            await self._in_writer(self._files.erase, gone)
            self._index.erased(gone)

    async def _find(
        self, scope: Scope, segments: list[int], *, drop: bool
    ) -> tuple[set[BlockName], int]:
        """Blocks of a scope in some segments, and their bytes."""
        found, num_bytes, matches = set[BlockName](), 0, self._rules.matcher(scope)
        for number in segments:
            if not self._index.may_match(number, matches):
                continue
            for names in sliced(self._index.segments[number], self._limits.slice_blocks):
                named = names if scope.hashes is None else list(filter(scope.has, names))
                part = self._index.matching(number, named, matches)
                num_bytes += sum(place.num_bytes for place in part.values())
                found |= part.keys()
                if drop:
                    self._index.forget(part)
                    self._on_gone(part)
                await asyncio.sleep(0)
        return found, num_bytes

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block to be written; `done` is called from the loop when its turn is over.

        Returns:
            False if the queue is full, the disk has failed, or start is not over.
        """
        size = len(block.data)
        is_full = self._queued_bytes and self._queued_bytes + size > QUEUE_BYTES_MAX
        if not self._is_ready or self._has_failed or is_full:
            return False
        self._queue.append(_Offer(name, block, done))
        self._queued_bytes += size
        self._work.set()
        return True

    async def probe(self, names: Collection[BlockName]) -> set[BlockName]:
        """Blocks that it holds: its index is complete once it was read at start."""
        return {name for name in names if name in self._index.places}

    @property
    def needs_probe(self) -> bool:
        """Return False: nobody else writes to it."""
        return False

    async def read(self, name: BlockName, into: memoryview, budget: ReadBudget) -> bytes | None:
        """Read and check a block; a broken one is dropped and counted.

        Args:
            into: As long as the block.
            budget: Not needed: a disk answers, or fails.

        Returns:
            Its digest; None if it could not be had.
        """
        index, place = self._index, self._index.places[name]
        number = place.segment
        self._policy.used(number, index.tenants[number], index.sizes[number])
        loop = asyncio.get_running_loop()
        try:
            lent = [into]
            digest = await loop.run_in_executor(self._readers, self._read_lent, name, place, lent)
        except FileNotFoundError:
            digest, reason = None, "disk_gone"
        except OSError as error:
            log.error("disk tier: a block cannot be read from %s: %s", self._folder, error)
            digest, reason = None, "disk_error"
        else:
            reason = "disk_digest"
        if index.places.get(name) != place:
            return None  # It was purged, or its segment dropped, while it was read.
        if digest is not None:
            self._metrics.blocks_promoted.inc()
        else:
            index.forget({name: place})
            self._metrics.blocks_dropped.labels(reason=reason).inc()
            self._on_gone([name])
        return digest

    async def run(self) -> None:
        """Read the existing segments, then write offered blocks, until cancelled.

        Where the first fails, nothing is written.
        """
        try:
            await self._recover()
            while True:
                await self._work.wait()
                self._work.clear()
                while self._queue:
                    async with self._turn:
                        await self._write_some()
        except OSError as error:
            log.error(
                "disk tier: the contents of %s cannot be read: %s; blocks are kept only in "
                "memory until this node restarts",
                self._folder,
                error.strerror or error,
            )
        finally:
            self._is_ready = False
            while self._queue:
                self._queue.popleft().done()

    def close(self) -> None:
        """Wait for running writes and reads, and release the folder."""
        self._writer.shutdown()
        self._readers.shutdown()
        self._files.close()

    # --- writing ---

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
        if size > self.capacity_bytes:
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
        places, error = await self._in_writer(self._append_lent, lent)
        written = zip(batch, places, strict=False)
        self._index.append(active, ((offer.name, place) for offer, place in written))
        self._metrics.blocks_spilled.inc(len(places))
        if error is not None:
            self._index.grow(active, sum(place.record_bytes for place in places) - size)
            if not self._index.segments[active]:
                with contextlib.suppress(OSError):  # Or every retry would leave an empty file.
                    await self._drop(active)
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
        least = min(share.reserve or share.limit, share.limit) * self.capacity_bytes
        return min(self._segment_bytes, max(ALIGN_BYTES, int(least) // SEGMENTS_MIN))

    async def _make_room(self, tenant: str, active: int, size: int) -> bool:
        """Drop segments until the active one of a tenant can grow; False if that is not allowed."""
        while self._policy.excess_bytes(tenant, size):
            own = (number for number in self._policy.own(tenant) if number != active)
            if (number := next(own, None)) is None:
                return False
            await self._drop(number)
        while self.used_bytes + size > self.capacity_bytes:
            others = (number for number in self._policy.order(tenant) if number != active)
            if (number := next(others, None)) is None:
                return False
            await self._drop(number)
        return True

    async def _segment_for(self, tenant: str, size: int) -> int:
        """The segment of a tenant that takes a record of that size."""
        active = self._active.get(tenant)
        largest = max(self._segment_bytes_of(tenant), size)
        if active is None or self._index.sizes[active] + size > largest:
            self._active.pop(tenant, None)
            await self._in_writer(self._files.seal, frozenset(self._active.values()))
            active = await self._in_writer(self._files.start)
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

    def _read_lent(self, name: BlockName, place: DiskPlace, lent: list[memoryview]) -> bytes | None:
        return self._files.read(name, place, lent.pop())

    async def _drop(self, number: int) -> None:
        await self._in_writer(self._files.remove, number)
        tenant = self._index.tenants[number]
        if self._active.get(tenant) == number:
            del self._active[tenant]
        self._on_gone(self._index.remove(number))

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        self._active.clear()
        self._metrics.disk_up.set(0)
        log.error(
            "disk tier: %s cannot be written: %s; blocks are kept only in memory, and the disk is "
            "tried again every %.0f s",
            self._folder,
            error.strerror or error,
            self._limits.retry_s,
        )
        asyncio.get_running_loop().call_later(self._limits.retry_s, self._try_again)

    def _try_again(self) -> None:
        self._has_failed = False
        self._metrics.disk_up.set(1)

    async def _in_writer(self, what: Callable[..., T], *about: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, what, *about)

    # --- start ---

    async def _recover(self) -> None:
        loop = asyncio.get_running_loop()
        found = await self._drop_surplus(await self._in_writer(self._files.found))
        num_broken = 0
        for start in range(0, len(found), READERS):
            batch = found[start : start + READERS]
            scans = await asyncio.gather(
                *(loop.run_in_executor(self._readers, self._scan, one.number) for one in batch)
            )
            for segment, scan in zip(batch, scans, strict=True):
                num_broken += scan.num_broken
                await self._take_in(segment, scan)
            if start // PROGRESS_SEGMENTS != (start + READERS) // PROGRESS_SEGMENTS:
                log.info("disk tier: %d of %d segments read", start + len(batch), len(found))
        self._metrics.blocks_dropped.labels(reason="disk_torn").inc(num_broken)
        self._metrics.disk_up.set(1)
        self._is_ready = True
        log.info(
            "disk tier in %s: %d blocks, %s of %s; %d records were broken",
            self._folder,
            len(self._index.places),
            format_size(self.used_bytes),
            format_size(self.capacity_bytes),
            num_broken,
        )

    async def _drop_surplus(self, found: list[FoundSegment]) -> list[FoundSegment]:
        """Delete segments above the limit, which may have been lowered."""
        total = sum(segment.num_bytes for segment in found)
        while total > self.capacity_bytes:
            total -= found[0].num_bytes
            await self._in_writer(self._files.remove, found.pop(0).number)
        return found

    def _scan(self, number: int) -> Scan:
        try:
            return self._files.scan(number)
        except OSError as error:
            log.error("disk tier: segment %d cannot be read: %s", number, error)
            return Scan([], 1)

    async def _take_in(self, segment: FoundSegment, scan: Scan) -> None:
        if not scan.records:
            await self._in_writer(self._files.remove, segment.number)
            return
        self._on_found(self._index.take_in(segment.number, segment.num_bytes, scan.records))

    def _size_of(self, offer: _Offer) -> int:
        return record_bytes(len(offer.block.data), offer.block.origin, is_sealed=self.is_sealed)
