"""Contents of a shared tier, which are shown while the tier is up."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Generic, Protocol, TypeVar

from prfaas.core.cache.keep_rules import Origin, Scope
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.shared.health import TierHealth
from prfaas.pool.shared.write_queue import SealingWriter
from prfaas.pool.store.origins import sliced
from prfaas.pool.store.tier_ports import StoredBlock


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
    _on_found: Callable[[Iterable[BlockName]], None]
    _on_gone: Callable[[Iterable[BlockName]], None]

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
        """Check the index, and the blocks that wait.

        Raises:
            AssertionError: They do not hold.
        """
        self._blocks.validate()
        self._writer.validate()

    @abstractmethod
    def _is_of(self, entry: E, scope: Scope) -> bool:
        """Return True if the origin of a block is of a scope, or its source wrote it."""

    def _went_down(self) -> None:
        self._on_gone(list(self._blocks))

    def _came_up(self) -> None:
        self._on_found(list(self._blocks))
