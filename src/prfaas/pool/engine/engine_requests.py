"""Requests of local engines to the pool node, and the answers; their pushes to other pools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping

from prfaas.core.cache.eviction import born_at
from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.facts import SENT, TransferDone
from prfaas.core.transfer.tickets import TicketRefusedError
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
from prfaas.errors import PeerError
from prfaas.pool.engine.copy_thread import EngineCopies, release
from prfaas.pool.engine.engine_server import EngineSession
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.pool.send.block_sender import Sending
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.origins import computed, joined
from prfaas.pool.store.tier_ports import ReadBudget, StoredBlock
from prfaas.pool.tickets.ticket_checks import TicketChecks
from prfaas.wire.messages.base import Message, Ping, Unsupported
from prfaas.wire.messages.codec import AnyMessage
from prfaas.wire.messages.engine import (
    HIT,
    MISS,
    ON_ITS_WAY,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Push,
    PushDone,
    Store,
    StoreDone,
    Touch,
    TransferOver,
)
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import Pull

log = logging.getLogger(__name__)


class EnginePushes:
    """The open pushes of local engines.

    Args:
        links: Links to peers, by name.
        sending: Sends blocks of a push that engines did not store for it.
        metrics: Count blocks that no link takes.
        facts: Told of transfers that their ticket does not allow.
        needs_grant: Keep only blocks of open pushes.
        is_shared: Sites share the pool node: keep blocks only of the tenant that a ticket names.
    """

    def __init__(
        self,
        links: Mapping[str, OutboundLink],
        tickets: TicketChecks,
        sending: Sending,
        metrics: PoolMetrics,
        facts: FactStream,
        clock_ns: Callable[[], int],
        *,
        needs_grant: bool = False,
        is_shared: bool = False,
    ) -> None:
        self._links, self._tickets, self.sending = links, tickets, sending
        self._metrics, self._facts, self._clock_ns = metrics, facts, clock_ns
        self._needs_grant, self._is_shared = needs_grant or is_shared, is_shared
        self._open: dict[bytes, tuple[EngineSession, OutboundLink]] = {}
        self._granted: dict[bytes, str] = {}
        """Tags in the tickets of open pushes."""

    def may_keep(self, message: Store) -> bool:
        """Return False if blocks of an engine may not rest here.

        The ticket of their request was refused, is for another tenant than the prompt, or there is
        none.
        """
        granted = self._granted.get(message.transfer_id or b"")
        is_other = self._is_shared and granted != message.tenant
        return not self._needs_grant or not (granted is None or is_other)

    def open(self, engine: EngineSession, message: Push) -> None:
        """An engine begins a push."""
        if message.transfer_id in self._open:
            return
        link = self._links.get(message.peer)
        if link is None:
            self._metrics.blocks_dropped.labels(reason="unknown_peer").inc()
            return
        try:
            grant = self._tickets.to_send(
                message.ticket,
                message.blocks,
                transfer_id=message.transfer_id,
                destination=message.peer,
                layout_id=engine.layout.layout_id,
            )
        except TicketRefusedError as error:
            now_ns = self._clock_ns()
            refused = Transfer(message.transfer_id, message.peer, now_ns, now_ns)
            refused.apply(TransferEnd.REFUSED, error.reason.value)
            self._facts.report(TransferDone(SENT, refused, now_ns))
            return
        link.open(grant)
        self._open[message.transfer_id] = engine, link
        self._granted[message.transfer_id] = grant.ticket.tenant

    def push(
        self,
        engine: EngineSession,
        transfer_id: bytes,
        key: BlockKey,
        block: StoredBlock | None,
        *,
        is_barred: bool,
    ) -> None:
        """Send a block that an engine has stored for a push; without memory for it, None."""
        _, link = self._open.get(transfer_id, (engine, None))
        if link is None:
            return
        layout_id = engine.layout.layout_id
        if is_barred:
            link.abort(transfer_id, TransferEnd.PURGED)
        elif engine.has_state(key.group) and link.machine.is_checkpoint(transfer_id, key):
            if block is not None:
                link.push_checkpoint(transfer_id, layout_id, key, block)
        elif block is None:
            link.abort(transfer_id, TransferEnd.NO_ROOM)
        else:
            link.push(transfer_id, layout_id, key, block)

    def close(self, engine: EngineSession, message: PushDone) -> None:
        """An engine has stored all blocks of a push."""
        _, link = self._open.pop(message.transfer_id, (engine, None))
        self._granted.pop(message.transfer_id, None)
        if link is not None:
            layout_id, rest = engine.layout.layout_id, keys_of(message.rest)
            self.sending.start(link, message.transfer_id, layout_id, rest, tell_missing=False)

    def left(self, engine: EngineSession) -> None:
        """An engine is gone: nothing more of its pushes will come."""
        for transfer_id, (owner, link) in list(self._open.items()):
            if owner is engine:
                del self._open[transfer_id], self._granted[transfer_id]
                link.abort(transfer_id, TransferEnd.ENGINE_LOST)

    def validate(self) -> None:
        """See that each open push has a ticket, and no other; AssertionError if one has none."""
        if self._open.keys() != self._granted.keys():
            raise AssertionError(f"{len(self._open)} pushes, {len(self._granted)} with a ticket")


REQUESTS_MAX = 4096
"""Requests whose budget is known; an older one that loads again gets another."""


class ReadBudgets:
    """Budgets by engine and request.

    Args:
        limit_s: Of each, seconds; None is unlimited.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._budgets: OrderedDict[tuple[str, str], ReadBudget] = OrderedDict()

    def of(self, engine: str, request: str) -> ReadBudget:
        """Return the budget of a request; a new one if the engine does not name the request."""
        if not request or self._limit_s is None:
            return ReadBudget(self._limit_s)
        budget = self._budgets.setdefault((engine, request), ReadBudget(self._limit_s))
        if len(self._budgets) > REQUESTS_MAX:
            self._budgets.popitem(last=False)
        return budget


