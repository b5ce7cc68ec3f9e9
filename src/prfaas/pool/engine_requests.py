"""What local engines ask of the pool node, and the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping

from prfaas.core.blocks import BlockKey, BlockName
from prfaas.core.tickets import TicketRefusedError
from prfaas.errors import PeerError
from prfaas.pool.engine_port import EngineSession
from prfaas.pool.inbound import InboundTransfers
from prfaas.pool.metrics import PoolMetrics
from prfaas.pool.outbound import OutboundLink
from prfaas.pool.sending import Sending
from prfaas.pool.store import BlockStore, StoredBlock
from prfaas.pool.tickets import TicketChecks
from prfaas.wire.frames import block_digest
from prfaas.wire.messages import (
    HIT,
    MISS,
    ON_ITS_WAY,
    AnyMessage,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Message,
    Ping,
    Pull,
    Push,
    PushDone,
    Store,
    StoreDone,
    Touch,
    keys_of,
)

READS_MAX = 8
"""Blocks that one request has read from disk at a time: each holds memory."""


class EngineRequests:
    """Answers engines: at once what lies in memory, later what has to be read from disk.

    Args:
        name: Of this pool node: a push to it hands blocks from one of its engines to another.
        is_connected: Whether the link from a pool of that name stands.
        tickets: Check what engines are told to push.
        on_refused: Told of a transfer that its ticket does not allow: its id, where to, and why.
        on_pull: Told of blocks to fetch from another pool, and whom to answer.
        sending: Sends what a push needs and engines did not store for it.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        inbound: InboundTransfers,
        links: Mapping[str, OutboundLink],
        is_connected: Callable[[str], bool],
        tickets: TicketChecks,
        on_refused: Callable[[bytes, str, str], None],
        on_pull: Callable[[Pull, Callable[[Message], None]], None],
        sending: Sending,
        metrics: PoolMetrics,
    ) -> None:
        self._name = name
        self._store = store
        self._inbound = inbound
        self._links = links
        self._is_connected = is_connected
        self._tickets = tickets
        self._on_refused = on_refused
        self._on_pull = on_pull
        self._sending = sending
        self._metrics = metrics
        self._pushes: dict[bytes, tuple[EngineSession, OutboundLink]] = {}
        self._handed_over: dict[bytes, EngineSession] = {}
        """Transfers between engines of this host that are not complete, and who stores."""
        self._tasks: dict[asyncio.Task[None], EngineSession] = {}
        """Requests that wait for the disk."""

    def handle(self, engine: EngineSession, message: AnyMessage) -> None:
        """Act on one message.

        Raises:
            PeerError: The engine broke the protocol.
        """
        match message:
            case Store():
                self._store_rows(engine, message)
            case Load():
                self._load_rows(engine, message)
            case Lookup():
                self._look_up(engine, message)
            case Touch():
                self._store.touch(engine.layout.layout_id, keys_of(message.keys))
            case Push():
                self._open_push(engine, message)
            case Pull():
                self._on_pull(message, lambda answer: _answer(engine, answer))
            case PushDone():
                self._close_push(engine, message)
            case Ping():
                return
            case _:
                raise PeerError(f"{type(message).__name__} is not for an engine to say")

    def left(self, engine: EngineSession) -> None:
        """An engine is gone: nothing more of its transfers will come."""
        for transfer_id, (owner, link) in list(self._pushes.items()):
            if owner is engine:
                del self._pushes[transfer_id]
                link.abort(transfer_id, "engine_lost", tell_peer=True)
        for transfer_id, owner in list(self._handed_over.items()):
            if owner is engine:
                del self._handed_over[transfer_id]
        for task, waiting in list(self._tasks.items()):
            if waiting is engine:
                task.cancel()

    def _start(self, engine: EngineSession, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = engine
        task.add_done_callback(self._tasks.pop)

    def _open_push(self, engine: EngineSession, message: Push) -> None:
        if message.peer == self._name:
            self._handed_over[message.transfer_id] = engine
            return
        if message.transfer_id in self._pushes:
            return
        link = self._links.get(message.peer)
        if link is None:
            self._metrics.blocks_dropped.labels(reason="unknown_peer").inc()
            return
        try:
            grant = self._tickets.to_send(
                message.ticket,
                transfer_id=message.transfer_id,
                destination=message.peer,
                layout_id=engine.layout.layout_id,
            )
        except TicketRefusedError as error:
            self._on_refused(message.transfer_id, message.peer, error.reason.value)
            return
        link.open(grant)
        self._pushes[message.transfer_id] = engine, link

    def _close_push(self, engine: EngineSession, message: PushDone) -> None:
        self._handed_over.pop(message.transfer_id, None)
        _, link = self._pushes.pop(message.transfer_id, (engine, None))
        if link is None:
            return
        self._sending.start(
            link,
            message.transfer_id,
            engine.layout.layout_id,
            keys_of(message.rest),
            tell_missing=False,
        )

    def _is_on_disk_only(self, name: BlockName) -> bool:
        return name in self._store and not self._store.has_in_memory(name)

    def _store_rows(self, engine: EngineSession, message: Store) -> None:
        stored = True
        pushed = message.pushed or [False] * len(message.keys)
        if len(pushed) != len(message.keys):
            raise PeerError(f"{len(pushed)} push flags for {len(message.keys)} keys")
        named = engine.named_rows(message.keys, message.rows)
        for (key, row), wanted in zip(named, pushed, strict=True):
            block = self._keep(engine, key, row)
            stored = stored and block is not None
            if wanted and message.transfer_id is not None:
                self._push(engine, message.transfer_id, key, block)
            del block  # Or the memory of one that is evicted would not come back for the next.
        _answer(engine, StoreDone(job=message.job, stored=stored))

    def _keep(self, engine: EngineSession, key: BlockKey, row: int) -> StoredBlock | None:
        layout_id = engine.layout.layout_id
        block = self._store.get(layout_id, key)
        if block is not None:
            return block
        buffer = self._store.allocate(engine.memory.block_bytes(key.group))
        if buffer is None:
            self._metrics.blocks_dropped.labels(reason="no_room").inc()
            return None
        engine.memory.read(key, row, buffer)
        self._metrics.blocks_stored.labels(group=key.group).inc()
        return self._store.keep(layout_id, key, buffer, block_digest(layout_id, key, buffer))

    def _push(
        self, engine: EngineSession, transfer_id: bytes, key: BlockKey, block: StoredBlock | None
    ) -> None:
        _, link = self._pushes.get(transfer_id, (engine, None))
        if link is None:
            return
        if block is None:
            link.abort(transfer_id, "no_room", tell_peer=True)
        else:
            link.push(transfer_id, engine.layout.layout_id, key, block)

    def _load_rows(self, engine: EngineSession, message: Load) -> None:
        layout_id = engine.layout.layout_id
        named = engine.named_rows(message.keys, message.rows)
        for key, row in named:
            engine.memory.check(key, row)
        if any(self._is_on_disk_only((layout_id, key)) for key, _ in named):
            self._start(engine, self._load_from_disk(engine, message.job, named))
            return
        blocks = ((key, row, self._store.get(layout_id, key)) for key, row in named)
        loaded = bytes(self._write(engine, key, row, block, "host") for key, row, block in blocks)
        _answer(engine, LoadDone(job=message.job, loaded=loaded))

    async def _load_from_disk(
        self, engine: EngineSession, job: int, named: list[tuple[BlockKey, int]]
    ) -> None:
        loaded: list[bool] = []
        for start in range(0, len(named), READS_MAX):
            part = named[start : start + READS_MAX]
            loaded += await asyncio.gather(*(self._load_one(engine, key, row) for key, row in part))
        _answer(engine, LoadDone(job=job, loaded=bytes(loaded)))

    async def _load_one(self, engine: EngineSession, key: BlockKey, row: int) -> bool:
        layout_id = engine.layout.layout_id
        tier = "disk" if self._is_on_disk_only((layout_id, key)) else "host"
        return self._write(engine, key, row, await self._store.fetch(layout_id, key), tier)

    def _write(
        self, engine: EngineSession, key: BlockKey, row: int, block: StoredBlock | None, tier: str
    ) -> bool:
        if block is None or len(block.data) != engine.memory.block_bytes(key.group):
            return False
        engine.memory.write(key, row, block.data)
        self._metrics.blocks_loaded.labels(group=key.group).inc()
        self._metrics.hits.labels(tier=tier).inc()
        return True

    def _look_up(self, engine: EngineSession, message: Lookup) -> None:
        layout_id = engine.layout.layout_id
        coming = message.transfer_id is not None and self._is_on_its_way(
            message.transfer_id, message.source
        )
        absent = ON_ITS_WAY if coming else MISS
        found = bytes(
            HIT if (layout_id, key) in self._store else absent for key in keys_of(message.keys)
        )
        _answer(engine, LookupDone(job=message.job, found=found))

    def _is_on_its_way(self, transfer_id: bytes, source: str) -> bool:
        if source == self._name:
            return transfer_id in self._handed_over
        return self._inbound.is_on_its_way(transfer_id, self._is_connected(source))


def _answer(engine: EngineSession, message: Message) -> None:
    if engine.channel is not None:
        engine.channel.send(message)
