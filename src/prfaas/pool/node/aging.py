"""Blocks that are too old: which ones a pool node misses, and their removal from all tiers.

Each round inspects the next blocks of each tier, SLICE at most, whatever the node holds. A block
that is too old and was not inspected yet is missed by every look-up (`store/block_store.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from prfaas.core.cache.eviction import MaxAges
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.origins import SLICE, Origin
from prfaas.pool.store.tier_ports import LowerTier, SharedTier
from prfaas.wire.messages.gateway import Subscribe

TOO_OLD = "too_old"
"""Reason for which blocks are dropped."""


class Aging:
    """Maximum ages at one pool node, as gateways announce them.

    Args:
        store: Blocks in memory.
        disk: The disk tier; None without.
        shared: The tier of the site; None without.
        claims: Returns True if a gateway may set the age of a tag.
        metrics: Count dropped blocks.
        round_s: Time between rounds, seconds.
        slice_blocks: Blocks of each tier that a round inspects.
    """

    def __init__(
        self,
        store: BlockStore,
        disk: DiskTier | None,
        shared: SharedTier | None,
        claims: Callable[[str, str], bool],
        metrics: PoolMetrics,
        wall_s: Callable[[], float],
        round_s: float,
        slice_blocks: int = SLICE,
    ) -> None:
        self._store, self._disk, self._claims = store, disk, claims
        self._lower: list[LowerTier] = [tier for tier in (disk, shared) if tier is not None]
        self._wall_s, self._slice, self._round_s = wall_s, slice_blocks, round_s
        self._dropped = metrics.blocks_dropped.labels(reason=TOO_OLD)
        self._by_gateway: dict[str, dict[str, int]] = {}
        self._ages = MaxAges()
        self._turns: dict[int, Iterator[BlockName]] = {}
        """Blocks of each tier that are still to be inspected."""

    def announced(self, gateway: str, message: Subscribe) -> None:
        """A gateway has subscribed. What it announced holds until it subscribes again."""
        self._by_gateway[gateway] = {
            tag: age for tag, age in message.ages.items() if self._claims(gateway, tag)
        }
        self._ages = MaxAges(self._by_gateway.values())
        self._store.rules.age(self.is_over if self._ages else None)
        if self._disk is not None:
            self._disk.keep_apart(self._ages.tags)

    def is_over(self, origin: Origin) -> bool:
        """Return True if blocks of an origin are too old."""
        return self._ages.is_over(origin.tenant, origin.born_s, self._wall_s())

    async def run(self) -> None:
        """Remove blocks that are too old, until cancelled."""
        async with asyncio.TaskGroup() as tasks:  # A tier that hangs does not delay another.
            for tier in (None, *self._lower):
                tasks.create_task(self._follow(tier))

    async def _follow(self, tier: LowerTier | None) -> None:
        while True:
            await asyncio.sleep(self._round_s)
            if self._ages:
                await self.round(tier)

    async def round(self, tier: LowerTier | None = None) -> int:
        """Inspect the next blocks of memory or of a lower tier; return how many were removed."""
        if tier is None:
            old, _ = self._store.count(self.is_over, self._next(0, self._store.in_memory))
            self._store.drop(old)
            num_old = len(old)
        else:
            num_old = await tier.expire(self.is_over, self._next(id(tier), tier.names))
        self._dropped.inc(num_old)
        return num_old

    def _next(self, tier: int, names: Callable[[], Iterable[BlockName]]) -> list[BlockName]:
        """The next blocks of a tier: all of them have their turn before the first one again."""
        part = list(islice(self._turns.get(tier, iter(())), self._slice))
        if not part:
            self._turns[tier] = iter(list(names()))
            part = list(islice(self._turns[tier], self._slice))
        return part
