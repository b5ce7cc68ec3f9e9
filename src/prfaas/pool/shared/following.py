"""Keeping the index of a shared tier equal to what is in the bucket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Iterable

from prfaas.core.kv.blocks import BlockName
from prfaas.errors import TransferError
from prfaas.log_throttle import LogThrottle
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import Bucket, GoneError
from prfaas.pool.shared.health import TierHealth
from prfaas.pool.shared.pack_fronts import PackFronts
from prfaas.pool.shared.pack_index import PackIndex
from prfaas.pool.shared.pack_list import PackList
from prfaas.pool.shared.packs import PackName
from prfaas.pool.shared.purge_marks import PurgeMarks
from prfaas.pool.shared.settings import S3Timing
from prfaas.pool.store.origins import sliced
from prfaas.units import NS_PER_S, format_size

log = logging.getLogger(__name__)

LIST_RATIO = 10
"""A long list is asked for less often: at most a tenth of the time is spent on lists."""
FRONTS = 8
"""Fronts that are read at a time."""
FREEZE_PACKS = 1000
"""While the first list is read, the garbage collector leaves out the index after so many packs."""

Names = Iterable[BlockName]


class BucketFollower:
    """Lists the bucket now and then, and reads the fronts of packs that are new.

    Args:
        marks: Purges, before which nothing is found.
        on_found: Called with blocks that can be read from now on.
        on_gone: Called with blocks that cannot be read any more.
    """

    def __init__(
        self,
        bucket: Bucket,
        packs: PackList,
        fronts: PackFronts,
        index: PackIndex,
        marks: PurgeMarks,
        health: TierHealth,
        timing: S3Timing,
        metrics: PoolMetrics,
        on_found: Callable[[Names], None],
        on_gone: Callable[[Names], None],
        clock_ns: Callable[[], int],
    ) -> None:
        self._bucket, self._packs, self._fronts, self._index = bucket, packs, fronts, index
        self._health, self._timing, self._metrics = health, timing, metrics
        self._on_found, self._on_gone, self._clock_ns = on_found, on_gone, clock_ns
        self._marks = marks
        self._layouts: set[bytes] = set()
        self.is_listed = False
        """True once all packs of the known layouts are in the index."""
        self._is_awaited = True
        """True until a refresh for the known layouts has ended, or was waited for long enough."""
        self._refresh_now = asyncio.Event()
        self._refreshed: asyncio.Future[None] | None = None
        self._said = LogThrottle(clock_ns)

    def learn(self, layout_id: bytes) -> None:
        """Read packs of a layout from now on."""
        if layout_id not in self._layouts:
            self._layouts.add(layout_id)
            self.is_listed, self._is_awaited = False, True
            self.hurry()

    def hurry(self) -> None:
        """Refresh now, or as soon as the breaker lets it."""
        self._refresh_now.set()

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
            began_ns = self._clock_ns()
            self._refresh_now.clear()
            pause_s = self._timing.refresh_s
            if self._health.may_ask:
                await self._refresh()
                pause_s = max(pause_s, LIST_RATIO * (self._clock_ns() - began_ns) / NS_PER_S)
            if not self.is_listed or not self._health.is_up:
                pause_s = self._timing.retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._refresh_now.wait()

    async def _refresh(self) -> None:
        """Make the index follow the bucket."""
        self._health.began()
        layouts = set(self._layouts)
        try:
            self.forget(await self._packs.refresh(self._timing.request_s))
            if await self._marks.follow(self._packs.marks):
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
            self._report(self._on_found, self._index.put_back(self._clock_ns()))
            await self._evict()
        if self.is_listed or not self._health.is_up:
            self._wait_no_longer()

    def forget(self, packs: Iterable[PackName]) -> None:
        """Packs are not in the bucket any more."""
        packs = list(packs)
        for name in packs:
            self._fronts.forget(name)
        self._report(self._on_gone, self._index.remove(packs))

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
            self._report(self._on_gone, old)
            await asyncio.sleep(0)

    def _report(self, event: Callable[[Names], None], names: list[BlockName]) -> None:
        if self._health.is_up and names:
            event(names)

    async def _try_newest(self) -> None:
        """Read something while the tier is down: lists may be answered where reads fail."""
        newest = self._index.newest
        if not self._health.is_up and newest is not None:
            with contextlib.suppress(GoneError):
                await self._bucket.read(newest.path, 0, newest.front_bytes, self._timing.request_s)

    async def _index_packs(self, layouts: set[bytes]) -> None:
        """Read the fronts of packs that are new, the newest first."""
        skipped = self._index.packs | self._fronts.skipped
        new = await self._packs.newest_first(layouts, skipped)
        for start in range(0, len(new), FRONTS):
            part = new[start : start + FRONTS]
            fronts = await asyncio.gather(*(self._fronts.read(name) for name in part))
            for name, blocks in zip(part, fronts, strict=True):
                if blocks is None:
                    continue
                kept = self._marks.kept(name, blocks)
                if len(kept) < len(blocks):
                    self._came_back(name, len(blocks) - len(kept))
                self._report(self._on_found, self._index.add(name, blocks, kept))
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
        victims = self._packs.beyond_limits()
        if self._packs.num_ignored and self._said.is_new("ignored"):
            log.warning(
                "shared tier: the bucket holds %d packs more than are followed; the oldest are not "
                "found: lower `limit`, or let a lifecycle rule delete what pool nodes left that "
                "are gone",
                self._packs.num_ignored,
            )
        if not victims:
            return
        try:
            self.forget(victims)
            await self._packs.delete(victims, self._timing.request_s)
        except TransferError as error:
            self._metrics.count_shared("delete", "failed")
            if self._said.is_new("delete"):
                log.error("shared tier: packs beyond the limit cannot be deleted: %s", error)
        else:
            self._metrics.count_shared("delete", "ok")
            limit = format_size(self._packs.capacity_bytes)
            log.info("shared tier: %d packs beyond the limit of %s deleted", len(victims), limit)
