"""Packs in the bucket of a site, as last listed, and the limits of this node's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence, Set

from prfaas.errors import TransferError
from prfaas.pool.shared.bucket import Bucket
from prfaas.pool.shared.packs import PackName, name_in
from prfaas.pool.shared.purge_marks import FOLDER

PACKS_MAX = 100_000
"""Packs of a site that are known: the newest. A node deletes its own among the others."""
LISTS = 3
"""Lists that may still have what was deleted, as of a server that is late."""
DELETES = 500
"""Packs that are deleted by one request."""


class PackList:
    """Names and sizes of packs: those last listed, and those written since.

    Args:
        pool: Name of this pool node.
        capacity_bytes: Limit of the packs that it has written.
        packs_max: Limit of the packs of all nodes.
    """

    def __init__(
        self, bucket: Bucket, pool: str, capacity_bytes: int, packs_max: int = PACKS_MAX
    ) -> None:
        self._bucket, self._pool, self._packs_max = bucket, pool, packs_max
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """Bytes of the packs that this node has written."""
        self.num_ignored = 0
        """Packs of the last list that are beyond the limit of packs."""
        self.marks: list[str] = []
        """Paths of the marks of purges of the last list."""
        self._sizes: dict[PackName, int] = {}
        self._excess: list[PackName] = []
        """Packs of this node that are beyond the limit of packs."""

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[PackName]:
        return iter(self._sizes)

    def add(self, name: PackName, num_bytes: int) -> None:
        """A pack is in the bucket."""
        if name not in self._sizes and name.writer == self._pool:
            self.used_bytes += num_bytes
        self._sizes[name] = num_bytes

    async def refresh(self, limit_s: float) -> list[PackName]:
        """List the bucket. Sorting and comparing run on a thread.

        Args:
            limit_s: Limit of each request, seconds.

        Returns:
            Packs that are not in it any more. Those written since the list began are kept.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        known, found, num_ignored = set(self._sizes), dict[PackName, int](), 0
        excess: list[PackName] = []
        marks: list[str] = []
        async for part in self._bucket.list(limit_s):
            for path, size in part:
                name = name_in(path)
                if name is not None:
                    found[name] = size
                elif path.startswith(f"{FOLDER}/"):
                    marks.append(path)
            if len(found) > 2 * self._packs_max:
                num_ignored += await asyncio.to_thread(self._trim, found, excess)
        num_ignored += await asyncio.to_thread(self._trim, found, excess)
        gone, new = await asyncio.to_thread(_differences, known, found)
        for name in gone:
            self._remove(name)
        for name in new:
            self.add(name, found[name])
        self.num_ignored, self._excess, self.marks = num_ignored, excess, marks
        return gone

    async def newest_first(self, layouts: Set[bytes], skipped: Set[PackName]) -> list[PackName]:
        """Packs of some layouts."""
        return await asyncio.to_thread(_newest_first, list(self._sizes), layouts, skipped)

    def beyond_limits(self) -> list[PackName]:
        """The oldest packs of this node that have to be deleted."""
        over = self.used_bytes - self.capacity_bytes
        victims = list(self._excess)
        if over > 0:
            own = [name for name in self._sizes if name.writer == self._pool]
            for name in sorted(own, key=_age):
                if over <= 0:
                    break
                victims.append(name)
                over -= self._sizes[name]
        return victims

    async def delete(self, packs: Sequence[PackName], limit_s: float) -> None:
        """Delete packs.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        for start in range(0, len(packs), DELETES):
            part = packs[start : start + DELETES]
            await self._bucket.delete([name.path for name in part], limit_s)
            for name in part:
                self._remove(name)

    async def destroy(self, packs: Sequence[PackName], limit_s: float, pause_s: float) -> None:
        """Delete packs, and list the bucket again: that they are gone is not the server's word.

        Args:
            packs: Victims of a purge.
            limit_s: Limit of each request, seconds.
            pause_s: Wait before another list, seconds.

        Raises:
            TransferError: The server failed, did not answer in time, or still lists some.
        """
        await self.delete(packs, limit_s)
        left: Set[PackName] = set(packs)
        for attempt in range(LISTS if left else 0):
            await asyncio.sleep(pause_s if attempt else 0)
            await self.refresh(limit_s)
            left &= self._sizes.keys()
            if not left:
                return
        if left:
            raise TransferError(
                f"the bucket has answered that {len(packs)} packs were deleted, and still lists "
                f"{len(left)} of them"
            )

    def _remove(self, name: PackName) -> None:
        size = self._sizes.pop(name, None)
        if size is not None and name.writer == self._pool:
            self.used_bytes -= size

    def _trim(self, found: dict[PackName, int], excess: list[PackName]) -> int:
        """Remove the oldest packs beyond the limit; return their number."""
        oldest = sorted(found, key=_age)[: max(0, len(found) - self._packs_max)]
        for name in oldest:
            del found[name]
        excess += [name for name in oldest if name.writer == self._pool]
        return len(oldest)


def _age(name: PackName) -> tuple[int, str]:
    return name.at_ms, name.random


def _differences(
    known: Set[PackName], found: dict[PackName, int]
) -> tuple[list[PackName], list[PackName]]:
    """Names that are gone, and names that are new."""
    return [name for name in known if name not in found], [n for n in found if n not in known]


def _newest_first(
    names: Iterable[PackName], layouts: Set[bytes], skipped: Set[PackName]
) -> list[PackName]:
    some = [name for name in names if name.layout_id in layouts and name not in skipped]
    return sorted(some, key=_age, reverse=True)
