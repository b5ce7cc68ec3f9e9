"""Contents of a shared tier, which are shown while the tier is up: a breaker decides that."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Generic, Protocol, TypeVar

from prfaas.core.cache.keep_rules import Origin, Scope
from prfaas.core.kv.blocks import BlockName
from prfaas.core.resilience.circuit_breaker import Breaker, BreakerSettings
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.write_queue import SealingWriter
from prfaas.pool.store.origins import sliced
from prfaas.pool.store.tier_ports import LowerTier, StoredBlock, TierOwner

log = logging.getLogger(__name__)

BREAKER = BreakerSettings(failures_max=3)
ALTERED_MAX = 32
"""Blocks that are altered in a row until the tier counts as failing: fewer are damaged objects, and
blocks of other objects can still be read."""


class TierHealth:
    """State of a shared tier: its blocks are shown, or not.

    The tier goes down when its breaker opens, and comes up when a request succeeds after that.

    Args:
        blocks: Names of the blocks that the tier has.
        owner: The store above, which is told of blocks while the tier is up.

    Attributes:
        hurry: Set when the tier should be asked soon: it went down.
    """

    def __init__(
        self,
        tier: LowerTier,
        blocks: Iterable[BlockName],
        owner: TierOwner,
        metrics: PoolMetrics,
    ) -> None:
        self._tier, self._blocks, self._owner = tier, blocks, owner
        self._metrics = metrics
        self._breaker = Breaker(BREAKER)
        self.is_up = True
        self.hurry = asyncio.Event()
        self._num_altered = 0
        metrics.shared_up.set(1)

    @property
    def may_ask(self) -> bool:
        """Return True if a background request may be sent now."""
        return self.is_up or self._breaker.allows(time.monotonic_ns())

    def began(self) -> None:
        """A background request was sent."""
        self._breaker.began(time.monotonic_ns())

    def read(self) -> None:
        """A read for an engine succeeded. It may have begun before the tier went down."""
        if self.is_up:
            self._breaker.succeeded(time.monotonic_ns())

    def opened(self) -> None:
        """A block is what was stored."""
        self._num_altered = 0

    def altered(self, why: str) -> None:
        """A block is not what was stored, or not whole, in two answers."""
        self._num_altered += 1
        if self._num_altered >= ALTERED_MAX:
            self._num_altered = 0
            while self.is_up:
                self.failed(why)

    def failed(self, why: str) -> None:
        """A request failed."""
        self._breaker.failed(time.monotonic_ns())
        if self.is_up and not self._breaker.allows(time.monotonic_ns()):
            self.is_up = False
            self._metrics.shared_up.set(0)
            log.error("shared tier: it fails, its blocks are misses for now: %s", why)
            self._owner.gone_below(list(self._blocks))
            self.hurry.set()

    def succeeded(self) -> None:
        """A background request succeeded."""
        self._breaker.succeeded(time.monotonic_ns())
        if not self.is_up and self._breaker.allows(time.monotonic_ns()):
            self.is_up = True
            self._metrics.shared_up.set(1)
            log.warning("shared tier: it answers again")
            self.found(list(self._blocks))

    def found(self, names: Collection[BlockName]) -> None:
        """Blocks can be read from now on, if the tier is up."""
        if self.is_up and names:
            self._owner.found_below(self._tier, names)

    def gone(self, names: Collection[BlockName]) -> None:
        """Blocks cannot be read any more."""
        if self.is_up and names:
            self._owner.gone_below(names)


class ShownBlock(Protocol):
    """A block of the tier."""

    @property
    def num_bytes(self) -> int:
        """Size of the block."""

    @property
    def origin(self) -> Origin:
        """Its origin."""


E = TypeVar("E", bound=ShownBlock)
E_co = TypeVar("E_co", bound=ShownBlock, covariant=True)


class Contents(Protocol[E_co]):
    """Blocks that a node knows of."""

    def __len__(self) -> int: ...
    def __contains__(self, name: BlockName) -> bool: ...
    def __iter__(self) -> Iterator[BlockName]: ...
    def __getitem__(self, name: BlockName) -> E_co: ...
    def get(self, name: BlockName) -> E_co | None:
        """The entry; None if it is unknown."""

    def validate(self) -> None:
        """Check that the sums hold."""


class ShownBlocks(ABC, Generic[E]):
    """Look-ups, offers and counts, which every shared tier has in common."""

    _blocks: Contents[E]
    _writer: SealingWriter
    _health: TierHealth
    _hosts: Set[str]

    def __len__(self) -> int:
        return len(self._blocks) if self._health.is_up else 0

    def __contains__(self, name: BlockName) -> bool:
        return self._health.is_up and name in self._blocks

    def names(self) -> Iterator[BlockName]:
        """Blocks that can be read."""
        return iter(self._blocks if self._health.is_up else ())

    def num_bytes(self, name: BlockName) -> int:
        """Size of a block."""
        return self._blocks[name].num_bytes

    def origin(self, name: BlockName) -> Origin:
        """Origin of a block, if it is known."""
        return self._blocks[name].origin

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block to be written.

        Returns:
            False if it is not written: it is there, another node of the site writes it, or the
            queue is full (counted).
        """
        if name in self._blocks or name in self._writer or block.origin.via in self._hosts:
            return False
        return self._writer.offer(name, block, done)

    async def count(self, scope: Scope) -> tuple[set[BlockName], int]:
        """Blocks of a scope, also those that its source wrote; and their bytes."""
        found, num_bytes = set[BlockName](), 0
        for part in sliced(list(self._blocks)):
            for name in part:
                entry = self._blocks.get(name)
                if entry is not None and scope.has(name) and self._is_of(entry, scope):
                    found.add(name)
                    num_bytes += entry.num_bytes
            await asyncio.sleep(0)
        return found, num_bytes

    is_written_in_advance = False

    def missed(self) -> None:
        """No block waits for it in memory."""

    def validate(self) -> None:
        """Check the index, and the blocks that wait; AssertionError if they do not hold."""
        self._blocks.validate()
        self._writer.validate()

    @abstractmethod
    def _is_of(self, entry: E, scope: Scope) -> bool:
        """Return True if the origin of a block is of a scope, or its source wrote it."""
