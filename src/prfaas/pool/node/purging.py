"""Purges: drop the blocks of a defective pool or of a tenant until all engines are reset.

    gateway ──Purge──► every pool node      drops, ends transfers, takes nothing more of the source
    gateway ──reset──► every engine         forgets what it holds in its own memory
    gateway ──PurgeEnd──► every pool node   takes blocks of the source again

Between the first and the last step no engine can store here what it computed from such blocks, and
none finds any. A gateway that dies in between leaves a bar, which ends by itself after a time; the
same purge sent again does the rest. The answer to the last step tells the gateway if the bar had
ended before, as of a pool node that was restarted meanwhile.

Of a tenant, its keys on disk are destroyed first, in one atomic step: from then on a crash cannot
bring its blocks back. They are destroyed once more at the end, with what was written meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import BlockName
from prfaas.core.transfer.facts import PurgeDone
from prfaas.errors import ConfigError, TransferError
from prfaas.logs import log_event
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.prefix_purging import BARS_MAX, PrefixPurging, refused
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.origins import PURGED, Matches, Origin, Scope, sliced
from prfaas.pool.store.purge_times import PurgeTimes
from prfaas.pool.store.tier_ports import SharedTier
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.gateway import Purge, Purged, PurgeEnd, PurgeEnded, PurgePrefix

log = logging.getLogger(__name__)

_PROBLEM_CHARS_MAX = 400


class Purging:
    """The purges of one pool node.

    Args:
        pool: Its name: everything it holds is of itself.
        store: Blocks in memory.
        disk: The disk tier; None without.
        shared: The tier of the site; None without.
        metrics: Count dropped blocks.
        bar_ns: Time limit of a bar, ns.
    """

    def __init__(
        self,
        pool: str,
        store: BlockStore,
        disk: DiskTier | None,
        shared: SharedTier | None,
        inbound: InboundTransfers,
        links: Mapping[str, OutboundLink],
        metrics: PoolMetrics,
        clock_ns: Callable[[], int],
        facts: FactStream,
        bar_ns: int,
        wall_s: Callable[[], float],
    ) -> None:
        self._bar_ns, self._wall_s = bar_ns, wall_s
        self._times = PurgeTimes(pool)
        self._facts = facts
        self._pool, self._store, self._disk, self._shared = pool, store, disk, shared
        self._inbound, self._links, self._metrics = inbound, links, metrics
        self._clock_ns = clock_ns
        self._bars: dict[tuple[Scope, str], int] = {}
        """Scopes of which nothing is taken, by which gateway's wish, and until when."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefixes = PrefixPurging(store, disk, shared, metrics, facts, clock_ns, bar_ns)
        store.bar(self.is_barred)

    def is_barred(self, origin: Origin) -> bool:
        """Return True if blocks of an origin are not taken at present."""
        return any(scope.covers(origin, self._pool) for scope, _ in self._bars)

    def asked(
        self,
        message: Purge | PurgeEnd | PurgePrefix,
        gateway: str,
        answer: Callable[[Message], None],
    ) -> None:
        """A gateway begins a purge, or ends it."""
        if isinstance(message, PurgePrefix):
            self._prefixes.asked(message, gateway, answer)
            return
        scope = Scope(message.source, message.tenant)
        if isinstance(message, PurgeEnd):
            bar = self._bars.pop((scope, gateway), None)
            answer(PurgeEnded(job=message.job, was_barred=bar is not None))
            return
        if not message.is_dry:
            num_bars = sum(each == gateway for _, each in self._bars)
            if num_bars >= BARS_MAX and (scope, gateway) not in self._bars:
                answer(refused(message.job))
                return
            self._bars[scope, gateway] = self._clock_ns() + self._bar_ns
            self._times.note(scope, self._wall_s())
            self._store.refuse(self._times.is_before)
        task = asyncio.create_task(self._purge(message, scope, gateway, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def expire(self) -> None:
        """End the bars that a gateway left behind."""
        self._prefixes.expire()
        now = self._clock_ns()
        for name, until_ns in list(self._bars.items()):
            if now >= until_ns:
                del self._bars[name]
                log_event(log, logging.WARNING, "purge_not_ended", of=str(name[0]), gateway=name[1])

    async def _purge(
        self, message: Purge, scope: Scope, gateway: str, answer: Callable[[Message], None]
    ) -> None:
        def matches(origin: Origin) -> bool:
            return scope.covers(origin, self._pool)

        num_transfers = 0
        if not message.is_dry:
            await self._destroy_keys(scope)  # A problem of it shows when it is done again.
            num_transfers = self._inbound.purge(scope.source)
            num_transfers += sum(link.purge(matches) for link in self._links.values())
        in_memory, host_bytes = await self._in_memory(matches, drop=not message.is_dry)
        on_disk, disk_bytes, problem = await self._on_disk(scope, matches, drop=not message.is_dry)
        shared, shared_bytes, problem = await self._in_shared(message, scope, problem)
        num_blocks = len(in_memory | on_disk | shared)
        if not message.is_dry:
            self._metrics.blocks_dropped.labels(reason=PURGED).inc(num_blocks)
            num_bytes = host_bytes + disk_bytes + shared_bytes
            self._facts.report(
                PurgeDone(
                    gateway,
                    scope.source,
                    scope.tenant,
                    is_complete=not problem,
                    num_blocks=num_blocks,
                    num_bytes=num_bytes,
                    num_transfers=num_transfers,
                )
            )
            if not await self._facts.kept():
                problem = _joined(problem, "the audit log cannot be written")
        purged = Purged(
            job=message.job,
            num_blocks=num_blocks,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            shared_bytes=shared_bytes,
            num_transfers=num_transfers,
            problem=problem[:_PROBLEM_CHARS_MAX],
        )
        fields = {"of": str(scope), "blocks": num_blocks, "transfers": num_transfers}
        dry = "yes" if message.is_dry else None
        log_event(log, logging.WARNING, "purged", **fields, dry_run=dry, problem=problem or None)
        answer(purged)

    async def _in_memory(self, matches: Matches, *, drop: bool) -> tuple[set[BlockName], int]:
        """Count or drop blocks in memory; links and engines are served meanwhile."""
        found, num_bytes = set[BlockName](), 0
        for names in sliced(self._store.in_memory()):
            part, size = self._store.count(matches, names)
            found |= part
            num_bytes += size
            if drop:
                self._store.drop(part)
            await asyncio.sleep(0)
        return found, num_bytes

    async def _destroy_keys(self, scope: Scope) -> str:
        """Destroy the keys of a tenant on disk; return why not."""
        if self._disk is None or scope.tenant is None:
            return ""
        try:
            await self._disk.destroy_keys(scope.tenant)
        except OSError as error:
            return f"disk: the tenant's keys: {error}"
        return ""

    async def _on_disk(
        self, scope: Scope, matches: Matches, *, drop: bool
    ) -> tuple[set[BlockName], int, str]:
        """Count or drop blocks on disk, and why not all were dropped for good."""
        if self._disk is None:
            return set(), 0, ""
        if not drop:
            return *await self._disk.count(matches), ""
        found, num_bytes = await self._disk.drop(matches)
        problem = await self._destroy_keys(scope)
        try:
            if scope.tenant is None or not self._disk.is_sealed or problem:
                await self._disk.erase(matches)
        except (OSError, ConfigError) as error:
            return found, num_bytes, _joined(problem, f"disk: {error}")
        return found, num_bytes, problem

    async def _in_shared(
        self, message: Purge, scope: Scope, problem: str
    ) -> tuple[set[BlockName], int, str]:
        """Count or drop blocks of the shared tier, and why not all were dropped."""
        if self._shared is None:
            return set(), 0, problem
        found, num_bytes = await self._shared.count(scope)
        try:
            if not message.is_dry:
                await self._shared.drop(scope)
        except TransferError as error:
            problem = _joined(problem, f"shared tier: {error}")
        return found, num_bytes, problem


def _joined(*problems: str) -> str:
    return "; ".join(filter(None, problems))
