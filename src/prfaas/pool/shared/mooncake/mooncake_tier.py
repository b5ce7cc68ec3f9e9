"""The tier of a site in a Mooncake Store: sealed blocks in the memory of several hosts.

The store cannot be listed, so a look-up asks it for the blocks that this node does not have. That
the store has a block is a hint: for seconds it says so of blocks on a provider that is gone. A read
that fails, is late or brings other bytes is a miss. While the store fails, the tier has no blocks,
until a question and some reads in the background succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from prfaas.core.cache.keep_rules import Origin, Scope
from prfaas.core.kv.blocks import BlockKey, BlockName, Layout
from prfaas.errors import TransferError
from prfaas.log_throttle import LogThrottle
from prfaas.pool.keys.sealing import AlteredError, UnknownKeyError
from prfaas.pool.keys.site_keys import KeyRing
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.mooncake.block_writer import BlockWriter
from prfaas.pool.shared.mooncake.client import MooncakeClient
from prfaas.pool.shared.mooncake.known_blocks import Known, KnownBlocks
from prfaas.pool.shared.mooncake.orders import GONE, NAMES_MAX, StoreOperation, check
from prfaas.pool.shared.mooncake.sealed_block import key_of, open_block, sealed_bytes_max
from prfaas.pool.shared.mooncake.settings import MooncakeSettings
from prfaas.pool.shared.shown_blocks import ShownBlocks, TierHealth
from prfaas.pool.store.origins import sliced
from prfaas.pool.store.tier_ports import ReadBudget, TierOwner

log = logging.getLogger(__name__)

SWEEP_S, SWEEP_MIN = 600.0, 32
"""All known blocks are checked in this time. A question renews the lease of a block, which defers
its eviction, so it is not asked often."""
READ_RATIO = 0.5
"""A single read may take this share of the time of all; a longer one is a failure of the store."""
READS = 16
"""Blocks that are read at a time."""
SAMPLES = 4
"""Blocks that are read before the tier shows its blocks again."""


class MooncakeTier(ShownBlocks[Known]):
    """Blocks below memory that other pool nodes of the site share. Lives on one event loop.

    Args:
        pool: Name of this pool node.
        hosts: Other pool nodes of the site: they write what they send themselves.
        owner: The store above, with its rules.
    """

    _blocks: KnownBlocks
    label = "shared"
    capacity_bytes = 0

    def __init__(
        self,
        settings: MooncakeSettings,
        keys: KeyRing,
        pool: str,
        hosts: Set[str],
        metrics: PoolMetrics,
        owner: TierOwner,
    ) -> None:
        self._settings, self._keys, self._pool, self._hosts = settings, keys, pool, hosts
        self._metrics, self._rules = metrics, owner.rules
        self._limits = settings.limits
        self.client = MooncakeClient(settings, metrics)
        self._memory = self.client.memory
        self._blocks = KnownBlocks()
        self._sizes: dict[tuple[bytes, int], int] = {}
        """Bytes of a block, by layout and group."""
        self._health = TierHealth(self, self._blocks, owner, metrics)
        self._writer = BlockWriter(
            self.client, keys.sealing, pool, self._blocks, self._health, metrics
        )
        self._read_s = settings.read_limit_s * READ_RATIO
        self._slots = asyncio.Semaphore(READS)
        self._threads = ThreadPoolExecutor(2, "prfaas-mooncake-reader")
        self._said = LogThrottle()
        self._serving: asyncio.Task[None] | None = None

    # --- contents ---

    @property
    def used_bytes(self) -> int:
        """Bytes in the store that this node has written, as far as it knows."""
        return self._blocks.own_bytes

    def learn(self, layout: Layout) -> None:
        """Ask for blocks of a layout, from now on: an engine of this node uses it."""
        for group in layout.groups:
            if sealed_bytes_max(group.block_bytes) <= self._memory.reads.capacity_bytes:
                self._sizes[layout.layout_id, group.index] = group.block_bytes

    @property
    def needs_probe(self) -> bool:
        """Return True while the store can be asked."""
        return self._health.is_up and self.client.is_ready

    async def probe(self, names: Collection[BlockName]) -> set[BlockName]:
        """Ask the store for blocks, and remember the answer. Its leases protect what it has."""
        asked = [name for name in names if _kind(name) in self._sizes]
        if not (self.needs_probe and asked):
            return {name for name in names if name in self}
        try:
            return await self._ask(asked, self._settings.probe_limit_s)
        except TransferError as error:
            self._metrics.count_shared("probe", "failed")
            self._health.failed(str(error))
            return {name for name in asked if name in self}

    async def _ask(self, names: Sequence[BlockName], limit_s: float) -> set[BlockName]:
        """Ask for blocks.

        Returns:
            Those that are there.

        Raises:
            TransferError: No answer, or an error.
        """
        orders = [
            self.client.ask(
                StoreOperation.EXIST,
                [key_of(self._settings.prefix, n) for n in names[start : start + NAMES_MAX]],
            )
            for start in range(0, len(names), NAMES_MAX)
        ]
        _, late = await asyncio.wait(orders, timeout=limit_s)
        if late:
            raise TransferError(f"no answer in {limit_s:.2f} s")
        codes = [check(code) for order in orders for code in order.result()]
        found = {name for name, code in zip(names, codes, strict=True) if code == 1}
        self._gone([name for name in names if name not in found])
        new = [name for name in found if name not in self._blocks]
        for name in found:
            if name in self._blocks:
                self._blocks.checked(name)
            else:
                self._gone(self._blocks.set(name, Known(self._sizes[_kind(name)])))
        self._metrics.count_shared("probe", "ok")
        self._health.found(new)
        return found

    # --- blocks ---

    async def read(self, name: BlockName, into: memoryview, budget: ReadBudget) -> bytes | None:
        """Read, open and check a block.

        Returns:
            Its digest; None if it could not be had in time, or at all.
        """
        if name not in self:
            return None
        try:
            async with asyncio.timeout(budget.left_s), self._slots:
                digest = await self._read(name, into, self._read_s)
        except TimeoutError:
            self._metrics.count_shared("read", "late")
            return None
        except TransferError as error:
            self._metrics.count_shared("read", "failed")
            self._health.failed(str(error))
            return None
        self._health.read()
        return digest

    async def _read(self, name: BlockName, into: memoryview, limit_s: float) -> bytes | None:
        """Return the digest of a block; None if the store does not have it as it was written.

        Raises:
            TransferError: No answer, or an error.
        """
        size = sealed_bytes_max(len(into))
        buffers = self._memory.reads
        offset = await buffers.taken(size)
        order: asyncio.Future[list[int]] | None = None
        try:
            path = key_of(self._settings.prefix, name)
            order = self.client.ask(StoreOperation.GET, [path], offset, size)
            await asyncio.wait([order], timeout=limit_s)
            if not order.done():
                raise TransferError(f"no answer in {limit_s:.2f} s")
            code = check(order.result()[0])
            if code in GONE:
                self._metrics.count_shared("read", "gone")
                self._gone([name])
                return None
            return await self._opened(name, self._memory.view(offset, max(code, 0)), into)
        finally:
            if order is None or order.done():
                buffers.give_back(offset, size)
            else:  # The library may still write to it.
                order.add_done_callback(lambda _: buffers.give_back(offset, size))

    async def _opened(self, name: BlockName, sealed: memoryview, into: memoryview) -> bytes | None:
        loop, lent = asyncio.get_running_loop(), [into]
        try:
            digest, origin = await loop.run_in_executor(
                self._threads, self._open_lent, name, sealed, lent
            )
        except UnknownKeyError as error:
            self._unreadable(name, "unknown_key", f"{error}, which is not in the file of keys")
            return None
        except AlteredError as error:
            self._unreadable(name, "altered", str(error))
            self._health.altered(str(error))
            return None
        self._health.opened()
        known = self._blocks.get(name)
        if known is None:
            return None  # It was purged meanwhile.
        self._blocks.set(name, known._replace(origin=origin))
        self._metrics.count_shared("read", "ok")
        self._metrics.shared_bytes.labels(direction="read").inc(len(sealed))
        return digest

    def _open_lent(
        self, name: BlockName, sealed: memoryview, lent: list[memoryview]
    ) -> tuple[bytes, Origin]:
        return open_block(name, sealed, self._keys, self._pool, lent.pop())

    def _unreadable(self, name: BlockName, reason: str, why: str) -> None:
        if self._said.is_new(reason):
            log.error("shared tier: a block is skipped: %s", why)
        self._metrics.shared_unreadable.labels(reason=reason).inc()
        self._metrics.count_shared("read", "altered")
        self._gone([name])

    def _gone(self, names: Iterable[BlockName]) -> None:
        """Blocks are not in the store any more."""
        self._health.gone(self._blocks.remove(names))

    async def run(self) -> None:
        """Follow the store and write offered blocks, until cancelled."""
        self._serving = asyncio.create_task(self.client.run())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run())
            tasks.create_task(self._follow())

    async def close(self) -> None:
        """Write what waits, for a few seconds, and end."""
        if self.client.is_ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.flush_s):
                    await self._writer.flush()
        self._writer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        self._memory.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._limits.check_s)
            if not self._health.may_ask or not self._sizes or self.client.is_starting:
                continue
            try:
                await self._check()
            except TransferError as error:
                self._health.failed(str(error))

    async def _check(self) -> None:
        """Ask for some known blocks; while the tier is down for all, and read some; TransferError
        if the store fails."""
        limit_s = self._limits.request_s
        if self._health.is_up:
            number = max(SWEEP_MIN, int(len(self._blocks) * self._limits.check_s / SWEEP_S))
            await self._ask(self._blocks.first(number) or [self._nothing()], limit_s)
            return
        self._health.began()
        await self._ask([self._nothing()], limit_s)
        for names in sliced(list(self._blocks)):
            await self._ask(names, limit_s)
        for name in self._blocks.spread(SAMPLES):
            known = self._blocks.get(name)
            if known is not None:
                await self._read(name, memoryview(bytearray(known.num_bytes)), limit_s)
        self._health.succeeded()

    def _nothing(self) -> BlockName:
        """A name that no block has."""
        layout_id, group = next(iter(self._sizes))
        return layout_id, BlockKey(group, bytes(32))

    async def expire(self, names: Collection[BlockName]) -> int:
        """Forget those of some blocks that are too old. The store evicts them in its own order."""
        found = ((name, self._blocks.get(name)) for name in names)
        old = [name for name, known in found if known and self._rules.is_over(known.origin)]
        self._gone(old)
        return len(old)

    # --- purges ---

    async def drop(self, scope: Scope) -> None:
        """Delete every block of the site, of whatever source and tenant.

        The origin of a block is sealed in it, and other nodes wrote blocks that this one does not
        know of.

        Raises:
            TransferError: The store failed.
        """
        self._gone(list(self._blocks))
        await self._writer.drop(self._rules.matcher(scope))
        self._gone(list(self._blocks))
        pattern = f"^{self._settings.prefix.replace('.', '[.]')}/.*"
        order = self.client.ask(StoreOperation.REMOVE, [pattern])
        await asyncio.wait([order], timeout=self._limits.request_s)
        if not order.done():
            raise TransferError(f"no answer in {self._limits.request_s:.2f} s")
        check(order.result()[0])
        self._metrics.count_shared("delete", "ok")
        log.info("shared tier: all blocks below %s/ deleted", self._settings.prefix)

    def _is_of(self, entry: Known, scope: Scope) -> bool:
        is_own = entry.is_own and scope.tenant is None and scope.source == self._pool
        return is_own or scope.matches(entry.origin)


def _kind(name: BlockName) -> tuple[bytes, int]:
    layout_id, key = name
    return layout_id, key.group
