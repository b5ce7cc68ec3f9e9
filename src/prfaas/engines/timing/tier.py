"""Messages of an instance to its pool node: the same as vLLM's tier, for an event loop.

Stores go out in the order they were asked for, a batch of rows at a time; the end of a push follows
its last store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.core.kv.blocks import BlockKey, Layout, block_key
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.engines.block_requests import ASK_AGAIN_NS, BlockRequests, BlockState, JobDone
from prfaas.engines.lineage import Lineage
from prfaas.engines.orders import Order, OrderedPush, PushOrder, wait_in
from prfaas.engines.pool_client import PoolConnection
from prfaas.engines.timing.blocks import NewBlock, PrefixNames, Rows
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_S
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.codec import AnyMessage
from prfaas.wire.messages.engine import REQUEST_CHARS_MAX, Load, PushDone, Store
from prfaas.wire.messages.fields import Key

BATCH_ROWS_MAX = 64
"""Blocks of one job: their bytes are made between two turns of the event loop."""


@dataclass(frozen=True, slots=True)
class _New:
    """Blocks that a request has computed, and the pools that they are of."""

    request: str
    blocks: list[NewBlock]
    sources: list[str]
    era: int
    """Number of resets of the instance's cache by then."""
    tenant: str
    """Tag of the tenant of the request."""


@dataclass(frozen=True, slots=True)
class _Finish:
    """The end of a push, in the queue behind its stores."""

    request: str
    ends: list[tuple[Key, int]]
    """Blocks of the prompt, and where each ends, tokens."""


