"""An instance's side of its pool node, as SGLang has it: storage threads that call and wait.

The same calls as those of the backend for SGLang (`sglang/pool_calls.py`): a page is looked up when
a request comes, and stored behind its prefill. Requests carry no orders: nothing is pushed, and
nothing in transit is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prfaas.core.kv.blocks import BlockKey, Layout
from prfaas.engines.lineage import Lineage
from prfaas.engines.orders import Order
from prfaas.engines.sglang.pool_calls import PoolCalls
from prfaas.engines.timing.blocks import NewBlock, PrefixNames, Rows
from prfaas.tasks import cancel_all

PAGES_MAX = 128
"""Pages of one call, as SGLang's storage threads move them."""
WAIT_S = 2.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Backup:
    """Pages to store, with the pools that they are of, and the number of resets by then."""

    blocks: list[NewBlock]
    sources: set[str]
    era: int


class PageTier:
    """SGLang's storage threads of one instance.

    Args:
        engine: Name of the instance.
        layout: Its pages: attention only.
        pool: Unix socket of the pool node.
        host_memory: Bytes shared with the pool node.
        facts: Facts of the layout id.
        wait_s: Time limit of a call to the pool node, seconds.
    """

    def __init__(
        self,
        engine: str,
        layout: Layout,
        pool: Path,
        host_memory: int,
        facts: dict[str, str],
        wait_s: float = WAIT_S,
    ) -> None:
        self._names = PrefixNames(layout)
        self.lineage: Lineage[bytes] = Lineage()
        self.rows = Rows(engine, layout, host_memory)
        self._batch = max(1, min(PAGES_MAX, self.rows.num_rows // 4))
        self._era = 0
        self._storing: set[asyncio.Task[Any]] = set()
        self._outbox: asyncio.Queue[_Backup] = asyncio.Queue()
        # One thread prefetches and one stores, as in SGLang.
        self._prefetch, self._backup = (ThreadPoolExecutor(1) for _ in range(2))
        self._calls = PoolCalls(
            pool,
            self.rows.hello(facts),
            self.rows.descriptor,
            wait_s,
        )
        self._tasks: set[asyncio.Task[Any]] = {asyncio.create_task(self._write())}

    @property
    def is_connected(self) -> bool:
        """Return True if the pool node has accepted this instance."""
        return self._calls.is_connected

    async def close(self) -> None:
        """Leave the pool node."""
        await asyncio.to_thread(self._calls.close)
        await cancel_all(self._tasks)
        self._prefetch.shutdown()
        self._backup.shutdown()
        self.rows.close()

    def begin(self, request: str, order: Order | None, hashes: list[bytes]) -> None:
        """A request came; what it orders is not read."""

    def finish(self, request: str, hashes: list[bytes]) -> None:
        """A request is over."""

    async def find(
        self, request: str, hashes: list[bytes], held_tokens: int, last_boundary: int
    ) -> int:
        """Return the longest prefix that the pool node can complete now, tokens."""
        keys = self._names.needed(hashes, held_tokens, last_boundary)
        found = await self._run(self._prefetch, self._calls.look_up, keys)
        return held_tokens + self._names.leading_tokens(found)

    async def lacking(self, request: str, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Return none: nothing is pushed."""
        return set()

    async def load(self, request: str, keys: list[BlockKey]) -> list[tuple[BlockKey, bytes]] | None:
        """Bring pages here.

        Returns:
            Every page's bytes as they came; None when one was not there any more.
        """
        found: list[tuple[BlockKey, bytes]] = []
        for start in range(0, len(keys), self._batch):
            part = keys[start : start + self._batch]
            # A call under way has its rows until it returns, whoever waits for it.
            pages = await asyncio.shield(self._keep(self._load(part)))
            if pages is None:
                return None
            found += pages
        return found

    async def _load(self, keys: list[BlockKey]) -> list[tuple[BlockKey, bytes]] | None:
        rows = await self.rows.take(len(keys))
        try:
            loaded, sources = await self._run(self._prefetch, self._calls.load, keys, rows)
            self.lineage.loaded((key.block_hash for key in keys), sources)
            if not all(loaded):
                return None
            return self.rows.blocks(rows, keys)
        finally:
            self.rows.give(rows)

    def store(
        self, request: str, blocks: list[NewBlock], hashes: list[bytes], cache_salt: str | None
    ) -> None:
        """Have pages stored. SGLang tells its storage nothing of their tenant."""
        sources = set(self.lineage.sources(hashes))
        self._outbox.put_nowait(_Backup(blocks, sources, self._era))

    async def forget(self) -> None:
        """Store nothing any more that is of another pool and was computed by now."""
        self._era += 1
        self.lineage.forget()
        if self._storing:
            await asyncio.wait(self._storing)

    async def _write(self) -> None:
        """Stores the outbox in order."""
        while True:
            entry = await self._outbox.get()
            for start in range(0, len(entry.blocks), self._batch):
                part = entry.blocks[start : start + self._batch]
                task = self._keep(self._store(entry, part))
                self._storing.add(task)
                task.add_done_callback(self._storing.discard)
                await asyncio.wait({task})

    async def _store(self, entry: _Backup, blocks: list[NewBlock]) -> None:
        rows = await self.rows.take(len(blocks))
        try:
            if entry.sources and entry.era < self._era:
                return
            self.rows.fill(rows, blocks)
            keys = [block.key for block in blocks]
            await self._run(self._backup, self._calls.store, keys, rows, entry.sources)
        finally:
            self.rows.give(rows)

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, thread: ThreadPoolExecutor, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *args)
