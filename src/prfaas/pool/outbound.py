"""The sending end of a link: dials a peer pool, keeps connections warm, pushes blocks.

A link is one connection for messages, on the node's event loop, and several data connections on the
I/O thread. It is up while both kinds stand. A transfer outlives its connections: what the peer has
not said to have goes again when the link is back, and only when it stays away for longer than the
grace time are transfers given up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prfaas.core.blocks import BlockKey, BlockName
from prfaas.core.link_share import OutgoingBlock
from prfaas.core.pacing import Pacer
from prfaas.core.tickets import Refusal
from prfaas.core.transfers import Transfer, TransferEvent, TransferState
from prfaas.errors import PeerError
from prfaas.pool.data_out import DataSenders, SendQueue
from prfaas.pool.io_thread import IoThread
from prfaas.pool.link_meter import SAMPLE_NS, LinkMeter
from prfaas.pool.metrics import PoolMetrics
from prfaas.pool.store import StoredBlock
from prfaas.pool.tickets import Grant
from prfaas.units import NS_PER_S
from prfaas.wire.channel import Channel
from prfaas.wire.frames import BlockFrame, Frame
from prfaas.wire.identity import LinkContexts, peer_name
from prfaas.wire.liveness import keep_alive
from prfaas.wire.messages import (
    Abort,
    Accepted,
    AnyMessage,
    Arrived,
    Commit,
    Committed,
    LinkTelemetry,
    Offer,
    Ping,
    Pong,
    PoolHello,
    Pull,
    Refused,
    Resumed,
    decode,
    keys_of,
    wire_keys,
)
from prfaas.wire.sockets import prepare_messages, tcp_info

log = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.1, 1.0
STABLE_S = 5.0
"""A connection that lasted this long was a good one: the next try follows at once."""
CONNECT_TIMEOUT_S = 5.0
CONNECTIONS_MIN, CONNECTIONS_MAX = 2, 16
FAR_CONNECTIONS_MIN, FAR_RTT_NS = 4, 5_000_000
"""Over far paths one connection that lost a segment must not slow the others' blocks down."""
WINDOW_BYTES = 2_700_000
"""What a connection moves per round trip under Linux's default limit on send buffers, 4 MiB."""
TELEMETRY_EVERY = 5
"""Samples between two reports of a busy link."""


def num_connections(bits_per_s: int, rtt_ns: int) -> int:
    """Data connections of a link: enough windows for what it carries, and one more."""
    in_flight_bytes = bits_per_s / 8 * rtt_ns / NS_PER_S
    wanted = math.ceil(in_flight_bytes / WINDOW_BYTES) + 1
    least = FAR_CONNECTIONS_MIN if rtt_ns >= FAR_RTT_NS else CONNECTIONS_MIN
    return max(least, min(CONNECTIONS_MAX, wanted))


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A transfer and its blocks."""

    transfer: Transfer
    sealed: bytes
    """Its ticket."""
    tenant: str
    blocks: dict[BlockName, StoredBlock] = field(default_factory=dict)
    """Pushed and not known to have arrived; pinned."""
    names: set[BlockName] = field(default_factory=set)
    """All that were pushed."""
    pushed_bytes: int = 0
    missing: list[BlockKey] = field(default_factory=list)
    """What the peer asked for and is not here."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be pushed."""
        return self.transfer.state is TransferState.SENT


