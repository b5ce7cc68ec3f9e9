"""A shared tier in an S3 bucket that all pool nodes of a site write and read.

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
from collections.abc import Awaitable, Callable, Collection, Set
from concurrent.futures import ThreadPoolExecutor

from prfaas.core.cache.keep_rules import Origin, Scope
from prfaas.core.kv.blocks import BlockName, Layout
from prfaas.errors import TransferError
from prfaas.log_throttle import LogThrottle
from prfaas.pool.keys.sealing import TAG_BYTES, AlteredError
from prfaas.pool.keys.site_keys import KeyRing
from prfaas.pool.keys.tenant_keys import TenantKey
from prfaas.pool.keys.wrapping import SiteKeyWrapper
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import Bucket, GoneError
from prfaas.pool.shared.following import ATTEMPTS, FRONTS, BucketFollower, PackFronts, PackList
from prfaas.pool.shared.pack_writer import PackWriter
from prfaas.pool.shared.packs import PackedBlock, PackIndex, PackName, all_sources, open_block
from prfaas.pool.shared.purge_marks import PurgeMarks
from prfaas.pool.shared.settings import S3Settings
from prfaas.pool.shared.shown_blocks import ShownBlocks, TierHealth
from prfaas.pool.shared.tier_keys import TierKeys
from prfaas.pool.store.origins import sliced
from prfaas.pool.store.tier_ports import ReadBudget, TierOwner
from prfaas.units import NS_PER_MS, NS_PER_S

log = logging.getLogger(__name__)

READS = 32
"""Blocks that are read at a time."""
READ_RATIO = 0.5
"""A single read may take this share of the deadline; a longer one is a failure of the bucket."""


class S3Tier(ShownBlocks[PackedBlock]):
    """Blocks below memory in a bucket. Lives on one event loop.

    Args:
        pool: Name of this pool node.
        hosts: Other pool nodes of the site: they write what they send themselves.
        owner: The store above, with its rules.
    """

    _blocks: PackIndex
    label = "shared"

    def __init__(
        self,
        settings: S3Settings,
        bucket: Bucket,
        keys: KeyRing,
        pool: str,
        hosts: Set[str],
        metrics: PoolMetrics,
        owner: TierOwner,
    ) -> None:
        self._settings, self._bucket, self._pool = settings, bucket, pool
        self._hosts, self._metrics = hosts, metrics
        self._rules = owner.rules
        self.capacity_bytes = settings.limit_bytes
        self._blocks = PackIndex()
        self._marks = PurgeMarks(bucket, keys, settings.timing.request_s)
        self._tenants = TierKeys(
            bucket, SiteKeyWrapper(keys), self._marks, metrics, settings.timing.request_s
        )
        self._packs = PackList(bucket, pool, settings.limit_bytes)
        self._fronts = PackFronts(bucket, keys, self._tenants, pool, settings.timing, metrics)
        self._health = TierHealth(self, self._blocks, owner, metrics)
        self._follower = BucketFollower(
            self._packs,
            self._fronts,
            self._blocks,
            self._marks,
            self._health,
            settings.timing,
            metrics,
        )
        self._writer = PackWriter(bucket, keys, self._tenants, settings, self._follower, metrics)
        self._read_s = settings.deadline_s * READ_RATIO
        self._slots = asyncio.Semaphore(READS)
        self._threads = ThreadPoolExecutor(2, "prfaas-shared-reader")
        self._said = LogThrottle()

    # --- contents ---

    @property
    def used_bytes(self) -> int:
        """Bytes in the bucket that this node has written."""
        return self._packs.used_bytes

    @property
    def is_listed(self) -> bool:
        """True once all packs of the known layouts are in the index."""
        return self._follower.is_listed

    @property
    def writing_bytes(self) -> int:
        """Bytes that wait for the bucket."""
        return self._writer.held_bytes

    def place_of(self, name: BlockName) -> PackedBlock | None:
        """The place of a block in the bucket; None if it is unknown."""
        return self._blocks.get(name)

    def learn(self, layout: Layout) -> None:
        """Read packs of a layout, from now on: an engine of this node uses it."""
        self._follower.learn(layout.layout_id)

    @property
    def needs_probe(self) -> bool:
        """Return True while look-ups should wait for the first list of the bucket."""
        return self._follower.is_awaited

    async def probe(self, names: Collection[BlockName]) -> set[BlockName]:
        """Wait for the list that is under way, for a fraction of a second."""
        if self.needs_probe:
            await self._follower.first_list(min(self._settings.timing.probe_s, self._read_s))
        return {name for name in names if name in self}

    # --- blocks ---

    async def read(self, name: BlockName, into: memoryview, budget: ReadBudget) -> bytes | None:
        """Read, open and check a block. One that is altered twice is set aside for a while.

        Where every answer is altered or cut short, the tier is closed after `ALTERED_MAX` blocks.

        Returns:
            Its digest; None if it could not be had in time, or at all.
        """
        place = self._blocks.get(name)
        if place is None or not self._health.is_up:
            return None
        for _ in range(ATTEMPTS):
            part = await self._fetched(place, budget)
            if part is None:
                return None
            if await self._opened(name, place, part, into):
                self._health.opened()
                # It may have been purged meanwhile.
                return place.digest if self._blocks.get(name) is place else None
        self._health.altered(f"blocks are altered, such as one in {place.pack.name.path}")
        until_ns = time.monotonic_ns() + int(self._settings.timing.reread_s * NS_PER_S)
        if self._blocks.set_aside(name, place, until_ns):
            self._health.gone([name])
        return None

    async def _fetched(self, place: PackedBlock, budget: ReadBudget) -> memoryview | None:
        """The sealed bytes of a block; None if they do not come in time."""
        path, num_bytes = place.pack.name.path, place.num_bytes + TAG_BYTES
        try:
            async with asyncio.timeout(budget.left_s), self._slots:
                part = await self._bucket.read(path, place.offset, num_bytes, self._read_s)
        except TimeoutError:
            self._metrics.count_shared("read", "late")
        except GoneError:
            self._follower.forget([place.pack.name])
            self._metrics.count_shared("read", "gone")
        except TransferError as error:
            self._health.failed(str(error))
            self._metrics.count_shared("read", "failed")
        else:
            self._health.read()
            return part
        return None

    async def _opened(
        self, name: BlockName, place: PackedBlock, part: memoryview, into: memoryview
    ) -> bool:
        """Decrypt a block on a thread; return False if it is altered."""
        loop, lent = asyncio.get_running_loop(), [into]
        try:
            key = await self._tenants.get(place.ref)
            if key is None:
                raise AlteredError(f"the key {place.ref} is gone")
            await loop.run_in_executor(self._threads, _open_lent, name, place, part, lent, key)
        except TransferError as error:
            self._health.failed(str(error))
            return False
        except AlteredError as error:
            if self._said.is_new("altered"):
                log.error("shared tier: %s; the block is a miss", error)
            self._metrics.shared_unreadable.labels(reason="altered").inc()
            self._metrics.count_shared("read", "altered")
            return False
        self._metrics.count_shared("read", "ok")
        self._metrics.shared_bytes.labels(direction="read").inc(len(part))
        return True

    async def run(self) -> None:
        """Follow the bucket and write offered blocks, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run())
            tasks.create_task(self._follower.run())

    async def close(self) -> None:
        """Write what waits, for a few seconds, and end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.timing.close_s):
                await self._writer.flush()
        self._writer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def expire(self, names: Collection[BlockName]) -> int:
        """Remove those of some blocks that are too old, and packs of this node without others."""
        found = ((name, self._blocks.get(name)) for name in names)
        old = {name: place for name, place in found if place and self._rules.is_over(place.origin)}
        if not old:
            return 0
        self._blocks.drop(old)
        self._health.gone(old)
        packs = {place.pack.name for place in old.values()}
        own = [pack for pack in packs if pack.writer == self._pool]
        victims = self._blocks.emptied(own)
        try:
            await self._packs.delete(victims, self._settings.timing.request_s)
        except TransferError:
            self._metrics.count_shared("delete", "failed")
        # Packs that are still there are read again, and are tried again.
        self._follower.forget(victims)
        return len(old)

    # --- purges ---

    async def _drop_prompt(self, scope: Scope) -> None:
        """Delete the packs with a block of a prompt."""
        hashes = scope.hashes or frozenset()
        await self._writer.drop(scope.matches)
        limit_s, victims = self._settings.timing.request_s, set[PackName]()
        self._follower.forget(await self._packs.refresh(limit_s))
        for names in sliced(list(self._blocks)):
            places = (self._blocks.get(name) for name in names if name[1].block_hash in hashes)
            victims |= {each.pack.name for each in places if each and scope.matches(each.origin)}
            await asyncio.sleep(0)
        known = self._blocks.packs

        async def is_other(pack: PackName) -> bool:
            """Return True for a victim of a layout that no engine of this node uses."""
            blocks = {} if pack in known else await self._fronts.read(pack) or {}
            return any(name[1].block_hash in hashes for name in blocks)

        victims |= await self._those(is_other)
        await self._destroy(scope, victims)
        self._tell_unread(len(self._fronts.skipped) + self._packs.num_ignored)

    async def drop(self, scope: Scope) -> None:
        """Drop blocks of the site: packs with one of a source or prompt, or keys of a tenant.

        Packs of all writers and layouts: every node of the site does so, and one that is not there
        cannot. Of a tenant, packs are deleted that have no other block; the others stay, with
        blocks that nobody can read any more.

        Raises:
            TransferError: Not all could be read or deleted.
        """
        if scope.hashes is not None:
            await self._drop_prompt(scope)
            return
        found, _ = await self.count(scope)
        self._blocks.drop(found)
        self._health.gone(found)
        await self._writer.drop(self._rules.matcher(scope))
        if scope.tenant is not None:
            await self._drop_tenant(scope)
            return
        source = scope.source
        limit_s = self._settings.timing.request_s
        self._follower.forget(await self._packs.refresh(limit_s))
        victims = await self._those(lambda pack: self._holds(pack, source))
        await self._destroy(scope, victims)
        self._tell_unread(len(self._fronts.skipped) + self._packs.num_ignored)

    async def _those(self, is_victim: Callable[[PackName], Awaitable[bool]]) -> set[PackName]:
        """The packs of the bucket that have to go."""
        packs, found = list(self._packs), set[PackName]()
        for start in range(0, len(packs), FRONTS):
            part = packs[start : start + FRONTS]
            answers = await asyncio.gather(*map(is_victim, part))
            found |= {name for name, answer in zip(part, answers, strict=True) if answer}
        return found

    async def _destroy(self, scope: Scope, victims: Collection[PackName]) -> None:
        """Delete packs, and refuse from now on what was written before, should it come back."""
        timing = self._settings.timing
        self._follower.forget(victims)
        at_ms = max((pack.at_ms for pack in victims), default=0)
        await self._marks.add(scope, max(at_ms, _now_ms()))
        await self._packs.destroy(list(victims), timing.request_s, timing.retry_s)

    def _tell_unread(self, unread: int) -> None:
        if unread:
            raise TransferError(
                f"{unread} packs in the bucket cannot be read with the keys of this node, or are "
                "beyond the number that it follows, so their origin is not known"
            )

    async def _drop_tenant(self, scope: Scope) -> None:
        """Destroy the keys of a tenant, and delete packs with only its blocks."""
        await self._marks.add(scope, _now_ms())
        await self._tenants.destroy(scope.tenant or "")
        found, _ = await self.count(scope)  # Written while the keys were deleted.
        self._blocks.drop(found)
        self._health.gone(found)
        tenant, limit_s = scope.tenant or "", self._settings.timing.request_s
        self._follower.forget(await self._packs.refresh(limit_s))
        await self._destroy(scope, set(self._blocks.only_of(tenant)))
        self._tell_unread(self._packs.num_ignored)

    def _is_of(self, entry: PackedBlock, scope: Scope) -> bool:
        if scope.tenant is not None:
            return scope.matches(entry.origin)
        return _is_of(entry.pack.name, entry.origin.sources, scope.source)

    async def _holds(self, pack: PackName, source: str) -> bool:
        """Return True if a pack has a block of a source."""
        sources = self._blocks.sources_of(pack)
        if sources is None and pack.writer != source:
            blocks = await self._fronts.read(pack) or {}
            sources = all_sources(blocks.values())
        return _is_of(pack, sources or frozenset(), source)


def _now_ms() -> int:
    return time.time_ns() // NS_PER_MS


def _is_of(pack: PackName, sources: frozenset[str], source: str) -> bool:
    return pack.writer == source or Origin(sources).is_of(source)


def _open_lent(
    name: BlockName,
    place: PackedBlock,
    part: memoryview,
    lent: list[memoryview],
    key: TenantKey,
) -> None:
    open_block(name, place, part, lent.pop(), key)
