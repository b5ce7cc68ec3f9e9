"""Keeping the index of a shared tier equal to what is in the bucket.

The packs of a site as last listed, with the limits of this node's own; the indexes at their fronts,
of which those that cannot be read are skipped; and the loop that follows both.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Iterable, Iterator, Sequence, Set

from prfaas.core.kv.blocks import BlockName
from prfaas.errors import TransferError
from prfaas.log_throttle import LogThrottle
from prfaas.pool.keys.sealing import AlteredError, UnknownKeyError
from prfaas.pool.keys.site_keys import KeyRing
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import Bucket, GoneError
from prfaas.pool.shared.packs import PackedBlock, PackIndex, PackName, name_in, read_front
from prfaas.pool.shared.purge_marks import FOLDER, PurgeMarks
from prfaas.pool.shared.settings import S3Timing
from prfaas.pool.shared.shown_blocks import TierHealth
from prfaas.pool.shared.tier_keys import TierKeys
from prfaas.pool.store.origins import sliced
from prfaas.units import NS_PER_S, format_size

log = logging.getLogger(__name__)


PACKS_MAX = 100_000
"""Packs of a site that are known: the newest. A node deletes its own among the others."""
LISTS = 3
"""Lists that may still have what was deleted, as of a server that is late."""
DELETES = 500
"""Packs that are deleted by one request."""


class PackList:
    """Names and sizes of packs: those last listed, and those written since.

    Args:
        pool: Name of this pool node.
        capacity_bytes: Limit of the packs that it has written.
        packs_max: Limit of the packs of all nodes.
    """

    def __init__(
        self, bucket: Bucket, pool: str, capacity_bytes: int, packs_max: int = PACKS_MAX
    ) -> None:
        self._bucket, self.pool, self._packs_max = bucket, pool, packs_max
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Bytes of the packs that this node has written."""
        self.num_ignored = 0
        """Packs of the last list that are beyond the limit of packs."""
        self.marks: list[str] = []
        """Paths of the marks of purges of the last list."""
        self._sizes: dict[PackName, int] = {}
        self._excess: list[PackName] = []
        """Packs of this node that are beyond the limit of packs."""

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[PackName]:
        return iter(self._sizes)

    def add(self, name: PackName, num_bytes: int) -> None:
        """A pack is in the bucket."""
        if name not in self._sizes and name.writer == self.pool:
            self.used_bytes += num_bytes
        self._sizes[name] = num_bytes

    async def refresh(self, limit_s: float) -> list[PackName]:
        """List the bucket. Sorting and comparing run on a thread.

        Args:
            limit_s: Limit of each request, seconds.

        Returns:
            Packs that are not in it any more. Those written since the list began are kept.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        known, found, num_ignored = set(self._sizes), dict[PackName, int](), 0
        excess: list[PackName] = []
        marks: list[str] = []
        async for part in self._bucket.list(limit_s):
            for path, size in part:
                name = name_in(path)
                if name is not None:
                    found[name] = size
                elif path.startswith(f"{FOLDER}/"):
                    marks.append(path)
            if len(found) > 2 * self._packs_max:
                num_ignored += await asyncio.to_thread(self._trim, found, excess)
        num_ignored += await asyncio.to_thread(self._trim, found, excess)
        gone, new = await asyncio.to_thread(_differences, known, found)
        for name in gone:
            self._remove(name)
        for name in new:
            self.add(name, found[name])
        self.num_ignored, self._excess, self.marks = num_ignored, excess, marks
        return gone

    async def newest_first(self, layouts: Set[bytes], skipped: Set[PackName]) -> list[PackName]:
        """Packs of some layouts."""
        return await asyncio.to_thread(_newest_first, list(self._sizes), layouts, skipped)

    def beyond_limits(self) -> list[PackName]:
        """The oldest packs of this node that have to be deleted."""
        over = self.used_bytes - self.capacity_bytes
        victims = list(self._excess)
        if over > 0:
            own = [name for name in self._sizes if name.writer == self.pool]
            for name in sorted(own, key=_age):
                if over <= 0:
                    break
                victims.append(name)
                over -= self._sizes[name]
        return victims

    async def delete(self, packs: Sequence[PackName], limit_s: float) -> None:
        """Delete packs.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        for start in range(0, len(packs), DELETES):
            part = packs[start : start + DELETES]
            await self._bucket.delete([name.path for name in part], limit_s)
            for name in part:
                self._remove(name)

    async def destroy(self, packs: Sequence[PackName], limit_s: float, pause_s: float) -> None:
        """Delete packs, and list the bucket again: that they are gone is not the server's word.

        Args:
            packs: Victims of a purge.
            limit_s: Limit of each request, seconds.
            pause_s: Wait before another list, seconds.

        Raises:
            TransferError: The server failed, did not answer in time, or still lists some.
        """
        await self.delete(packs, limit_s)
        left: Set[PackName] = set(packs)
        for attempt in range(LISTS if left else 0):
            await asyncio.sleep(pause_s if attempt else 0)
            await self.refresh(limit_s)
            left &= self._sizes.keys()
            if not left:
                return
        if left:
            raise TransferError(
                f"the bucket has answered that {len(packs)} packs were deleted, and still lists "
                f"{len(left)} of them"
            )

    def _remove(self, name: PackName) -> None:
        size = self._sizes.pop(name, None)
        if size is not None and name.writer == self.pool:
            self.used_bytes -= size

    def _trim(self, found: dict[PackName, int], excess: list[PackName]) -> int:
        """Remove the oldest packs beyond the limit; return their number."""
        oldest = sorted(found, key=_age)[: max(0, len(found) - self._packs_max)]
        for name in oldest:
            del found[name]
        excess += [name for name in oldest if name.writer == self.pool]
        return len(oldest)


