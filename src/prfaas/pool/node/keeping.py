"""Orders of gateways on the blocks of a pool node, and one walk over its tiers that executes them.

A purge drops the blocks of a defective pool, of a tenant or of a prompt until engines are reset:

    gateway ──purge──► every pool node       drops, ends transfers, takes nothing more of the scope
    gateway ──reset──► every engine          forgets what it holds in its own memory
    gateway ──its end──► every pool node     takes blocks of the scope again

Between the first and the last step no engine can store here what it computed from such blocks, and
none finds any. A gateway that dies in between leaves a bar, which ends by itself after a time; the
same purge sent again does the rest. The answer to the last step tells the gateway if the bar had
ended before, as of a pool node that was restarted meanwhile.

Of a tenant, its keys on disk are destroyed first, in one atomic step: from then on a crash cannot
bring its blocks back. They are destroyed once more at the end, with what was written meanwhile.

Blocks that are too old are misses at once (`core/cache/keep_rules.py`). They are removed in rounds:
each inspects the next blocks of each tier, SLICE at most, whatever the node holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from prfaas.core.cache.keep_rules import Effect, Scope
from prfaas.core.cache.tenant_shares import Share
from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import HASH_BYTES, BlockName
from prfaas.core.transfer.facts import PurgeDone
from prfaas.errors import ConfigError, TransferError
from prfaas.logs import log_event
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.link_room import LinkRoom
from prfaas.pool.node.pinning import Pinning
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.node.store_room import DISK, HOST, SHARED
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.origins import PURGED, SLICE, sliced
from prfaas.pool.store.tier_ports import SharedTier
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.gateway import Order, OrderDone

log = logging.getLogger(__name__)

TOO_OLD = "too_old"
"""Reason for which blocks are dropped."""
WAITING_MAX = 256
"""Orders of one gateway that are being executed, or wait for others."""
_PROBLEM_CHARS_MAX = 400


class KeptTier(Protocol):
    """A tier on the walk: memory, or one below."""

    label: str

    def names(self) -> Iterable[BlockName]:
        """Blocks in it."""
        ...

    async def count(self, scope: Scope) -> tuple[set[BlockName], int]:
        """Blocks of a scope, and their bytes."""
        ...

    async def drop(self, scope: Scope) -> None:
        """Drop them for good."""

    async def expire(self, names: Collection[BlockName]) -> int:
        """Remove those of some blocks that are too old; return their number."""
        ...


class _Memory:
    """Memory as a tier; links and engines are served while it is walked."""

    label = HOST

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def names(self) -> list[BlockName]:
        return self._store.in_memory()

    async def count(self, scope: Scope) -> tuple[set[BlockName], int]:
        found, num_bytes = set[BlockName](), 0
        for part, size in self._slices(scope):
            found |= part
            num_bytes += size
            await asyncio.sleep(0)
        return found, num_bytes

    async def drop(self, scope: Scope) -> None:
        for part, _ in self._slices(scope):
            self._store.drop(part)
            await asyncio.sleep(0)

    async def expire(self, names: Collection[BlockName]) -> int:
        old, _ = self._store.count(self._store.rules.is_over, names)
        self._store.drop(old)
        return len(old)

    def _slices(self, scope: Scope) -> Iterator[tuple[set[BlockName], int]]:
        matches = self._store.rules.matcher(scope)
        for names in sliced(self._store.in_memory()):
            yield self._store.count(matches, filter(scope.has, names))


@dataclass(slots=True)
class Found:
    """Blocks of a scope, their bytes by tier, and why not all were dropped for good."""

    names: set[BlockName] = field(default_factory=set)
    num_bytes: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    def add_problem(self, problem: str) -> None:
        """Add a reason."""
        self.problem = f"{self.problem}; {problem}".removeprefix("; ")


class KeptTiers:
    """The tiers of a pool node, walked in one way for all orders.

    Args:
        store: Blocks in memory, with the rules of all tiers.
        disk: The disk tier; None without.
        shared: The tier of the site; None without.
        slice_blocks: Blocks that are inspected for their age at a time.
    """

    def __init__(
        self,
        store: BlockStore,
        disk: DiskTier | None,
        shared: SharedTier | None,
        slice_blocks: int = SLICE,
    ) -> None:
        self.rules, self.store, self._disk = store.rules, store, disk
        below: list[KeptTier] = [tier for tier in (disk, shared) if tier is not None]
        self.all: list[KeptTier] = [_Memory(store), *below]
        """The fastest first."""
        self.slice_blocks = slice_blocks
        self._turns: dict[str, Iterator[BlockName]] = {}
        """Blocks of each tier that are still to be inspected for their age."""

    def follow_shares(self) -> None:
        """Set the shares of tenants by the rules, from now on."""
        self.store.room.share(self.rules.shares)
        if self._disk is not None:
            self._disk.share(self.rules.shares)

    def follow_ages(self) -> None:
        """Keep blocks apart that get too old together, from now on."""
        if self._disk is not None:
            self._disk.keep_apart(self.rules.ages.tags)

    async def destroy_keys(self, tenant: str) -> None:
        """Destroy the keys of a tenant on disk; a problem shows when it is done again."""
        if self._disk is not None:
            with contextlib.suppress(OSError):
                await self._disk.destroy_keys(tenant)

    async def walk(self, scope: Scope, *, drop: bool) -> Found:
        """Count the blocks of a scope in all tiers, or drop them for good."""
        found = Found()
        for tier in self.all:
            names, found.num_bytes[tier.label] = await tier.count(scope)
            found.names |= names
            try:
                if drop:
                    await tier.drop(scope)
            except (OSError, ConfigError, TransferError) as error:
                found.add_problem(f"{tier.label}: {error}")
        return found

    async def expire_next(self, tier: KeptTier) -> int:
        """Inspect the next blocks of a tier; return how many were too old, and were removed.

        All blocks have their turn before the first one again.
        """
        part = list(islice(self._turns.get(tier.label, iter(())), self.slice_blocks))
        if not part:
            self._turns[tier.label] = iter(list(tier.names()))
            part = list(islice(self._turns[tier.label], self.slice_blocks))
        return await tier.expire(part)


class Keeping:
    """Executes what gateways order and announce about the blocks of a pool node.

    Args:
        facts: Told of purges; waited for, where a log has to have them.
        links: Has the transfers that a purge ends, and the layouts whose blocks are pinned.
        metrics: Count dropped blocks.
        settings: Times of bars, ages and rounds.
    """

    def __init__(
        self,
        tiers: KeptTiers,
        links: LinkRoom,
        metrics: PoolMetrics,
        facts: FactStream,
        settings: PoolSettings,
    ) -> None:
        self.tiers, self.rules = tiers, tiers.rules
        self._inbound, self._links, self._facts = links.inbound, links.links, facts
        self._dropped = metrics.blocks_dropped
        self._settings, self._clock_ns = settings, settings.clock_ns
        self._pinning = Pinning(tiers.store, links.layouts, settings.clock_ns)
        self._tasks: dict[asyncio.Task[None], str] = {}
        """Orders that are being executed, and their gateways."""

    def announced(
        self, gateway: str, ages: Mapping[str, int], shares: Mapping[str, Share] | None
    ) -> None:
        """A gateway has subscribed. What it announced holds until it subscribes again.

        Args:
            ages: Maximum ages of blocks by tag, seconds.
            shares: Shares of tenants by tag; None where shares are those of sites.
        """
        self.rules.announced(gateway, ages, shares or {})
        if shares is not None:
            self.tiers.follow_shares()
        self.tiers.follow_ages()

    def ordered(self, order: Order, gateway: str, answer: Callable[[Message], None]) -> None:
        """A gateway orders something, ends that, or counts blocks."""
        data = order.hashes
        hashes = None if data is None else frozenset(_split(data))
        scope = Scope(order.source, order.tenant, hashes)
        key, problem = (gateway, Effect.PURGE, scope), ""
        is_purge = order.effect == Effect.PURGE
        if not is_purge and (order.effect != Effect.PIN or data is None):
            problem = f"this pool node knows no order {order.effect!r} on {scope}; upgrade it"
        elif is_purge and not order.is_dry and not order.for_ns:
            answer(OrderDone(job=order.job, was_in_force=self.rules.end(key)))
            return
        elif sum(each == gateway for each in self._tasks.values()) >= WAITING_MAX:
            problem = f"{WAITING_MAX} orders wait already; try again"
        elif is_purge and not order.is_dry:
            until_ns = self._clock_ns() + min(order.for_ns, self._settings.purge_bar_ns)
            problem = self.rules.order(key, until_ns)
            if not problem and hashes is None:
                self.rules.purged(scope, self._settings.wall_s())
        if problem:
            answer(OrderDone(job=order.job, problem=problem))
        elif is_purge:
            self._execute(self._purge(order, scope, gateway), gateway, answer)
        else:
            self._execute(self._pinning.handle(order, gateway), gateway, answer)

    def expire(self) -> None:
        """End the orders whose time is over: bars that a gateway left behind, and pins."""
        for key in self.rules.expire(self._clock_ns()):
            gateway, effect, what = key
            if effect is Effect.PIN:
                self._pinning.over(key)
            else:
                log_event(log, logging.WARNING, "purge_not_ended", of=str(what), gateway=gateway)

    async def run(self) -> None:
        """Remove blocks that are too old, until cancelled."""
        async with asyncio.TaskGroup() as tasks:  # A tier that hangs does not delay another.
            for tier in self.tiers.all:
                tasks.create_task(self._follow(tier))

    async def _follow(self, tier: KeptTier) -> None:
        while True:
            await asyncio.sleep(self._settings.age_round_s)
            if self.rules.ages:
                self._dropped.labels(reason=TOO_OLD).inc(await self.tiers.expire_next(tier))

    def _execute(
        self,
        work: Coroutine[Any, Any, OrderDone],
        gateway: str,
        answer: Callable[[Message], None],
    ) -> None:
        async def run() -> None:
            answer(await work)

        task = asyncio.create_task(run())
        self._tasks[task] = gateway
        task.add_done_callback(self._tasks.pop)

    async def _purge(self, order: Order, scope: Scope, gateway: str) -> OrderDone:
        drop, num_transfers = not order.is_dry, None
        if drop and scope.hashes is None:
            if scope.tenant is not None:
                await self.tiers.destroy_keys(scope.tenant)
            matches = self.rules.matcher(scope)
            num_transfers = self._inbound.purge(scope.source)
            num_transfers += sum(link.purge(matches) for link in self._links.values())
        found = await self.tiers.walk(scope, drop=drop)
        num_blocks, what = len(found.names), str(scope)
        prefix = order.hashes[-HASH_BYTES:].hex() if order.hashes is not None else ""
        if drop:
            self._dropped.labels(reason=PURGED).inc(num_blocks)
            self._facts.report(
                PurgeDone(
                    gateway,
                    scope.source,
                    scope.tenant,
                    is_complete=not found.problem,
                    num_blocks=num_blocks,
                    num_bytes=sum(found.num_bytes.values()),
                    prefix=prefix,
                    num_transfers=num_transfers,
                )
            )
            if not await self._facts.kept():
                found.add_problem("the audit log cannot be written")
        fields = {
            "of": f"{what} {prefix}".rstrip(),
            "blocks": num_blocks,
            "transfers": num_transfers,
        }
        dry = "yes" if order.is_dry else None
        problem = found.problem
        log_event(log, logging.WARNING, "purged", **fields, dry_run=dry, problem=problem or None)
        return OrderDone(
            job=order.job,
            num_blocks=num_blocks,
            host_bytes=found.num_bytes[HOST],
            disk_bytes=found.num_bytes.get(DISK, 0),
            shared_bytes=found.num_bytes.get(SHARED, 0),
            num_transfers=num_transfers or 0,
            problem=problem[:_PROBLEM_CHARS_MAX],
        )


def _split(hashes: bytes) -> Iterator[bytes]:
    return (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
