"""The shared tier: blocks in a bucket that all pool nodes of a site write and read.

The index is refreshed from the list of objects every few seconds, so a look-up waits for nothing.
That a block is in the index is a hint: a read that fails, is late or brings other bytes is a miss.
While the bucket fails, the tier has no blocks: nothing is looked up, read or reported, until a
background request succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from prfaas.core.kv.blocks import BlockName
from prfaas.core.resilience.circuit_breaker import Breaker, BreakerSettings
from prfaas.errors import TransferError
from prfaas.log_throttle import SaidOnce
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import Bucket, GoneError
from prfaas.pool.shared.pack_index import PackIndex, all_sources
from prfaas.pool.shared.pack_writer import PackWriter
from prfaas.pool.shared.packs import (
    TAG_BYTES,
    AlteredError,
    PackedBlock,
    PackName,
    UnknownKeyError,
    name_in,
    open_block,
    read_front,
)
from prfaas.pool.shared.settings import S3Settings
from prfaas.pool.shared.site_keys import KeyRing
from prfaas.pool.store.origins import Origin, sliced
from prfaas.pool.store.tier_ports import ReadBudget, StoredBlock
from prfaas.units import NS_PER_S, format_size

log = logging.getLogger(__name__)

REFRESH_S = 5.0
LIST_RATIO = 10
"""A long list is asked for less often: at most a tenth of the time is spent on lists."""
REQUEST_S = 5.0
"""Limit of a request that nobody waits for."""
PROBE_S = 0.25
PACKS_MAX = 100_000
"""Packs of a site that are listed."""
FRONTS, READS = 8, 32
"""Fronts and blocks that are read at a time."""
DELETES = 500
READ_RATIO = 0.5
"""A single read may take this share of the deadline; a longer one is a failure of the bucket."""
RETRY_S = 0.25
"""A refresh that failed is repeated after this, and the breaker asked while it is open."""
FLUSH_S = 3.0
"""Limit of the last upload when the node stops."""
BREAKER = BreakerSettings(failures_max=3)

Names = Iterable[BlockName]


class S3Tier:
    """Blocks below memory that other pool nodes of the site share. Lives on one event loop.

    Args:
        settings: Limits.
        bucket: The bucket.
        keys: Keys of the site.
        pool: Name of this pool node.
        hosts: Other pool nodes of the site: they write what they send themselves.
        metrics: Count what happens.
        on_found: Called with blocks that can be read from now on.
        on_gone: Called with blocks that cannot be read any more.
        clock_ns: Monotonic clock, nanoseconds.
    """

    label = "shared"

    def __init__(
        self,
        settings: S3Settings,
        bucket: Bucket,
        keys: KeyRing,
        pool: str,
        hosts: Set[str],
        metrics: PoolMetrics,
        on_found: Callable[[Names], None],
        on_gone: Callable[[Names], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings, self._bucket, self._keys, self._pool = settings, bucket, keys, pool
        self._hosts, self._metrics, self._clock_ns = hosts, metrics, clock_ns
        self._on_found, self._on_gone = on_found, on_gone
        self.capacity_bytes = settings.limit_bytes
        self._index = PackIndex()
        self._writer = PackWriter(
            bucket, keys, pool, settings.pack_bytes, metrics, self._written, clock_ns
        )
        self._breaker = Breaker(BREAKER)
        self._is_up = True
        """False while the tier fails: its blocks are hidden."""
        self._sizes: dict[PackName, int] = {}
        """All packs of the site, as last listed, and those written since."""
        self._unreadable: set[PackName] = set()
        self._layouts: set[bytes] = set()
        self.used_bytes = 0
        """Bytes in the bucket that this node has written."""
        self.is_listed = False
        """True once all packs of the known layouts are in the index."""
        self._is_listing = True
        """True until a refresh for the known layouts has ended, in whatever way."""
        self._refresh_now = asyncio.Event()
        self._refreshed: asyncio.Future[None] | None = None
        self._read_s = settings.deadline_s * READ_RATIO
        self._slots = asyncio.Semaphore(READS)
        self._threads = ThreadPoolExecutor(2, "prfaas-shared-reader")
        self._said = SaidOnce(clock_ns)
        metrics.shared_up.set(1)

    # --- contents ---

    def __len__(self) -> int:
        return len(self._index) if self._is_up else 0

    def __contains__(self, name: BlockName) -> bool:
        return self._is_up and name in self._index

    def names(self) -> Iterator[BlockName]:
        """Blocks that can be read."""
        return iter(self._index if self._is_up else ())

    def num_bytes(self, name: BlockName) -> int:
        """Size of a block."""
        return self._index[name].num_bytes

    def origin(self, name: BlockName) -> Origin:
        """Origin of a block."""
        return self._index[name].origin

    def learn(self, layout_id: bytes) -> None:
        """Read packs of a layout, from now on: an engine of this node uses it."""
        if layout_id not in self._layouts:
            self._layouts.add(layout_id)
            self.is_listed, self._is_listing = False, True
            self._refresh_now.set()

    @property
    def needs_probe(self) -> bool:
        """Return True while the first list of the bucket is under way."""
        return self._is_up and self._is_listing

    async def probe(self, names: Collection[BlockName]) -> set[BlockName]:
        """Wait for the list that is under way, for a fraction of a second."""
        if self.needs_probe:
            if self._refreshed is None:
                self._refreshed = asyncio.get_running_loop().create_future()
            limit_s = min(PROBE_S, self._settings.deadline_s * READ_RATIO)
            await asyncio.wait([self._refreshed], timeout=limit_s)
        return {name for name in names if name in self}

    # --- blocks ---

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block to be written.

        Returns:
            False if it is not written: it is there, another node of the site writes it, or the
            queue is full (counted).
        """
        if name in self._index or name in self._writer or block.origin.via in self._hosts:
            return False
        return self._writer.offer(name, block, done)

    async def read(self, name: BlockName, into: memoryview, budget: ReadBudget) -> bytes | None:
        """Read, open and check a block.

        Returns:
            Its digest; None if it could not be had in time, or at all.
        """
        place = self._index.get(name)
        if place is None or not self._is_up:
            return None
        try:
            async with asyncio.timeout(budget.left_s), self._slots:
                part = await self._bucket.read(
                    place.pack.name.path, place.offset, place.num_bytes + TAG_BYTES, self._read_s
                )
        except TimeoutError:
            self._count("read", "late")
            return None
        except GoneError:
            self._forget([place.pack.name])
            self._count("read", "gone")
            return None
        except TransferError as error:
            self._failed(str(error))
            self._count("read", "failed")
            return None
        self._breaker.succeeded(self._clock_ns())
        return await self._opened(name, place, part, into)

    async def _opened(
        self, name: BlockName, place: PackedBlock, part: memoryview, into: memoryview
    ) -> bytes | None:
        loop, lent = asyncio.get_running_loop(), [into]
        try:
            await loop.run_in_executor(self._threads, _open_lent, name, place, part, lent)
        except AlteredError as error:
            if self._said.is_new("altered"):
                log.error("shared tier: %s; the block is dropped", error)
            self._metrics.shared_unreadable.labels(reason="altered").inc()
            if self._index.drop(name, place):
                self._on_gone([name])
            self._count("read", "altered")
            return None
        if self._index.get(name) is not place:
            return None  # It was purged meanwhile.
        self._count("read", "ok")
        self._metrics.shared_bytes.labels(direction="read").inc(len(part))
        return place.digest

    def _count(self, operation: str, outcome: str) -> None:
        self._metrics.shared_requests.labels(operation=operation, outcome=outcome).inc()

    def _written(
        self, pack: PackName, blocks: dict[BlockName, PackedBlock], num_bytes: int
    ) -> None:
        self._sizes[pack] = num_bytes
        self._count_own()
        new = self._index.add(pack, blocks)
        if self._is_up:
            self._on_found(new)

    def _forget(self, packs: Iterable[PackName]) -> None:
        """Packs are not in the bucket any more."""
        gone = self._index.remove(packs)
        if self._is_up:
            self._on_gone(gone)

    # --- faults ---

    def _failed(self, why: str) -> None:
        self._breaker.failed(self._clock_ns())
        if self._is_up and not self._breaker.allows(self._clock_ns()):
            self._is_up = False
            self._metrics.shared_up.set(0)
            log.error("shared tier: the bucket fails, its blocks are misses for now: %s", why)
            self._on_gone(list(self._index))
            self._refresh_now.set()

    def _succeeded(self) -> None:
        self._breaker.succeeded(self._clock_ns())
        if not self._is_up and self._breaker.allows(self._clock_ns()):
            self._is_up = True
            self._metrics.shared_up.set(1)
            log.warning("shared tier: the bucket answers again, with %d blocks", len(self._index))
            self._on_found(list(self._index))

    # --- the list ---

    async def run(self) -> None:
        """Follow the bucket and write offered blocks, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run())
            tasks.create_task(self._follow())

    async def close(self) -> None:
        """Write what waits, for a few seconds, and end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._writer.flush()
        self._writer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self) -> None:
        while True:
            began_ns = self._clock_ns()
            self._refresh_now.clear()
            pause_s = REFRESH_S
            if self._is_up or self._breaker.allows(began_ns):
                await self._refresh()
                pause_s = max(pause_s, LIST_RATIO * (self._clock_ns() - began_ns) / NS_PER_S)
            if not self.is_listed or not self._is_up:
                pause_s = RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._refresh_now.wait()

    async def _refresh(self) -> None:
        """Make the index follow the bucket."""
        self._breaker.began(self._clock_ns())
        layouts = set(self._layouts)
        try:
            await self._list()
            await self._try_newest()
            await self._index_packs(layouts)
        except TransferError as error:
            self._failed(str(error))
            self._count("list", "failed")
            self._is_listing = False
        else:
            self._count("list", "ok")
            self._succeeded()
            self.is_listed = layouts == self._layouts
            self._is_listing = not self.is_listed
            await self._evict()
        if self._refreshed is not None and not self._is_listing:
            self._refreshed.set_result(None)
            self._refreshed = None

    async def _list(self) -> None:
        known = set(self._sizes)
        found: dict[PackName, int] = {}
        async for part in self._bucket.list(REQUEST_S):
            for path, size in part:
                name = name_in(path)
                if name is not None:
                    found[name] = size
            if len(found) > PACKS_MAX:
                raise TransferError(f"it holds more than {PACKS_MAX} packs, which is the limit")
        # Packs that were written since the list began need not be in it.
        gone = known - found.keys()
        self._unreadable &= found.keys()
        self._sizes = {k: v for k, v in self._sizes.items() if k not in gone} | found
        self._count_own()
        self._forget(gone & self._index.packs)

    async def _try_newest(self) -> None:
        """Read something while the tier is down: lists may be answered where reads fail."""
        newest = self._index.newest
        if not self._is_up and newest is not None:
            with contextlib.suppress(GoneError):
                await self._bucket.read(newest.path, 0, newest.front_bytes, REQUEST_S)

    async def _index_packs(self, layouts: set[bytes]) -> None:
        """Read the fronts of packs that are new, the newest first."""
        skipped = self._index.packs | self._unreadable
        new = [name for name in self._sizes if name.layout_id in layouts and name not in skipped]
        new.sort(key=lambda name: name.at_ms, reverse=True)
        for start in range(0, len(new), FRONTS):
            part = new[start : start + FRONTS]
            fronts = await asyncio.gather(*(self._front(name) for name in part))
            for name, blocks in zip(part, fronts, strict=True):
                found = self._index.add(name, blocks) if blocks is not None else []
                if self._is_up:
                    self._on_found(found)

    async def _front(self, name: PackName) -> dict[BlockName, PackedBlock] | None:
        """The blocks of a pack; None if it is gone or unreadable."""
        try:
            front = await self._bucket.read(name.path, 0, name.front_bytes, REQUEST_S)
            return read_front(name, front, self._keys, self._pool)
        except GoneError:
            return None
        except UnknownKeyError as error:
            reason, why = "unknown_key", f"{error}, which is not in the file of keys"
        except AlteredError as error:
            reason, why = "altered", str(error)
        self._unreadable.add(name)
        self._metrics.shared_unreadable.labels(reason=reason).inc()
        if self._said.is_new(reason):
            log.error("shared tier: a pack is skipped: %s", why)
        return None

    # --- the limit ---

    def _own(self) -> list[tuple[PackName, int]]:
        return [(n, size) for n, size in self._sizes.items() if n.writer == self._pool]

    def _count_own(self) -> None:
        self.used_bytes = sum(size for _, size in self._own())

    async def _evict(self) -> None:
        """Delete the oldest packs of this node beyond its limit."""
        own = sorted(self._own(), key=lambda pack: pack[0].at_ms)
        over = self.used_bytes - self.capacity_bytes
        victims: list[PackName] = []
        for name, size in own:
            if over <= 0:
                break
            victims.append(name)
            over -= size
        if not victims:
            return
        try:
            await self._delete(victims)
        except TransferError as error:
            self._count("delete", "failed")
            if self._said.is_new("delete"):
                log.error("shared tier: packs beyond the limit cannot be deleted: %s", error)
        else:
            self._count("delete", "ok")
            limit = format_size(self.capacity_bytes)
            log.info("shared tier: %d packs beyond %s deleted", len(victims), limit)

    async def _delete(self, packs: Sequence[PackName]) -> None:
        self._forget(packs)
        for start in range(0, len(packs), DELETES):
            part = packs[start : start + DELETES]
            await self._bucket.delete([name.path for name in part], REQUEST_S)
            for name in part:
                self._sizes.pop(name, None)
                self._unreadable.discard(name)
            self._count_own()

    # --- purges ---

    async def count(self, source: str) -> tuple[set[BlockName], int]:
        """Blocks in the index that a pool wrote, or whose origin it is, and their bytes."""
        found, num_bytes = set[BlockName](), 0
        for part in sliced(list(self._index)):
            for name in part:
                if self._is_of(name, source):
                    found.add(name)
                    num_bytes += self._index[name].num_bytes
            await asyncio.sleep(0)
        return found, num_bytes

    async def drop(self, source: str) -> None:
        """Delete every pack of the site with a block that a pool wrote, or whose origin it is.

        Packs of all writers and layouts: every node of the site does so, and one that is not there
        cannot.

        Raises:
            TransferError: Not all could be read or deleted.
        """
        found, _ = await self.count(source)
        for name in found:
            self._index.drop(name, self._index[name])
        self._on_gone(found)
        await self._writer.drop(lambda origin: source == self._pool or origin.is_of(source))
        await self._list()
        packs = list(self._sizes)
        victims: list[PackName] = []
        for start in range(0, len(packs), FRONTS):
            part = packs[start : start + FRONTS]
            holds = await asyncio.gather(*(self._holds(name, source) for name in part))
            victims += [name for name, is_victim in zip(part, holds, strict=True) if is_victim]
        await self._delete(victims)
        if self._unreadable:
            raise TransferError(
                f"{len(self._unreadable)} packs in the bucket cannot be read with the keys of this "
                "node, so their origin is not known"
            )

    def _is_of(self, name: BlockName, source: str) -> bool:
        place = self._index.get(name)
        return place is not None and _is_of(place.pack.name, place.origin.sources, source)

    async def _holds(self, pack: PackName, source: str) -> bool:
        """Return True if a pack has a block of a source."""
        sources = self._index.sources_of(pack)
        if sources is None and pack.writer != source:
            blocks = await self._front(pack) or {}
            sources = all_sources(blocks.values())
        return _is_of(pack, sources or frozenset(), source)


def _is_of(pack: PackName, sources: frozenset[str], source: str) -> bool:
    return pack.writer == source or Origin(sources).is_of(source)


def _open_lent(
    name: BlockName, place: PackedBlock, part: memoryview, lent: list[memoryview]
) -> None:
    open_block(name, place, part, lent.pop())
