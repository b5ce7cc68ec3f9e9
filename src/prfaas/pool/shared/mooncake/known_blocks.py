"""Blocks that a pool node knows to be in the store: what it wrote, and what it asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from prfaas.core.cache.eviction import NOT_READ_S
from prfaas.core.cache.keep_rules import Origin
from prfaas.core.invariants import require
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.store.origins import UNKNOWN

KNOWN_MAX = 1_000_000
"""Blocks that are known: about a third of a KiB each."""


NOT_READ = replace(UNKNOWN, born_s=NOT_READ_S)


class Known(NamedTuple):
    """A block in the store."""

    num_bytes: int
    origin: Origin = NOT_READ
    """Its origin; NOT_READ until it is read, unless this node wrote it."""
    is_own: bool = False
    """True if this node wrote it."""


class KnownBlocks:
    """Blocks, those first that were not checked for longest.

    Args:
        blocks_max: Limit of blocks; the first is forgotten for another one.
    """

    def __init__(self, blocks_max: int = KNOWN_MAX) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[BlockName, Known] = OrderedDict()
        self.own_bytes = 0
        """Bytes of blocks that this node wrote."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._blocks

    def __iter__(self) -> Iterator[BlockName]:
        return iter(self._blocks)

    def __getitem__(self, name: BlockName) -> Known:
        return self._blocks[name]

    def get(self, name: BlockName) -> Known | None:
        """A block; None if it is not known."""
        return self._blocks.get(name)

    def set(self, name: BlockName, known: Known) -> list[BlockName]:
        """Add a block, or replace what is known of it; returns blocks that were forgotten for
        it."""
        self.remove([name])
        self._blocks[name] = known
        self.own_bytes += known.num_bytes * known.is_own
        return self.remove([next(iter(self))]) if len(self) > self._blocks_max else []

    def checked(self, name: BlockName) -> None:
        """A block is in the store at present."""
        self._blocks.move_to_end(name)

    def remove(self, names: Iterable[BlockName]) -> list[BlockName]:
        """Forget blocks; return those that were known."""
        gone = []
        for name in names:
            known = self._blocks.pop(name, None)
            if known is not None:
                self.own_bytes -= known.num_bytes * known.is_own
                gone.append(name)
        return gone

    def validate(self) -> None:
        """Check the bytes that this node wrote; AssertionError if they do not add up."""
        own = sum(known.num_bytes for known in self._blocks.values() if known.is_own)
        require(self.own_bytes == own, "bytes of this node")

    def first(self, number: int) -> list[BlockName]:
        """Blocks that were not checked for longest."""
        return list(islice(self._blocks, number))

    def spread(self, number: int) -> list[BlockName]:
        """Some blocks, from everywhere."""
        names = list(self._blocks)
        return names[:: max(1, len(names) // number)][:number]
