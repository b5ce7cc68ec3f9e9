"""Sending named blocks of the store over a link, from any tier."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.transfer.tickets import TicketRefusedError
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.tier_ports import ReadBudget
from prfaas.pool.tickets.ticket_checks import TicketChecks
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import Ahead as Computed
from prfaas.wire.messages.link import Pull

SETTLE_S = 2.0
"""Once its engine has answered, the longest wait for a block since the one before was stored."""


ROOM_RETRY_S = 0.02
"""Blocks that wait for the link hold memory; it is tried again after this."""


class StoreWaits:
    """Waits for blocks that engines store."""

    def __init__(self) -> None:
        self._waiting: dict[BlockName, list[asyncio.Event]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def stored(self, layout_id: bytes, keys: Iterable[BlockKey]) -> None:
        """Wake all that wait for one of these."""
        if self._waiting:
            for key in keys:
                for event in self._waiting.get((layout_id, key), ()):
                    event.set()

    @contextmanager
    def watched(self, names: Iterable[BlockName], event: asyncio.Event) -> Iterator[None]:
        """Have an event set when one of these blocks is stored."""
        kept = list(names)
        for name in kept:
            self._waiting.setdefault(name, []).append(event)
        try:
            yield
        finally:
            for name in kept:
                self._waiting[name].remove(event)
                if not self._waiting[name]:
                    del self._waiting[name]


class AwaitedBlocks:
    """The blocks that one transfer waits for.

    Engines store the blocks of a group in the order of the prompt. So the first one of each group
    is waited for.

    Args:
        keys: In the order of the prompt in each group.
    """

    def __init__(self, keys: Iterable[BlockKey]) -> None:
        self._queues: dict[int, deque[BlockKey]] = defaultdict(deque)
        for key in keys:
            self._queues[key.group].append(key)
        self.changed = asyncio.Event()
        """Set when a block was stored, the engine has answered, or the transfer has ended."""
        self._is_computed, self._waits_since_s = False, 0.0

    def computed(self) -> None:
        """The engine has answered: what is not stored soon never is."""
        self._is_computed, self._waits_since_s = True, asyncio.get_running_loop().time()
        self.changed.set()

    def heads(self) -> list[BlockKey]:
        """The first block of each group."""
        return [queue[0] for queue in self._queues.values() if queue]

    def rest(self) -> list[BlockKey]:
        """All that were not sent."""
        return [key for queue in self._queues.values() for key in queue]

    def sent(self, key: BlockKey) -> None:
        """The first block of a group is sent."""
        self._queues[key.group].popleft()
        self._waits_since_s = asyncio.get_running_loop().time()

    def left_s(self) -> float | None:
        """Time until the others count as missing, seconds; None while the engine computes."""
        if not self._is_computed:
            return None
        return max(0.0, self._waits_since_s + SETTLE_S - asyncio.get_running_loop().time())


class Sending:
    """Pushes existing blocks and finishes the transfer.

    Args:
        store: Has the blocks.
        tickets: Check what peers request.
        read_limit_s: Time limit of the slow reads of one transfer, seconds; None is unlimited.
    """

    def __init__(
        self, store: BlockStore, tickets: TicketChecks, read_limit_s: float | None = None
    ) -> None:
        self._store, self._tickets, self._read_limit_s = store, tickets, read_limit_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.waits = StoreWaits()
        self._ahead: dict[bytes, AwaitedBlocks] = {}

    def serve(self, link: OutboundLink, pull: Pull) -> None:
        """Send requested blocks to a peer, and report missing ones."""
        transfer_id = pull.transfer_id
        if pull.ahead is Computed.COMPUTED:
            if transfer_id in self._ahead:
                self._ahead[transfer_id].computed()
            return
        if link.has(transfer_id):
            return
        try:
            grant = self._tickets.to_send(
                pull.ticket,
                pull.blocks,
                transfer_id=transfer_id,
                destination=link.peer,
                layout_id=None,
            )
        except TicketRefusedError as error:
            link.refuse(transfer_id, error.reason.value)
            return
        link.open(grant)
        keys = dict.fromkeys(keys_of(pull.keys))
        layout_id = grant.ticket.layout_id
        if pull.ahead is Computed.COMPUTING:
            ahead = self._ahead[transfer_id] = AwaitedBlocks(keys)
            self._run(self._send_ahead(link, transfer_id, layout_id, ahead))
        else:
            self.start(link, transfer_id, layout_id, keys, tell_missing=True)

    def start(
        self,
        link: OutboundLink,
        transfer_id: bytes,
        layout_id: bytes,
        keys: Iterable[BlockKey],
        *,
        tell_missing: bool,
    ) -> None:
        """Send blocks in memory immediately, others as they are read; then finish.

        Args:
            transfer_id: An open transfer of this link. What is left is not read once it ends.
            keys: The blocks; missing ones are left out.
            tell_missing: True if the peer asked for them and has to know which are not there.
        """
        self._run(self._send(link, transfer_id, layout_id, list(keys), tell_missing=tell_missing))

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ended(self, transfer_id: bytes) -> None:
        """A transfer is over."""
        if transfer_id in self._ahead:
            self._ahead[transfer_id].changed.set()

    async def _send_ahead(
        self, link: OutboundLink, transfer_id: bytes, layout_id: bytes, ahead: AwaitedBlocks
    ) -> None:
        budget = ReadBudget(self._read_limit_s)
        try:
            while link.has(transfer_id) and (heads := ahead.heads()):
                # Watched before the look: what is stored meanwhile is not missed.
                ahead.changed.clear()
                with self.waits.watched([(layout_id, key) for key in heads], ahead.changed):
                    num_sent = 0
                    for key in heads:
                        if await self._push(link, transfer_id, layout_id, key, budget):
                            ahead.sent(key)
                            num_sent += 1
                    if not num_sent and not await _within(ahead.changed, ahead.left_s()):
                        break
        finally:
            del self._ahead[transfer_id]
        link.finish(transfer_id, ahead.rest())

    async def _send(
        self,
        link: OutboundLink,
        transfer_id: bytes,
        layout_id: bytes,
        keys: list[BlockKey],
        *,
        tell_missing: bool,
    ) -> None:
        missing, budget = list[BlockKey](), ReadBudget(self._read_limit_s)
        for key in keys:
            if not link.has(transfer_id):
                return
            if not await self._push(link, transfer_id, layout_id, key, budget):
                missing.append(key)
        link.finish(transfer_id, missing if tell_missing else ())

    async def _push(
        self,
        link: OutboundLink,
        transfer_id: bytes,
        layout_id: bytes,
        key: BlockKey,
        budget: ReadBudget,
    ) -> bool:
        while (block := await self._store.fetch(layout_id, key, budget)) is None:
            if (layout_id, key) not in self._store or not link.has(transfer_id):
                return False
            if budget.left_s == 0:
                return False
            # Memory is full of blocks that wait for the link.
            await asyncio.sleep(ROOM_RETRY_S)
        link.push(transfer_id, layout_id, key, block)
        return True


async def _within(event: asyncio.Event, left_s: float | None) -> bool:
    """Wait for an event; False if the time is over."""
    try:
        async with asyncio.timeout(left_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
