"""Usable prefixes of pages of which some pools hold one part each.

SGLang's pools besides that of attention need either every page of a prefix, or only its last ones,
as a recurrent state does. A prefix can be restored if every pool can restore it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolHits:
    """Pages that a pool besides attention has.

    Attributes:
        has: For each page whether the pool has it.
        trailing: The last pages of a prefix that are needed; 0 if all are.
    """

    has: Sequence[bool]
    trailing: int = 0

    def restorable(self, num_pages: int) -> set[int]:
        """Lengths, pages, up to `num_pages` that this pool can restore."""
        if not self.trailing:
            return set(range(1, leading(self.has[:num_pages]) + 1))
        found, run = set[int](), 0
        for length, has in enumerate(self.has[:num_pages], start=1):
            run = run + 1 if has else 0
            if run >= min(self.trailing, length):
                found.add(length)
        return found


@dataclass(frozen=True, slots=True)
class SglangPrefixHits:
    """Result of a query, as SGLang's `PoolTransferResult` has it.

    Attributes:
        num_pages: The longest prefix that all pools can restore.
        by_pool: The longest that each can, 0 left out; a pool that was not reached is left out.
        restorable: All lengths that all pools can restore.
    """

    num_pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def leading(flags: Sequence[bool]) -> int:
    """Return the number of leading True."""
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))


def prefix_hits(has: Sequence[bool], name: str, others: Mapping[str, PoolHits]) -> SglangPrefixHits:
    """Return the prefixes that can be restored.

    Args:
        has: For each page whether attention has it.
        name: Name of the pool of attention.
        others: The other pools that are needed.

    References:
        SGLang 0.5.23, `HiCacheFile.batch_exists_v2`.
    """
    num = leading(has)
    by_pool = {name: num} if num else {}
    restorable = list(range(1, num + 1))
    for other, hits in others.items():
        if not restorable:
            break
        found = hits.restorable(num)
        if found:
            by_pool[other] = max(found)
        restorable = [length for length in restorable if length in found]
    return SglangPrefixHits(restorable[-1] if restorable else 0, by_pool, restorable)
