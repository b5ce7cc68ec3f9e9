"""The sending end of a link: dials a peer pool, keeps the connection warm, pushes blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.core.blocks import BlockKey
from prfaas.core.transfers import Transfer, TransferEvent
from prfaas.errors import PeerError
from prfaas.pool.metrics import PoolMetrics
from prfaas.pool.store import StoredBlock
from prfaas.wire.channel import Channel
from prfaas.wire.frames import BlockFrame, Frame
from prfaas.wire.identity import peer_name
from prfaas.wire.liveness import keep_alive
from prfaas.wire.messages import Abort, Commit, Offer, Ping, PoolHello, decode

log = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0
STABLE_S = 5.0
"""A connection that lasted this long was a good one: the next try follows at once."""
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Block:
    """A block waiting to be sent; pinned while it waits."""

    transfer: Transfer
    layout_id: bytes
    key: BlockKey
    block: StoredBlock


class OutboundLink:
    """Pushes the blocks of transfers to one peer, in the order they were stored.

    One connection, first come first served. Blocks are pinned in the store from the moment they
    are queued until they are written or their transfer ends.

    Args:
        pool: Our own name.
        epoch: Our event epoch, for the hello.
        peer: Name of the other pool; its certificate has to say the same.
        address: Its host and port.
        tls: Context with our identity.
        on_change: Told when the link comes up or goes down.
        on_ended: Told once of every transfer that ended here.
        clock_ns: Monotonic clock, nanoseconds.
        lifetime_ns: How long a transfer may stay open.
    """

    def __init__(
        self,
        *,
        pool: str,
        epoch: str,
        peer: str,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        metrics: PoolMetrics,
        on_change: Callable[[], None],
        on_ended: Callable[[Transfer], None],
        clock_ns: Callable[[], int],
        lifetime_ns: int,
    ) -> None:
        self.peer = peer
        self._hello = PoolHello(pool=pool, epoch=epoch)
        self._address = address
        self._tls = tls
        self._metrics = metrics
        self._on_change = on_change
        self._on_ended = on_ended
        self._clock_ns = clock_ns
        self._lifetime_ns = lifetime_ns
        self._channel: Channel | None = None
        self._transfers: dict[bytes, Transfer] = {}
        self._queue: deque[_Block | Commit] = deque()
        self._work = asyncio.Event()

    # --- what the node asks for ---

    @property
    def is_up(self) -> bool:
        """Whether the connection stands and the peer is who it should be."""
        return self._channel is not None and self._channel.is_open

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    def open(self, transfer_id: bytes) -> None:
        """Start a transfer; without a link it is aborted at once."""
        if transfer_id in self._transfers:
            return
        now = self._clock_ns()
        transfer = Transfer(transfer_id, self.peer, now, now + self._lifetime_ns)
        self._transfers[transfer_id] = transfer
        if self._channel is None or not self.is_up:
            self._end(transfer, TransferEvent.ABORT, "link_down")
            return
        self._channel.send(Offer(transfer_id=transfer_id))

    def push(self, transfer_id: bytes, layout_id: bytes, key: BlockKey, block: StoredBlock) -> None:
        """Queue one block; ignored if the transfer has ended."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            block.pins += 1
            self._queue.append(_Block(transfer, layout_id, key, block))
            self._work.set()

    def finish(self, transfer_id: bytes) -> None:
        """No more blocks will be pushed: commit once all are sent."""
        if transfer_id in self._transfers:
            self._queue.append(Commit(transfer_id=transfer_id, num_blocks=0))
            self._work.set()

    def abort(self, transfer_id: bytes, reason: str, *, tell_peer: bool) -> None:
        """Give a transfer up; harmless if it has ended."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        if tell_peer and self._channel is not None:
            self._channel.send(Abort(transfer_id=transfer_id, reason=reason))
        self._end(transfer, TransferEvent.ABORT, reason)

    def expire(self) -> None:
        """End what has been open for too long."""
        now = self._clock_ns()
        for transfer in list(self._transfers.values()):
            if now >= transfer.deadline_ns:
                self._end(transfer, TransferEvent.EXPIRE, "lifetime")

    # --- the connection ---

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        loop = asyncio.get_running_loop()
        delay = RETRY_MIN_S
        while True:
            closed = asyncio.Event()
            began = loop.time()
            try:
                await self._connect(closed)
                await self._serve(closed)
            except (OSError, ssl.SSLError, TimeoutError) as error:
                log.info("link to %s: no connection (%r)", self.peer, error)
            delay = RETRY_MIN_S if loop.time() - began > STABLE_S else min(2 * delay, RETRY_MAX_S)
            await asyncio.sleep(delay)

    async def _connect(self, closed: asyncio.Event) -> None:
        def lost(_: Channel, reason: str) -> None:
            log.warning("link to %s is down: %s", self.peer, reason)
            closed.set()
            self._lost()

        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, self._channel = await loop.create_connection(
                lambda: Channel(self._on_frame, lost, self._greet), *self._address, ssl=self._tls
            )

    def _greet(self, channel: Channel) -> None:
        channel.peer = peer_name(channel.ssl_object, frozenset({self.peer}))
        channel.send(self._hello)

    async def _serve(self, closed: asyncio.Event) -> None:
        channel = self._channel
        if channel is None or not channel.is_open:
            return
        log.info("link to %s is up", self.peer)
        self._metrics.link_up.labels(peer=self.peer).set(1)
        self._on_change()
        tasks = [asyncio.create_task(keep_alive(channel)), asyncio.create_task(self._send(channel))]
        try:
            await closed.wait()
        finally:
            channel.close("this pool node stops")
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, channel: Channel) -> None:
        while True:
            await self._work.wait()
            while self._queue:
                await channel.drained()
                if not channel.is_open:
                    return
                if self._queue:  # What waited may have been given up meanwhile.
                    self._send_next(channel)
            self._work.clear()

    def _send_next(self, channel: Channel) -> None:
        item = self._queue.popleft()
        if isinstance(item, Commit):
            self._commit(channel, item.transfer_id)
            return
        item.block.pins -= 1
        channel.send_block(
            BlockFrame(
                item.transfer.transfer_id,
                item.layout_id,
                item.key,
                item.block.digest,
                item.block.data,
            )
        )
        num_bytes = len(item.block.data)
        item.transfer.moved(num_bytes, self._clock_ns())
        self._metrics.link_bytes.labels(peer=self.peer, direction="sent").inc(num_bytes)

    def _commit(self, channel: Channel, transfer_id: bytes) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            channel.send(Commit(transfer_id=transfer_id, num_blocks=transfer.num_blocks))
            self._end(transfer, TransferEvent.COMMIT)

    def _on_frame(self, _: Channel, frame: Frame) -> None:
        if isinstance(frame, BlockFrame):
            raise PeerError("blocks travel the other way on this connection")
        message = decode(frame.payload)
        if isinstance(message, Abort):
            self.abort(message.transfer_id, message.reason, tell_peer=False)
        elif not isinstance(message, Ping):
            raise PeerError(f"{type(message).__name__} has no meaning on a link")

    def _lost(self) -> None:
        self._channel = None
        self._metrics.link_up.labels(peer=self.peer).set(0)
        for transfer in list(self._transfers.values()):
            self._end(transfer, TransferEvent.ABORT, "link_lost")
        for item in self._queue:
            if isinstance(item, _Block):
                item.block.pins -= 1
        self._queue.clear()
        self._on_change()

    def _end(self, transfer: Transfer, event: TransferEvent, reason: str = "") -> None:
        if transfer.apply(event, reason):
            del self._transfers[transfer.transfer_id]
            self._let_go(transfer)
            self._on_ended(transfer)

    def _let_go(self, transfer: Transfer) -> None:
        """Take what waits out of the queue: the link may not take anything for a while."""
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if isinstance(item, Commit):
                is_over = item.transfer_id == transfer.transfer_id
            else:
                is_over = item.transfer is transfer
                item.block.pins -= is_over
            if not is_over:
                self._queue.append(item)