def _age(name: PackName) -> tuple[int, str]:
    return name.at_ms, name.random


def _differences(
    known: Set[PackName], found: dict[PackName, int]
) -> tuple[list[PackName], list[PackName]]:
    """Names that are gone, and names that are new."""
    return [name for name in known if name not in found], [n for n in found if n not in known]


def _newest_first(
    names: Iterable[PackName], layouts: Set[bytes], skipped: Set[PackName]
) -> list[PackName]:
    some = [name for name in names if name.layout_id in layouts and name not in skipped]
    return sorted(some, key=_age, reverse=True)


ATTEMPTS = 2
"""Altered bytes are read once more: the answer may be altered, and not the object."""


class PackFronts:
    """Reader of the fronts of packs.

    Args:
        tenants: Keys of tenants; a block whose key is gone is not shown.
        pool: Name of this pool node.
        timing: How long a request may take, and an altered pack is skipped.
    """

    def __init__(
        self,
        bucket: Bucket,
        keys: KeyRing,
        tenants: TierKeys,
        pool: str,
        timing: S3Timing,
        metrics: PoolMetrics,
    ) -> None:
        self._bucket, self._keys, self._pool = bucket, keys, pool
        self._tenants = tenants
        self._timing, self._metrics = timing, metrics
        self._skipped: dict[PackName, int | None] = {}
        """Time at which an unreadable pack is read again; None for one with an unknown key."""
        self._said = LogThrottle()

    @property
    def skipped(self) -> frozenset[PackName]:
        """Packs that cannot be read at present."""
        now_ns = time.monotonic_ns()
        over = [name for name, until in self._skipped.items() if until and until <= now_ns]
        for name in over:
            del self._skipped[name]
        return frozenset(self._skipped)

    def forget(self, name: PackName) -> None:
        """A pack is gone."""
        self._skipped.pop(name, None)

    async def read(self, name: PackName) -> dict[BlockName, PackedBlock] | None:
        """The blocks of a pack; None if it is gone or unreadable.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        problem = AlteredError("not read")
        for _ in range(ATTEMPTS):
            try:
                front = read_front(name, await self.fetch(name), self._keys, self._pool)
                return await self._readable(front)
            except GoneError:
                return None
            except UnknownKeyError as error:
                self._skip(name, None, "unknown_key", f"{error}, which is not in the file of keys")
                return None
            except AlteredError as error:
                problem = error
        until_ns = time.monotonic_ns() + int(self._timing.reread_s * NS_PER_S)
        self._skip(name, until_ns, "altered", str(problem))
        return None

    async def fetch(self, name: PackName) -> memoryview:
        """The sealed front of a pack.

        Raises:
            GoneError: It is not in the bucket.
            TransferError: The server failed, or did not answer in time.
        """
        limit_s = self._timing.request_s
        return await self._bucket.read(name.path, 0, name.front_bytes, limit_s)

    async def _readable(self, blocks: dict[BlockName, PackedBlock]) -> dict[BlockName, PackedBlock]:
        refs = {block.ref for block in blocks.values()}
        lost = {ref for ref in refs if await self._tenants.get(ref) is None}
        return {name: block for name, block in blocks.items() if block.ref not in lost}

    def _skip(self, name: PackName, until_ns: int | None, reason: str, why: str) -> None:
        self._skipped[name] = until_ns
        self._metrics.shared_unreadable.labels(reason=reason).inc()
        if self._said.is_new(reason):
            log.error("shared tier: a pack is skipped: %s", why)


LIST_RATIO = 10
"""A long list is asked for less often: at most a tenth of the time is spent on lists."""
FRONTS = 8
"""Fronts that are read at a time."""
FREEZE_PACKS = 1000
"""While the first list is read, the garbage collector leaves out the index after so many packs."""


class BucketFollower:
    """Lists the bucket now and then, and reads the fronts of packs that are new.

    Args:
        marks: Purges, before which nothing is found.
    """

    def __init__(
        self,
        packs: PackList,
        fronts: PackFronts,
        index: PackIndex,
        marks: PurgeMarks,
        health: TierHealth,
        timing: S3Timing,
        metrics: PoolMetrics,
    ) -> None:
        self.packs, self._fronts, self._index, self._marks = packs, fronts, index, marks
        self._health, self._timing, self._metrics = health, timing, metrics
        self._layouts: set[bytes] = set()
        self.is_listed = False
        """True once all packs of the known layouts are in the index."""
        self._is_awaited = True
        """True until a refresh for the known layouts has ended, or was waited for long enough."""
        self._refreshed: asyncio.Future[None] | None = None
        self._said = LogThrottle()

    def learn(self, layout_id: bytes) -> None:
        """Read packs of a layout from now on."""
        if layout_id not in self._layouts:
            self._layouts.add(layout_id)
            self.is_listed, self._is_awaited = False, True
            self._health.hurry.set()

    @property
    def is_awaited(self) -> bool:
        """Return True if a look-up should wait for the list that is under way."""
        return self._is_awaited and self._health.is_up

    async def first_list(self, limit_s: float) -> None:
        """Wait for the list that is under way.

        Look-ups together wait for `limit_s` seconds, from the first one on.
        """
        if self._refreshed is None:
            loop = asyncio.get_running_loop()
            self._refreshed = loop.create_future()
            loop.call_later(limit_s, self._wait_no_longer)
        await asyncio.wait([self._refreshed])

    def _wait_no_longer(self) -> None:
        self._is_awaited = False
        if self._refreshed is not None:
            self._refreshed.set_result(None)
            self._refreshed = None

    async def run(self) -> None:
        """Follow the bucket until cancelled."""
        while True:
            began_ns = time.monotonic_ns()
            self._health.hurry.clear()
            pause_s = self._timing.refresh_s
            if self._health.may_ask:
                await self._refresh()
                pause_s = max(pause_s, LIST_RATIO * (time.monotonic_ns() - began_ns) / NS_PER_S)
            if not self.is_listed or not self._health.is_up:
                pause_s = self._timing.retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._health.hurry.wait()

    async def _refresh(self) -> None:
        """Make the index follow the bucket."""
        self._health.began()
        layouts = set(self._layouts)
        try:
            self.forget(await self.packs.refresh(self._timing.request_s))
            if await self._marks.follow(self.packs.marks):
                await self.refuse()
            await self._try_newest()
            await self._index_packs(layouts)
        except TransferError as error:
            self._health.failed(str(error))
            self._metrics.count_shared("list", "failed")
        else:
            self._metrics.count_shared("list", "ok")
            self._health.succeeded()
            self.is_listed = layouts == self._layouts
            self._health.found(self._index.put_back(time.monotonic_ns()))
            await self._evict()
        if self.is_listed or not self._health.is_up:
            self._wait_no_longer()

    def written(self, pack: PackName, blocks: dict[BlockName, PackedBlock], num_bytes: int) -> None:
        """This node has written a pack."""
        self.packs.add(pack, num_bytes)
        self._health.found(self._index.add(pack, blocks))

    def forget(self, packs: Iterable[PackName]) -> None:
        """Packs are not in the bucket any more."""
        packs = list(packs)
        for name in packs:
            self._fronts.forget(name)
        self._health.gone(self._index.remove(packs))

    async def refuse(self) -> None:
        """Drop the blocks that a purge refuses."""
        for names in sliced(list(self._index)):
            found = ((name, self._index.get(name)) for name in names)
            old = [
                name
                for name, place in found
                if place and self._marks.refuses(place.pack.name, name, place.origin)
            ]
            self._index.drop(old)
            self._health.gone(old)
            await asyncio.sleep(0)

    async def _try_newest(self) -> None:
        """Read something while the tier is down: lists may be answered where reads fail."""
        newest = self._index.newest
        if not self._health.is_up and newest is not None:
            with contextlib.suppress(GoneError):
                await self._fronts.fetch(newest)

    async def _index_packs(self, layouts: set[bytes]) -> None:
        """Read the fronts of packs that are new, the newest first."""
        skipped = self._index.packs | self._fronts.skipped
        new = await self.packs.newest_first(layouts, skipped)
        for start in range(0, len(new), FRONTS):
            part = new[start : start + FRONTS]
            fronts = await asyncio.gather(*(self._fronts.read(name) for name in part))
            for name, blocks in zip(part, fronts, strict=True):
                if blocks is None:
                    continue
                kept = self._marks.kept(name, blocks)
                if len(kept) < len(blocks):
                    self._came_back(name, len(blocks) - len(kept))
                self._health.found(self._index.add(name, blocks, kept))
            if not self.is_listed and start % FREEZE_PACKS == 0:
                # Otherwise a full collection looks through a growing index, for up to a second.
                gc.freeze()

    def _came_back(self, name: PackName, num_blocks: int) -> None:
        self._metrics.shared_unreadable.labels(reason="purged").inc()
        if self._said.is_new("purged"):
            log.error(
                "shared tier: %s has %d blocks of before a purge, which are misses: the bucket has "
                "versions, was restored, or did not delete; delete old versions by its own means",
                name.path,
                num_blocks,
            )

    async def _evict(self) -> None:
        """Delete packs of this node beyond its limits."""
        victims = self.packs.beyond_limits()
        if self.packs.num_ignored and self._said.is_new("ignored"):
            log.warning(
                "shared tier: the bucket holds %d packs more than are followed; the oldest are not "
                "found: lower `limit`, or let a lifecycle rule delete what pool nodes left that "
                "are gone",
                self.packs.num_ignored,
            )
        if not victims:
            return
        try:
            self.forget(victims)
            await self.packs.delete(victims, self._timing.request_s)
        except TransferError as error:
            self._metrics.count_shared("delete", "failed")
            if self._said.is_new("delete"):
                log.error("shared tier: packs beyond the limit cannot be deleted: %s", error)
        else:
            self._metrics.count_shared("delete", "ok")
            limit = format_size(self.packs.capacity_bytes)
            log.info("shared tier: %d packs beyond the limit of %s deleted", len(victims), limit)