class TimingTier:
    """One instance's side of its pool node.

    Args:
        engine: Name of the instance.
        pool: Unix socket of the pool node.
        host_memory: Bytes shared with the pool node.
        facts: Facts of the layout id.
    """

    def __init__(
        self, engine: str, layout: Layout, pool: Path, host_memory: int, facts: dict[str, str]
    ) -> None:
        self._layout = layout
        self._names = PrefixNames(layout)
        self.lineage: Lineage[bytes] = Lineage()
        self.rows = Rows(engine, layout, host_memory)
        self._batch = max(1, min(BATCH_ROWS_MAX, self.rows.num_rows // 4))
        self._requests = BlockRequests(self._send, time.monotonic_ns)
        self._pushes: dict[str, OrderedPush] = {}
        self._jobs: dict[int, asyncio.Future[JobDone]] = {}
        self._labelled: set[asyncio.Future[JobDone]] = set()
        """Stores under way of blocks that are of other pools."""
        self._era = 0
        self._next_job = 0
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._outbox: asyncio.Queue[_New | _Finish] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = {asyncio.create_task(self._write())}
        self._client = PoolConnection(
            pool,
            self.rows.hello(facts),
            self.rows.descriptor,
            self._on_message,
            self._on_lost,
        )

    @property
    def is_connected(self) -> bool:
        """Return True if the pool node has accepted this instance."""
        return self._client.is_connected

    async def close(self) -> None:
        """Leave the pool node."""
        await cancel_all(self._tasks)
        await asyncio.to_thread(self._client.close)
        self.rows.close()

    # Requests

    def begin(self, request: str, order: Order | None, hashes: list[bytes]) -> None:
        """A request came.

        Args:
            order: Its instructions about transfers.
            hashes: Hash chain of its prompt.
        """
        wait = wait_in(order)
        if wait is not None:
            self._requests.begin(request, wait.transfer_id, wait.source, wait.wait_ns)
        if isinstance(order, PushOrder):
            push = OrderedPush(order, self._layout)
            self._pushes[request] = push
            self._send(push.announcement(hashes))

    def finish(self, request: str, hashes: list[bytes]) -> None:
        """A request is over, and all its stores were asked for.

        Args:
            hashes: Hash chain of its prompt.
        """
        self._requests.end(request)
        self.computed(request, hashes)

    def computed(self, request: str, hashes: list[bytes]) -> None:
        """All stores of a prompt were asked for."""
        push = self._pushes.get(request)
        if push is not None:
            layout, span = self._layout, self._layout.tokens_per_hash
            ends: list[tuple[Key, int]] = [
                (block_key(layout, group, hashes, end), end)
                for group in layout.groups
                for end in range(span, len(hashes) * span + 1, span)
            ]
            self._outbox.put_nowait(_Finish(request, ends))

    # Lookups

    async def find(
        self, request: str, hashes: list[bytes], held_tokens: int, last_boundary: int
    ) -> int:
        """The longest prefix that the pool node can complete, blocks in transit waited for.

        Args:
            hashes: Hash chain of its prompt.
            held_tokens: Prefix whose attention blocks the instance holds itself.
            last_boundary: Longest usable prefix of the prompt, tokens.

        Returns:
            Its length, tokens; 0 if there is none.
        """
        names = self._names
        whole = names.needed(hashes, held_tokens, last_boundary)
        answers = await self._answers(request, whole)
        hits = [answer is BlockState.HIT for answer in answers]
        if all(hits):
            return last_boundary
        run = held_tokens + names.leading_tokens(hits)
        if not names.has_state:
            return run
        ends = names.boundaries(run)
        found = await self._answers(request, [k for end in ends for k in names.states(hashes, end)])
        return names.last_with_state(ends, [answer is BlockState.HIT for answer in found])

    async def lacking(self, request: str, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Blocks of a list that the pool node does not have."""
        answers = await self._answers(request, keys)
        return {key for key, answer in zip(keys, answers, strict=True) if answer is BlockState.MISS}

    async def _answers(self, request: str, keys: Sequence[BlockKey]) -> list[BlockState]:
        """State of blocks once none is in transit."""
        while True:
            if not self.is_connected:
                return [BlockState.MISS] * len(keys)
            answers = [self._requests.look_up(request, key) for key in keys]
            if BlockState.WAIT not in answers:
                return answers
            self._news.clear()
            self._requests.flush()
            try:
                async with asyncio.timeout(ASK_AGAIN_NS / NS_PER_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    # Jobs

    async def load(self, request: str, keys: list[BlockKey]) -> list[tuple[BlockKey, bytes]] | None:
        """Bring blocks here.

        Returns:
            Every block's bytes as they came; None when one was not there any more.
        """
        found: list[tuple[BlockKey, bytes]] = []
        for start in range(0, len(keys), self._batch):
            part = keys[start : start + self._batch]
            rows = await self.rows.take(len(part))
            job = self._number()
            # Rows of a job under way are the pool node's: they come back when it has answered.
            message = Load(job=job, keys=list(part), rows=rows, request=request[:REQUEST_CHARS_MAX])
            done = asyncio.create_task(self._run(job, message, rows, part))
            self._tasks.add(done)
            done.add_done_callback(self._tasks.discard)
            blocks = await asyncio.shield(done)
            if blocks is None:
                self._requests.forget(request, part)
                return None
            found += blocks
        return found

    def store(
        self, request: str, blocks: list[NewBlock], hashes: list[bytes], cache_salt: str | None
    ) -> None:
        """Hand blocks over to the pool node, and have them pushed if the request wants it.

        Args:
            hashes: Hash chain of all that it has used.
        """
        sources, tenant = self.lineage.sources(hashes), tenant_tag(cache_salt)
        self._outbox.put_nowait(_New(request, blocks, sources, self._era, tenant))

    async def forget(self) -> None:
        """Store nothing any more that is of another pool and was computed by now.

        Returns once the pool node has answered all earlier messages.
        """
        self._era += 1
        self.lineage.forget()
        if self._labelled:
            await asyncio.wait(self._labelled)

    async def _run(
        self, job: int, load: Load, rows: list[int], keys: list[BlockKey]
    ) -> list[tuple[BlockKey, bytes]] | None:
        try:
            result = await self._submit(job, load)
            self.lineage.loaded((key.block_hash for key in keys), result.sources)
            if not result.ok:
                return None
            return self.rows.blocks(rows, keys)
        finally:
            self.rows.give(rows)

    async def _write(self) -> None:
        """Sends the outbox in order."""
        while True:
            entry = await self._outbox.get()
            if isinstance(entry, _Finish):
                self._end_push(entry)
                continue
            for start in range(0, len(entry.blocks), self._batch):
                await self._write_batch(entry, entry.blocks[start : start + self._batch])

    async def _write_batch(self, new: _New, blocks: list[NewBlock]) -> None:
        rows = await self.rows.take(len(blocks))
        if new.sources and new.era < self._era:
            self.rows.give(rows)
            return
        self.rows.fill(rows, blocks)
        push = self._pushes.get(new.request)
        wanted = push.take((block.key, block.end_token) for block in blocks) if push else set()
        job = self._number()
        store = Store(
            job=job,
            keys=[block.key for block in blocks],
            rows=rows,
            transfer_id=push.transfer_id if push else None,
            pushed=[block.key in wanted for block in blocks],
            sources=new.sources,
            tenant=new.tenant,
        )
        future = self._submit(job, store)
        future.add_done_callback(lambda _: self.rows.give(rows))
        if new.sources:
            self._labelled.add(future)
            future.add_done_callback(self._labelled.discard)

    def _end_push(self, entry: _Finish) -> None:
        push = self._pushes.pop(entry.request, None)
        if push is not None:
            self._send(PushDone(transfer_id=push.transfer_id, rest=push.rest(entry.ends)))

    def _number(self) -> int:
        self._next_job += 1
        return self._next_job

    def _submit(self, job: int, message: Store | Load) -> asyncio.Future[JobDone]:
        future: asyncio.Future[JobDone] = self._loop.create_future()
        self._jobs[job] = future
        self._requests.submit(message)
        self._take_done()
        return future

    def _send(self, message: Message) -> bool:
        return self._client.send(message)

    # From the reader thread

    def _on_message(self, message: AnyMessage) -> None:
        self._requests.on_message(message)
        self._wake()

    def _on_lost(self) -> None:
        self._requests.on_lost()
        self._wake()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_done)

    def _take_done(self) -> None:
        self._news.set()
        for done in self._requests.take_done():
            future = self._jobs.pop(done.job, None)
            if future is not None and not future.done():
                future.set_result(done)
