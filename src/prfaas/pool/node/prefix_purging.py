"""Purges of the blocks of one prompt, by their hashes, at a pool node.

A block goes from memory, disk and the tier of the site, whatever its layout and cache group. Its
name is barred until the purge is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import HASH_BYTES, BlockName
from prfaas.core.transfer.facts import PurgeDone
from prfaas.errors import ConfigError, TransferError
from prfaas.logs import log_event
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.origins import PURGED, Origin, sliced
from prfaas.pool.store.tier_ports import LowerTier, SharedTier
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.gateway import Purged, PurgeEnded, PurgePrefix

log = logging.getLogger(__name__)


BARS_MAX = 256
"""Purges that have not ended; more are refused."""


def refused(job: int) -> Purged:
    """Return the answer to a purge of a gateway that has not ended earlier ones."""
    return Purged(
        job=job,
        num_blocks=0,
        host_bytes=0,
        disk_bytes=0,
        num_transfers=0,
        problem=f"{BARS_MAX} purges of this gateway have not ended",
    )


class PrefixPurging:
    """The purges of prompts at one pool node; one of each gateway at a time.

    Args:
        store: Blocks in memory.
        disk: The disk tier; None without.
        shared: The tier of the site; None without.
        metrics: Count dropped blocks.
        bar_ns: Time limit of a bar, ns.
    """

    def __init__(
        self,
        store: BlockStore,
        disk: DiskTier | None,
        shared: SharedTier | None,
        metrics: PoolMetrics,
        facts: FactStream,
        clock_ns: Callable[[], int],
        bar_ns: int,
    ) -> None:
        self._store, self._disk, self._shared = store, disk, shared
        self._metrics, self._facts = metrics, facts
        self._clock_ns, self._bar_ns = clock_ns, bar_ns
        self._bars: dict[tuple[str, frozenset[bytes]], int] = {}
        """Hashes that are not taken, by which gateway's wish, and until when."""
        self._tasks: set[asyncio.Task[None]] = set()

    def asked(self, message: PurgePrefix, gateway: str, answer: Callable[[Message], None]) -> None:
        """A gateway begins a purge, or ends it."""
        data = message.hashes
        hashes = frozenset(data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES))
        if message.is_over:
            bar = self._bars.pop((gateway, hashes), None)
            self._bar()
            answer(PurgeEnded(job=message.job, was_barred=bar is not None))
            return
        if not message.is_dry:
            if len(self._bars) >= BARS_MAX and (gateway, hashes) not in self._bars:
                answer(refused(message.job))
                return
            self._bars[gateway, hashes] = self._clock_ns() + self._bar_ns
            self._bar()
        task = asyncio.create_task(self._purge(message, hashes, gateway, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def expire(self) -> None:
        """End the bars that a gateway left behind."""
        now = self._clock_ns()
        for name in [name for name, until_ns in self._bars.items() if now >= until_ns]:
            del self._bars[name]
            self._bar()
            log_event(log, logging.WARNING, "purge_not_ended", of="prefix", gateway=name[0])

    def _bar(self) -> None:
        self._store.bar_hashes(frozenset().union(*(hashes for _, hashes in self._bars)))

    async def _purge(
        self,
        message: PurgePrefix,
        hashes: frozenset[bytes],
        gateway: str,
        answer: Callable[[Message], None],
    ) -> None:
        def matches(origin: Origin) -> bool:
            return origin.tenant in ("", message.tenant)

        problem = ""
        names, host_bytes = await self._in_memory(matches, hashes, drop=not message.is_dry)
        sizes = {}
        for tier in (self._disk, self._shared):
            there = [] if tier is None else await _named(tier, hashes, matches)
            sizes[tier] = 0 if tier is None else sum(tier.num_bytes(each) for each in there)
            names |= set(there)
            if tier is None or message.is_dry:
                continue
            try:
                await tier.drop_named(hashes, matches)
            except (OSError, ConfigError, TransferError) as error:
                problem = f"{problem}; {tier.label}: {error}".removeprefix("; ")
        prefix = message.hashes[-HASH_BYTES:].hex()
        if not message.is_dry:
            self._metrics.blocks_dropped.labels(reason=PURGED).inc(len(names))
            num_bytes, is_complete = host_bytes + sum(sizes.values()), not problem
            self._facts.report(
                PurgeDone(gateway, "", message.tenant, is_complete, len(names), num_bytes, prefix)
            )
            if not await self._facts.kept():
                problem = f"{problem}; the audit log cannot be written".removeprefix("; ")
        dry = "yes" if message.is_dry else None
        fields = {"of": f"prefix {prefix}", "blocks": len(names), "dry_run": dry}
        log_event(log, logging.WARNING, "purged", **fields, problem=problem or None)
        answer(
            Purged(
                job=message.job,
                num_blocks=len(names),
                host_bytes=host_bytes,
                disk_bytes=sizes[self._disk] if self._disk is not None else 0,
                shared_bytes=sizes[self._shared] if self._shared is not None else 0,
                num_transfers=0,
                problem=problem[:400],
            )
        )

    async def _in_memory(
        self, matches: Callable[[Origin], bool], hashes: frozenset[bytes], *, drop: bool
    ) -> tuple[set[BlockName], int]:
        found, num_bytes = set[BlockName](), 0
        for names in sliced(self._store.in_memory()):
            named = [name for name in names if name[1].block_hash in hashes]
            part, size = self._store.count(matches, named)
            found |= part
            num_bytes += size
            if drop:
                self._store.drop(part)
            await asyncio.sleep(0)
        return found, num_bytes


async def _named(
    tier: LowerTier, hashes: Collection[bytes], matches: Callable[[Origin], bool]
) -> list[BlockName]:
    """Blocks of a tier with some hashes; other work continues in the meantime."""
    found: list[BlockName] = []
    for names in sliced(list(tier.names())):
        there = (name for name in names if name[1].block_hash in hashes and name in tier)
        found += [name for name in there if matches(tier.origin(name))]
        await asyncio.sleep(0)
    return found
