"""The disk tier: blocks in segment files, up to a hard limit, with its own threads.

The event loop keeps the index and decides; one thread writes (`disk_writer.py`), a few read. A
segment goes as a whole, the least recently used first. Tenants with a share have segments of their
own. When the disk fails, the node continues without it: nothing is written for a while, readable
blocks are still read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor

from prfaas.core.cache.keep_rules import Matches, Origin, Scope
from prfaas.core.cache.tenant_shares import Share
from prfaas.core.invariants import require
from prfaas.core.kv.blocks import BlockName
from prfaas.errors import ConfigError
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.disk_segments import ALIGN_BYTES, DiskPlace, Scan, SegmentFiles
from prfaas.pool.store.disk_writer import LIMITS, SEGMENTS_MIN, DiskIndex, DiskLimits, DiskWriter
from prfaas.pool.store.origins import sliced
from prfaas.pool.store.tier_ports import ReadBudget, StoredBlock, TierOwner
from prfaas.units import format_size

log = logging.getLogger(__name__)

CAPACITY_BYTES_MIN = SEGMENTS_MIN * ALIGN_BYTES
READERS = 4
PROGRESS_SEGMENTS = 256
"""Segments found at start per line in the log: 16 GiB."""


class DiskTier:
    """Blocks below memory; ConfigError if the limit is too small for any block.

    Args:
        files: The folder, which is this tier's from now on.
        capacity_bytes: Hard limit on all files together.
        owner: The store above, with its rules.
    """

    label = "disk"
    is_written_in_advance = True
    needs_probe = False
    """Nobody else writes to it."""

    def __init__(
        self,
        files: SegmentFiles,
        capacity_bytes: int,
        metrics: PoolMetrics,
        owner: TierOwner,
        limits: DiskLimits = LIMITS,
    ) -> None:
        if capacity_bytes < CAPACITY_BYTES_MIN:
            files.close()
            raise ConfigError(
                f"the disk tier in {files.folder} is limited to {format_size(capacity_bytes)}; "
                f"give it at least {format_size(CAPACITY_BYTES_MIN)}"
            )
        self.capacity_bytes = capacity_bytes
        self._files, self._metrics, self._owner, self._limits = files, metrics, owner, limits
        self._rules = owner.rules
        self._missed = metrics.blocks_dropped.labels(reason="not_spilled")
        self._index = DiskIndex(capacity_bytes)
        self._writer = DiskWriter(files, self._index, capacity_bytes, limits, metrics, owner)
        self._readers = ThreadPoolExecutor(READERS, "prfaas-disk-reader")

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
        """Destroy the keys of a tenant: what is sealed with them is lost for good; OSError if they
        cannot be destroyed."""
        async with self._writer.turn:
            await self._writer.in_thread(self._files.destroy_keys, tenant)

    @property
    def is_ready(self) -> bool:
        """Return True if all that was there at start is known."""
        return self._writer.is_open

    def share(self, shares: Mapping[str, Share]) -> None:
        """Set the tenants' shares of the disk from now on, by their tags.

        Blocks that a tenant wrote before it had a share stay where they are, outside its reserve.
        """
        if self._files.keyring is not None:
            self._files.keyring.keep({tag for tag, share in shares.items() if share.reserve})
        self._writer.share(shares)
        self._index.share(shares)

    def keep_apart(self, tenants: Set[str]) -> None:
        """Write blocks of tenants, by their tags, to segments of their own from now on."""
        self._writer.keep_apart(tenants)

    async def expire(self, names: Collection[BlockName]) -> int:
        """Remove those of some blocks that are too old, and segments without others.

        Marks nothing on disk: a record has the time at which its block was computed.
        """
        found = ((name, self._index.places.get(name)) for name in names)
        old = {name: place for name, place in found if place and self._rules.is_over(place.origin)}
        self._index.forget(old)
        self._owner.gone_below(old)
        for number in sorted({place.segment for place in old.values()}):
            async with self._writer.turn:
                if number in self._index.segments and not self._index.is_live(number):
                    await self._writer.remove(number)
        return len(old)

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Bytes of the segments of each tenant with segments of its own, by its tag."""
        return self._index.order.held_bytes

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
        self._writer.drop(lambda name, origin: scope.has(name) and matches(origin))
        since = self._writer.first_active()
        await self._find(scope, list(self._index.segments), drop=True)
        async with self._writer.turn:  # Blocks that were written meanwhile.
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
        if not self.is_ready:
            raise ConfigError(f"{self._files.folder} is still being read")
        async with self._writer.turn:
            gone = self._index.forgotten(matches)
            await self._writer.in_thread(self._files.erase, gone)
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
                    self._owner.gone_below(part)
                await asyncio.sleep(0)
        return found, num_bytes

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block to be written; `done` is called from the loop when its turn is over.

        Returns:
            False if the queue is full, the disk has failed, or start is not over.
        """
        return self._writer.offer(name, block, done)

    def missed(self) -> None:
        """Memory evicted a block before it was written."""
        self._missed.inc()

    async def probe(self, names: Collection[BlockName]) -> set[BlockName]:
        """Blocks that it holds: its index is complete once it was read at start."""
        return {name for name in names if name in self._index.places}

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
        self._index.order.used(number, index.tenants[number], index.sizes[number])
        loop = asyncio.get_running_loop()
        try:
            lent = [into]
            digest = await loop.run_in_executor(self._readers, self._read_lent, name, place, lent)
        except FileNotFoundError:
            digest, reason = None, "disk_gone"
        except OSError as error:
            log.error("disk tier: a block cannot be read from %s: %s", self._files.folder, error)
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
            self._owner.gone_below([name])
        return digest

    async def run(self) -> None:
        """Read the existing segments, then write offered blocks, until cancelled.

        Where the first fails, nothing is written.
        """
        try:
            await self._recover()
            await self._writer.run()
        except OSError as error:
            log.error(
                "disk tier: the contents of %s cannot be read: %s; blocks are kept only in "
                "memory until this node restarts",
                self._files.folder,
                error.strerror or error,
            )
        finally:
            self._writer.close_queue()

    async def close(self) -> None:
        """Wait for running writes and reads, and release the folder."""
        self._writer.close()
        self._readers.shutdown()
        self._files.close()

    def _read_lent(self, name: BlockName, place: DiskPlace, lent: list[memoryview]) -> bytes | None:
        return self._files.read(name, place, lent.pop())

    # --- start ---

    async def _recover(self) -> None:
        loop = asyncio.get_running_loop()
        found = await self._writer.in_thread(self._files.found)
        total = sum(segment.num_bytes for segment in found)
        while total > self.capacity_bytes:  # It may have been lowered.
            total -= found[0].num_bytes
            await self._writer.in_thread(self._files.remove, found.pop(0).number)
        num_broken = 0
        for start in range(0, len(found), READERS):
            batch = found[start : start + READERS]
            scans = await asyncio.gather(
                *(loop.run_in_executor(self._readers, self._scan, one.number) for one in batch)
            )
            for segment, scan in zip(batch, scans, strict=True):
                num_broken += scan.num_broken
                if not scan.records:
                    await self._writer.in_thread(self._files.remove, segment.number)
                    continue
                new = self._index.take_in(segment.number, segment.num_bytes, scan.records)
                self._owner.found_below(self, new)
            if start // PROGRESS_SEGMENTS != (start + READERS) // PROGRESS_SEGMENTS:
                log.info("disk tier: %d of %d segments read", start + len(batch), len(found))
        self._metrics.blocks_dropped.labels(reason="disk_torn").inc(num_broken)
        self._metrics.disk_up.set(1)
        self._writer.is_open = True
        log.info(
            "disk tier in %s: %d blocks, %s of %s; %d records were broken",
            self._files.folder,
            len(self._index.places),
            format_size(self.used_bytes),
            format_size(self.capacity_bytes),
            num_broken,
        )

    def _scan(self, number: int) -> Scan:
        try:
            return self._files.scan(number)
        except OSError as error:
            log.error("disk tier: segment %d cannot be read: %s", number, error)
            return Scan([], 1)

    def validate(self) -> None:
        """Check index and queue; AssertionError if they do not hold."""
        self._index.validate()
        self._writer.validate()
        require(self.used_bytes <= self.capacity_bytes, "limit of the disk")
