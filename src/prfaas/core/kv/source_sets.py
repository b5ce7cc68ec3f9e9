"""Sets of sources that hold the same blocks, numbered.

Millions of blocks lie at a few hundred combinations of sources and tiers. Each combination is kept
once, as three bit masks, and a block only names its number. To forget all of a source is to clear
its bit in every combination; no block has to be touched.
"""

from __future__ import annotations

import numpy as np

from prfaas.core.kv.block_table import Values

Planes = tuple[int, int, int]
"""Sources that hold a block in each tier, as bits: host, disk, device."""
NOWHERE: Planes = (0, 0, 0)
ALL_TIERS = 7


class SourceSets:
    """Numbered combinations; number 0 is nowhere.

    Attributes:
        num_live: Blocks that somebody holds.
    """

    def __init__(self) -> None:
        self._planes: list[Planes] = [NOWHERE]
        self._anywhere: list[int] = [0]
        self._num_blocks: list[int] = [0]
        self._numbers: dict[Planes, int] = {NOWHERE: 0}
        self._free: list[int] = []
        self.num_live = 0

    def __len__(self) -> int:
        return len(self._planes) - len(self._free)

    def masks(self, tiers: int) -> list[int]:
        """Sources by number that hold a block in one of the tiers (flags)."""
        if tiers == ALL_TIERS:
            return self._anywhere
        return [
            (planes[0] if tiers & 1 else 0)
            | (planes[1] if tiers & 2 else 0)
            | (planes[2] if tiers & 4 else 0)
            for planes in self._planes
        ]

    def changed(self, number: int, source: int, tiers: int, *, added: bool) -> int:
        """Number of the combination with a source's tiers added or removed."""
        old, bit = self._planes[number], 1 << source
        host, disk, device = (bit if tiers & flag else 0 for flag in (1, 2, 4))
        if added:
            planes = old[0] | host, old[1] | disk, old[2] | device
        else:
            planes = old[0] & ~host, old[1] & ~disk, old[2] & ~device
        return self._number(planes)

    def holds(self, number: int, source: int) -> bool:
        """Return True if a source is in a combination."""
        return bool(self._anywhere[number] >> source & 1)

    def move(self, old: int, new: int, num_blocks: int) -> None:
        """Move blocks from one combination to another."""
        if old == new:
            return
        self._count(new, num_blocks)
        self._count(old, -num_blocks)

    def forget(self, source: int) -> None:
        """Take a source out of every combination."""
        keep = ~(1 << source)
        for number, planes in enumerate(self._planes):
            if self._anywhere[number] >> source & 1:
                self._planes[number] = left = planes[0] & keep, planes[1] & keep, planes[2] & keep
                self._anywhere[number] &= keep
                if left == NOWHERE:
                    self.num_live -= self._num_blocks[number]
        # Several numbers can mean the same; new blocks get the last of them.
        counted = zip(self._planes, self._num_blocks, strict=True)
        self._numbers = {planes: number for number, (planes, n) in enumerate(counted) if n}
        self._numbers[NOWHERE] = 0

    def canonical(self, numbers: Values) -> Values:
        """The number that stands for each combination; blocks are renumbered as they are moved."""
        found, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        kept = [self._numbers.setdefault(self._planes[n], n) for n in found.tolist()]
        for old, new, count in zip(found.tolist(), kept, counts.tolist(), strict=True):
            self.move(old, new, count)
        return np.array(kept, np.uint32)[place]

    def _count(self, number: int, change: int) -> None:
        if number == 0:
            return
        self._num_blocks[number] += change
        if self._anywhere[number]:
            self.num_live += change
        if self._num_blocks[number] == 0 and change < 0:
            self._release(number)

    def _release(self, number: int) -> None:
        planes = self._planes[number]
        if self._numbers.get(planes) == number:
            del self._numbers[planes]
        self._planes[number], self._anywhere[number] = NOWHERE, 0
        self._free.append(number)

    def _number(self, planes: Planes) -> int:
        number = self._numbers.get(planes)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number = len(self._planes)
                self._planes.append(NOWHERE)
                self._anywhere.append(0)
                self._num_blocks.append(0)
            self._planes[number] = planes
            self._anywhere[number] = planes[0] | planes[1] | planes[2]
            self._numbers[planes] = number
        return number