READS_MAX = 8
"""Blocks that one request has read from below memory at a time: each holds memory."""
WAITING_MAX = 10_000
"""Stores of one engine that wait for those before them; its rows are fewer."""
AWAITED_MAX = 10_000
"""Transfers whose end is reported to engines; they poll older ones."""
Waiting = deque[Callable[[], Coroutine[None, None, None]]]


class EngineRequests:
    """Answers engines: lookups immediately, other requests when blocks are copied, read or sent.

    Args:
        name: Of this pool node: a push to it hands blocks from one of its engines to another.
        pushes: Those of engines to other pools.
        read_limit_s: Time limit of the slow reads of one request, seconds; None is unlimited.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        inbound: InboundTransfers,
        pushes: EnginePushes,
        metrics: PoolMetrics,
        read_limit_s: float | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s = wall_s
        self._name = name
        self._store = store
        self._inbound = inbound
        self._pushes = pushes
        self._metrics = metrics
        self._handed_over: dict[bytes, EngineSession] = {}
        """Incomplete transfers between engines of this host, and their sources."""
        self._awaited: OrderedDict[bytes, set[EngineSession]] = OrderedDict()
        """Engines that wait for the blocks of each transfer."""
        self._tasks: dict[asyncio.Task[None], EngineSession] = {}
        """Requests that are under way."""
        self._copies = EngineCopies(store, metrics)
        self._budgets = ReadBudgets(read_limit_s)
        self._queues: dict[EngineSession, Waiting] = {}
        """Requests that are executed in order; the first one is running."""

    def handle(self, engine: EngineSession, message: AnyMessage) -> None:
        """Act on one message; PeerError if the engine broke the protocol."""
        match message:
            case Store():
                self._store_rows(engine, message)
            case Load():
                self._load_rows(engine, message)
            case Lookup():
                self._look_up(engine, message)
            case Touch():
                self._store.touch(engine.layout.layout_id, keys_of(message.keys))
            case Push() if message.peer == self._name:
                self._handed_over[message.transfer_id] = engine
            case Push():
                self._pushes.open(engine, message)
            case Pull():
                self._inbound.pull(message, lambda answer: _answer(engine, answer))
            case PushDone():
                self._in_order(engine, lambda: self._close_push(engine, message))
            case Ping() | Unsupported():
                return
            case _:
                raise PeerError(f"{type(message).__name__} is not a message of an engine")

    def left(self, engine: EngineSession) -> None:
        """An engine is gone: nothing more of its transfers will come."""
        self._pushes.left(engine)
        self._queues.pop(engine, None)
        for engines in self._awaited.values():
            engines.discard(engine)
        for transfer_id, owner in list(self._handed_over.items()):
            if owner is engine:
                self._hand_over_ended(transfer_id)
        for task, waiting in list(self._tasks.items()):
            if waiting is engine:
                task.cancel()

    def transfer_over(self, transfer_id: bytes) -> None:
        """Notify engines that wait for the blocks of an ended transfer."""
        for engine in self._awaited.pop(transfer_id, ()):
            _answer(engine, TransferOver(transfer_id=transfer_id))

    def close(self) -> None:
        """Close the queue of requests."""
        self._copies.close()

    def _start(self, engine: EngineSession, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(self._watch(engine, work))
        self._tasks[task] = engine
        task.add_done_callback(self._tasks.pop)

    async def _watch(self, engine: EngineSession, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except PeerError as error:
            if engine.channel is not None:
                engine.channel.distrust(str(error))
        except Exception:  # Without an answer the engine would wait, and all behind the request.
            log.exception("a request of engine %s failed: its connection ends", engine.name)
            if engine.channel is not None:
                engine.channel.close("a request failed in the pool node")

    def _in_order(
        self, engine: EngineSession, work: Callable[[], Coroutine[None, None, None]]
    ) -> None:
        """Execute an action after the engine's earlier requests."""
        queue = self._queues.setdefault(engine, deque())
        if len(queue) >= WAITING_MAX:
            raise PeerError(f"{WAITING_MAX} requests wait to be answered, which is the limit")
        queue.append(work)
        if len(queue) == 1:
            self._start(engine, self._work_off(engine, queue))

    async def _work_off(self, engine: EngineSession, queue: Waiting) -> None:
        while queue:
            await queue[0]()
            queue.popleft()
        self._queues.pop(engine, None)

    async def _close_push(self, engine: EngineSession, message: PushDone) -> None:
        self._hand_over_ended(message.transfer_id)
        self._pushes.close(engine, message)

    def _hand_over_ended(self, transfer_id: bytes) -> None:
        if self._handed_over.pop(transfer_id, None) is not None:
            self.transfer_over(transfer_id)

    def _store_rows(self, engine: EngineSession, message: Store) -> None:
        pushed = message.pushed or [False] * len(message.keys)
        if len(pushed) != len(message.keys):
            raise PeerError(f"{len(pushed)} push flags for {len(message.keys)} keys")
        named = engine.named_rows(message.keys, message.rows)
        wanted = {key for (key, _), flag in zip(named, pushed, strict=True) if flag}
        self._in_order(engine, lambda: self._take(engine, message, named, wanted))

    async def _take(
        self,
        engine: EngineSession,
        message: Store,
        named: list[tuple[BlockKey, int]],
        wanted: set[BlockKey],
    ) -> None:
        if not self._pushes.may_keep(message):
            self._metrics.blocks_dropped.labels(reason="no_ticket").inc(len(named))
            _answer(engine, StoreDone(job=message.job, stored=False))
            return
        now_s = born_at(self._wall_s())
        origin = computed(engine.name, frozenset(message.sources), message.tenant, now_s)
        stored = True
        for part in self._copies.batches(engine, named):
            # Cached blocks of an engine must not evict blocks that another one waits for.
            blocks = await self._copies.take(engine, part, origin, spare_leased=not wanted)
            for (key, _), block in zip(part, blocks, strict=True):
                stored = stored and block is not None
                if key in wanted and message.transfer_id is not None:
                    # Barred is also a block that was kept before its source was.
                    where = origin if block is None else block.origin
                    is_barred = not self._store.rules.may_keep(where)
                    transfer_id = message.transfer_id
                    self._pushes.push(engine, transfer_id, key, block, is_barred=is_barred)
            release(blocks)
            self._pushes.sending.waits.stored(engine.layout.layout_id, [key for key, _ in part])
            # Otherwise the memory of evicted blocks would not be free for the next.
            block, blocks = None, []
        _answer(engine, StoreDone(job=message.job, stored=stored))

    def _load_rows(self, engine: EngineSession, message: Load) -> None:
        layout_id = engine.layout.layout_id
        named = engine.named_rows(message.keys, message.rows)
        if any(self._store.tier_of((layout_id, key)) for key, _ in named):
            self._start(engine, self._load_from_below(engine, message, named))
        else:
            self._start(engine, self._load_from_memory(engine, message.job, named))

    async def _load_from_memory(
        self, engine: EngineSession, job: int, named: list[tuple[BlockKey, int]]
    ) -> None:
        layout_id = engine.layout.layout_id
        blocks = [self._store.get(layout_id, key) for key, _ in named]
        loaded = await self._copies.give(engine, named, blocks)
        self._metrics.hits.labels(tier="host").inc(sum(loaded))
        sources = sorted(joined(_sources_of(blocks)))
        _answer(engine, LoadDone(job=job, loaded=loaded, sources=sources))

    async def _load_from_below(
        self, engine: EngineSession, message: Load, named: list[tuple[BlockKey, int]]
    ) -> None:
        loaded, sources = b"", set[str]()
        budget = self._budgets.of(engine.name, message.request)
        for start in range(0, len(named), READS_MAX):
            part = named[start : start + READS_MAX]
            answers = await asyncio.gather(*(self._load_one(engine, row, budget) for row in part))
            for flag, found in answers:
                loaded += flag
                sources |= found
        done = LoadDone(job=message.job, loaded=loaded, sources=sorted(joined(sources)))
        _answer(engine, done)

    async def _load_one(
        self, engine: EngineSession, row: tuple[BlockKey, int], budget: ReadBudget
    ) -> tuple[bytes, set[str]]:
        """Give one block; whether it was there, and where it came from."""
        layout_id, (key, _) = engine.layout.layout_id, row
        tier = self._store.tier_of((layout_id, key)) or "host"
        block = await self._store.fetch(layout_id, key, budget)
        loaded = await self._copies.give(engine, [row], [block])
        self._metrics.hits.labels(tier=tier).inc(sum(loaded))
        return loaded, _sources_of([block])

    async def _probe(self, engine: EngineSession, message: Lookup) -> None:
        """Answer a look-up once the shared tier has looked for its blocks."""
        await self._store.probe(engine.layout.layout_id, keys_of(message.keys))
        self._look_up(engine, message, is_probed=True)

    def _look_up(self, engine: EngineSession, message: Lookup, *, is_probed: bool = False) -> None:
        layout_id = engine.layout.layout_id
        coming = message.transfer_id is not None and self._is_on_its_way(
            message.transfer_id, message.source
        )
        is_done = coming or is_probed
        if not is_done and self._store.needs_probe(layout_id, keys_of(message.keys)):
            self._start(engine, self._probe(engine, message))
            return
        absent = ON_ITS_WAY if coming else MISS
        found = bytes(
            HIT if (layout_id, key) in self._store else absent for key in keys_of(message.keys)
        )
        _answer(engine, LookupDone(job=message.job, found=found))
        if message.transfer_id is not None and ON_ITS_WAY in found:
            self._awaited.setdefault(message.transfer_id, set()).add(engine)
            if len(self._awaited) > AWAITED_MAX:
                self._awaited.popitem(last=False)

    def _is_on_its_way(self, transfer_id: bytes, source: str) -> bool:
        if source == self._name:
            return transfer_id in self._handed_over
        return self._inbound.is_on_its_way(transfer_id, source)


def _sources_of(blocks: Iterable[StoredBlock | None]) -> set[str]:
    return {source for block in blocks if block is not None for source in block.origin.sources}


def _answer(engine: EngineSession, message: Message) -> None:
    if engine.channel is not None:
        engine.channel.send(message)
