"""A bucket in memory, for tests and benchmarks that need many objects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from prfaas.pool.shared.bucket import PAGE, GoneError


class MemoryBucket:
    """Objects by path.

    Attributes:
        objects: Their bytes.
        requests: Number of requests by method.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()

    async def list(
        self, limit_s: float, under: str = ""
    ) -> AsyncIterator[Sequence[tuple[str, int]]]:
        """All objects, in the order in which they were written."""
        paths = [path for path in self.objects if path.startswith(under)]
        for start in range(0, len(paths), PAGE):
            self.requests["list"] += 1
            await asyncio.sleep(0)
            yield [(path, len(self.objects[path])) for path in paths[start : start + PAGE]]

    async def read(self, path: str, start: int, num_bytes: int, limit_s: float) -> memoryview:
        """Part of an object."""
        self.requests["read"] += 1
        if path not in self.objects:
            raise GoneError(path)
        return memoryview(self.objects[path])[start : start + num_bytes]

    async def write(self, path: str, data: bytes, limit_s: float) -> None:
        """Write an object."""
        self.requests["write"] += 1
        self.objects[path] = data

    async def delete(self, paths: Sequence[str], limit_s: float) -> None:
        """Delete objects."""
        self.requests["delete"] += 1
        for path in paths:
            self.objects.pop(path, None)