class OutboundLink:
    """Pushes the blocks of transfers to one peer.

    Blocks are pinned in the store from the moment they are queued until the peer has them or their
    transfer ends.

    Args:
        pool: Our own name.
        epoch: Our event epoch, for the hello.
        peer: Name of the other pool; its certificate has to say the same.
        address: Its host and port.
        tls: Our identity.
        io: Where the data connections live.
        on_change: Told when the link comes up or goes down.
        on_ended: Told once of every transfer that ended here.
        clock_ns: Monotonic clock, nanoseconds.
        on_over: Told of a transfer that was given up because its ticket allows no more.
        on_pull: Told of the blocks that the peer asks for.
        grace_ns: How long transfers wait for a link that broke.
        budget_bits_per_s: What all data connections together may send; 0 is no limit.
        connections: Data connections; 0 is as many as budget and round trip ask for.
    """

    def __init__(
        self,
        *,
        pool: str,
        epoch: str,
        peer: str,
        address: tuple[str, int],
        tls: LinkContexts,
        metrics: PoolMetrics,
        io: IoThread,
        on_change: Callable[[], None],
        on_ended: Callable[[Transfer], None],
        clock_ns: Callable[[], int],
        on_over: Callable[[Transfer], None],
        on_pull: Callable[[Pull], None],
        grace_ns: int,
        budget_bits_per_s: int = 0,
        connections: int = 0,
    ) -> None:
        self.peer = peer
        self._pool = pool
        self._epoch = epoch
        self._address = address
        self._tls = tls
        self._metrics = metrics
        self._io = io
        self._on_change = on_change
        self._on_ended = on_ended
        self._clock_ns = clock_ns
        self._on_over = on_over
        self._on_pull = on_pull
        self._grace_ns = grace_ns
        self._budget_bits_per_s = budget_bits_per_s
        self._connections = connections
        self._channel: Channel | None = None
        self._senders: DataSenders | None = None
        self._resumed = asyncio.Event()
        self._peer_epoch = ""
        self._link = ""
        self._numbers = itertools.count()
        self._was_up = False
        self._down_since_ns = -grace_ns
        self._transfers: dict[bytes, _Outgoing] = {}
        sent = metrics.link_bytes.labels(peer=peer, direction="sent")
        self._queue = SendQueue(sent.inc)
        self._meter = LinkMeter(budget_bits_per_s)
        self._pacer = Pacer(budget_bits_per_s)

    # --- what the node asks for ---

    @property
    def is_up(self) -> bool:
        """Whether blocks can be sent to the peer, and it is who it should be."""
        return (
            self._channel is not None
            and self._channel.is_open
            and self._senders is not None
            and self._senders.num_open > 0
        )

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    @property
    def telemetry(self) -> LinkTelemetry:
        """What was measured last."""
        arrived = sum(outgoing.transfer.num_bytes for outgoing in self._transfers.values())
        return self._meter.telemetry(self._clock_ns(), open_arrived_bytes=arrived)

    def seconds_to_send(self, num_bytes: int) -> float | None:
        """What a transfer of that many bytes would take now; None if nothing is known."""
        return self._meter.seconds_to_send(num_bytes)

    def open(self, grant: Grant) -> None:
        """Start a transfer; without a link, and none to be hoped for, it is aborted at once."""
        ticket, now = grant.ticket, self._clock_ns()
        if ticket.transfer_id in self._transfers:
            return
        transfer = Transfer(
            ticket.transfer_id,
            self.peer,
            now,
            now + grant.lifetime_ns,
            ticket.layout_id,
            ticket.bytes_max,
        )
        outgoing = self._transfers[ticket.transfer_id] = _Outgoing(
            transfer, grant.sealed, ticket.tenant
        )
        if not self.is_up and self._is_given_up():
            self._end(transfer, TransferEvent.ABORT, "link_down")
        elif self._resumed.is_set():
            self._offer(outgoing)

    def push(self, transfer_id: bytes, layout_id: bytes, key: BlockKey, block: StoredBlock) -> None:
        """Queue one block; ignored if the transfer has ended or has it already."""
        outgoing = self._transfers.get(transfer_id)
        name = layout_id, key
        if outgoing is None or name in outgoing.names:
            return
        outgoing.pushed_bytes += len(block.data)
        if outgoing.pushed_bytes > outgoing.transfer.bytes_max:
            self._over_budget(outgoing.transfer)
            return
        block.pins += 1
        outgoing.names.add(name)
        outgoing.blocks[name] = block
        self._queue.add(OutgoingBlock(transfer_id, name, block.digest, block.data, outgoing.tenant))

    def finish(self, transfer_id: bytes, missing: Iterable[BlockKey] = ()) -> None:
        """No more blocks will be pushed: the peer commits once all are there.

        Args:
            transfer_id: The transfer.
            missing: What the peer asked for and is not here.
        """
        outgoing = self._transfers.get(transfer_id)
        if outgoing is not None and outgoing.transfer.apply(TransferEvent.SEND):
            outgoing.missing = list(missing)
            outgoing.transfer.num_missing = len(outgoing.missing)
            self._queue.finish(transfer_id)
            if self._resumed.is_set():
                self._announce_end(outgoing)

    def has(self, transfer_id: bytes) -> bool:
        """Whether this transfer is open here."""
        return transfer_id in self._transfers

    def refuse(self, transfer_id: bytes, reason: str) -> None:
        """Tell the peer that what it asked for will not be sent."""
        self._send(Refused(transfer_id=transfer_id, reason=reason))

    def abort(self, transfer_id: bytes, reason: str, *, tell_peer: bool) -> None:
        """Give a transfer up; harmless if it has ended."""
        outgoing = self._transfers.get(transfer_id)
        if outgoing is None:
            return
        if tell_peer:
            self._send(Abort(transfer_id=transfer_id, reason=reason))
        self._end(outgoing.transfer, TransferEvent.ABORT, reason)

    def expire(self) -> None:
        """End what has been open for too long, or waits too long for the link."""
        now = self._clock_ns()
        for outgoing in list(self._transfers.values()):
            if now >= outgoing.transfer.deadline_ns:
                self._end(outgoing.transfer, TransferEvent.EXPIRE, "lifetime")
        if not self.is_up and self._is_given_up():
            self._give_up("link_lost")

    # --- the connections ---

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        delay, said = RETRY_MIN_S, ""
        loop = asyncio.get_running_loop()
        while True:
            closed = asyncio.Event()
            began = loop.time()
            try:
                await self._connect(closed)
                said = ""
                await self._serve(closed)
            except (OSError, ssl.SSLError, TimeoutError) as error:
                reason = str(error) or repr(error)
                if reason != said:
                    log.info("link to %s: no connection, tried again: %s", self.peer, reason)
                said = reason
            finally:
                self._disconnect()
            delay = RETRY_MIN_S if loop.time() - began > STABLE_S else min(2 * delay, RETRY_MAX_S)
            await asyncio.sleep(delay)

    async def _connect(self, closed: asyncio.Event) -> None:
        def lost(_: Channel, reason: str) -> None:
            log.warning("link to %s is down: %s", self.peer, reason)
            closed.set()
            self._update()

        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, self._channel = await loop.create_connection(
                lambda: Channel(self._on_frame, lost, self._greet),
                *self._address,
                ssl=self._tls.messages,
            )

    def _greet(self, channel: Channel) -> None:
        if channel.socket is not None:
            prepare_messages(channel.socket)
        channel.peer = peer_name(channel.ssl_object, frozenset({self.peer}))
        self._link = secrets.token_hex(16)
        hello = PoolHello(
            pool=self._pool, epoch=self._epoch, resumes=list(self._transfers), link=self._link
        )
        channel.send(hello)

    async def _serve(self, closed: asyncio.Event) -> None:
        channel = self._channel
        if channel is None or not channel.is_open:
            return
        tasks = [asyncio.create_task(keep_alive(channel))]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if not await self._welcomed(closed):
                    return
            self._senders = self._open_data(channel)
            tasks.append(asyncio.create_task(self._measure(channel, self._senders)))
            await closed.wait()
        finally:
            channel.close("this pool node stops")
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                if self._senders is not None:
                    await self._senders.close()

    async def _welcomed(self, closed: asyncio.Event) -> bool:
        """Wait until the peer has said what it has; False if it leaves first."""
        waits = [asyncio.create_task(event.wait()) for event in (self._resumed, closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._resumed.is_set() and not closed.is_set()

    def _open_data(self, channel: Channel) -> DataSenders:
        connection = channel.socket
        rtt_ns = tcp_info(connection).rtt_ns if connection is not None else 0
        return DataSenders(
            address=self._address,
            tls=self._tls.data,
            peer=self.peer,
            pool=self._pool,
            link=self._link,
            queue=self._queue,
            numbers=lambda: next(self._numbers),
            num_connections=self._connections or num_connections(self._budget_bits_per_s, rtt_ns),
            pacing_bits_per_s=self._pacer.bits_per_s,
            io=self._io,
            on_change=self._update,
        )

    async def _measure(self, channel: Channel, senders: DataSenders) -> None:
        """Sample the connections, and report while the link is busy."""
        was_busy = False
        for count in itertools.count():
            queue, now = self._queue, self._clock_ns()
            self._meter.sample(now, senders.tcp_infos(), queue.queued_bytes, queue.in_flight_bytes)
            self._tune(senders, now)
            self._metrics.set_link(self.peer, self.telemetry)
            if count % TELEMETRY_EVERY == 0:
                channel.send(Ping(at_ns=self._clock_ns(), connections=senders.connections))
                if (self._transfers or was_busy) and self.is_up:
                    self._on_change()
                was_busy = bool(self._transfers)
            await asyncio.sleep(SAMPLE_NS / NS_PER_S)

    def _tune(self, senders: DataSenders, now_ns: int) -> None:
        """Fit pacing, fragments and the number of connections to what was measured."""
        meter = self._meter
        ceiling = self._pacer.sample(now_ns, meter.fresh_bits_per_s, meter.path_rtt_ns)
        if meter.fresh_bits_per_s:
            rate = self.telemetry.goodput_bits_per_s
            wanted = self._connections or num_connections(rate, meter.path_rtt_ns)
            senders.tune(wanted, ceiling, rate)

    def _disconnect(self) -> None:
        self._channel = self._senders = None
        self._resumed.clear()
        self._update()

    def _update(self) -> None:
        """Say so if the link came up or went down."""
        if self.is_up == self._was_up:
            return
        self._was_up = self.is_up
        if self._was_up:
            log.info("link to %s is up", self.peer)
        else:
            self._down_since_ns = self._clock_ns()
        self._metrics.link_up.labels(peer=self.peer).set(self._was_up)
        self._on_change()
        self.expire()

    def _is_given_up(self) -> bool:
        return self._clock_ns() - self._down_since_ns >= self._grace_ns

    # --- what the peer says ---

    def _on_frame(self, _: Channel, frame: Frame) -> None:
        if isinstance(frame, BlockFrame):
            raise PeerError("blocks travel the other way on this connection")
        message = decode(frame.payload)
        match message:
            case Ping():
                return
            case Pong():
                self._heard(message)
            case Resumed():
                self._resume(message.epoch)
            case Arrived():
                for key in keys_of(message.keys):
                    self._arrived(message.transfer_id, (message.layout_id, key))
            case Pull():
                self._on_pull(message)
            case Accepted():
                self._answered(message.transfer_id, TransferEvent.ACCEPT)
            case Refused():
                self._answered(message.transfer_id, TransferEvent.REFUSE, message.reason)
            case Committed():
                self._committed(message.transfer_id)
            case Abort():
                self.abort(message.transfer_id, message.reason, tell_peer=False)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning on a link")

    def _heard(self, pong: Pong) -> None:
        now = self._clock_ns()
        self._meter.rtt_ns = max(0, now - pong.at_ns)
        if self._senders is not None:
            self._senders.received(pong.received, now)

    def _resume(self, peer_epoch: str) -> None:
        """The peer has said what it has; go on with the rest."""
        if self._peer_epoch not in ("", peer_epoch):
            self._give_up("peer_restarted")
        self._peer_epoch = peer_epoch
        self._resumed.set()
        for outgoing in self._transfers.values():
            self._offer(outgoing)
            if outgoing.is_finished:
                self._announce_end(outgoing)

    def _offer(self, outgoing: _Outgoing) -> None:
        self._send(Offer(transfer_id=outgoing.transfer.transfer_id, ticket=outgoing.sealed))

    def _answered(self, transfer_id: bytes, event: TransferEvent, reason: str = "") -> None:
        outgoing = self._transfers.get(transfer_id)
        if outgoing is not None:
            self._end(outgoing.transfer, event, reason)

    def _arrived(self, transfer_id: bytes, name: BlockName) -> None:
        outgoing = self._transfers.get(transfer_id)
        block = outgoing.blocks.pop(name, None) if outgoing is not None else None
        if outgoing is None or block is None:
            return
        block.pins -= 1
        self._queue.arrived(transfer_id, name)
        outgoing.transfer.moved(len(block.data), self._clock_ns())

    def _committed(self, transfer_id: bytes) -> None:
        outgoing = self._transfers.get(transfer_id)
        if outgoing is None:
            return
        if not outgoing.is_finished or outgoing.blocks:
            raise PeerError(f"transfer {transfer_id.hex()} is committed before it is complete")
        self._end(outgoing.transfer, TransferEvent.COMMIT)

    def _announce_end(self, outgoing: _Outgoing) -> None:
        transfer_id = outgoing.transfer.transfer_id
        num_blocks, missing = len(outgoing.names), wire_keys(outgoing.missing)
        self._send(Commit(transfer_id=transfer_id, num_blocks=num_blocks, missing=missing))

    def _send(self, message: AnyMessage) -> None:
        """Say it if there is a connection; what matters is said again on the next one."""
        if self._channel is not None:
            self._channel.send(message)

    # --- ends ---

    def _over_budget(self, transfer: Transfer) -> None:
        """The engine pushes more than the gateway allowed."""
        reason = Refusal.OVERSIZED.value
        self._send(Abort(transfer_id=transfer.transfer_id, reason=reason))
        self._on_over(transfer)
        self._end(transfer, TransferEvent.REFUSE, reason)

    def _give_up(self, reason: str) -> None:
        for transfer_id in list(self._transfers):
            self.abort(transfer_id, reason, tell_peer=True)

    def _end(self, transfer: Transfer, event: TransferEvent, reason: str = "") -> None:
        if not transfer.apply(event, reason) or transfer.is_open:
            return
        outgoing = self._transfers.pop(transfer.transfer_id)
        self._queue.drop(transfer.transfer_id)
        for block in outgoing.blocks.values():
            block.pins -= 1
        self._on_ended(transfer)
