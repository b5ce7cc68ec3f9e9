"""The connections of a link at its sending end: dialled, kept warm, measured and paced.

A link is one connection for messages, on the node's event loop, and several data connections on its
lanes. It is up while both kinds stand. What is said and sent over them: `outbound_link.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import ssl
from collections.abc import Callable
from typing import Protocol

from prfaas.core.transfer.link_encryption import WIRE_NAMES, LinkEncryption
from prfaas.core.transfer.pacing import Pacer, PathLoss, num_connections
from prfaas.errors import PeerError, words_of
from prfaas.logs import log_event
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.net.busy import BusyMeter
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.send.data_sender import DataSenders
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.pool.send.link_meter import SAMPLE_NS, LinkMeter, SampleCount
from prfaas.pool.send.send_limits import SendLimits
from prfaas.pool.send.send_queue import SendQueue
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_S
from prfaas.wire.allow_list import AllowList
from prfaas.wire.channel import Channel, keep_alive
from prfaas.wire.frames import Frame
from prfaas.wire.identity import LinkContexts, peer_name
from prfaas.wire.messages.base import Message, Ping, Pong
from prfaas.wire.messages.gateway import LinkTelemetry
from prfaas.wire.messages.link import PoolHello, Resumed
from prfaas.wire.sealed.keys import SECRET_BYTES, LinkSecret
from prfaas.wire.sockets import happy_eyeballs_s, prepare_messages, tcp_info

log = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.1, 1.0
REFUSED_RETRY_MAX_S = 10.0
"""A peer that refuses us does so until its settings change."""
STABLE_S = 5.0
"""After a connection that lasted this long, the next attempt follows immediately."""
CONNECT_TIMEOUT_S = 5.0


class LinkUser(Protocol):
    """Traffic of a link."""

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""

    @property
    def open_arrived_bytes(self) -> int:
        """Blocks of open transfers that the peer has."""

    def met(self, channel: Channel) -> None:
        """The peer has proven its name."""

    def hello(self, link: str) -> PoolHello:
        """First message of a new connection; `link` identifies it."""

    def on_frame(self, channel: Channel, frame: Frame) -> None:
        """Handle a message of the peer."""

    def on_state(self) -> None:
        """The link came up or went down."""

    def on_report(self) -> None:
        """Handle a new measurement of a busy link."""


class Dialer:
    """Keeps one link up.

    Args:
        user: What goes over it.
        peer: Name of the other pool; its certificate has to have this name.
        address: Its host and port.
        io: Where the data connections live.
        coding: How fragments are coded.
        budget_bits_per_s: What all data connections together may send; 0 is no limit.
        connections: Data connections; 0 is as many as budget and round trip ask for.
        limits: Of the data connections.
        expected: The peer, as its certificates have to name it.
    """

    def __init__(
        self,
        user: LinkUser,
        *,
        pool: str,
        peer: str,
        address: tuple[str, int],
        tls: LinkContexts,
        metrics: PoolMetrics,
        io: IoThread,
        queue: SendQueue,
        coding: LinkCoding,
        clock_ns: Callable[[], int],
        budget_bits_per_s: int,
        connections: int,
        limits: SendLimits,
        expected: AllowList,
    ) -> None:
        self._limits, self._expected = limits, expected
        self.peer = peer
        self._user = user
        self._pool = pool
        self._address = address
        self._tls = tls
        self._metrics = metrics
        self._io = io
        self._queue = queue
        self._coding = coding
        self._busy = BusyMeter(lambda: io.thread_id)
        self._receiver_busy = 0.0
        self._clock_ns = clock_ns
        self._own_bits_per_s = self._budget_bits_per_s = budget_bits_per_s
        self._connections = connections
        self._channel: Channel | None = None
        self._senders: DataSenders | None = None
        self._welcome = asyncio.Event()
        self._link = ""
        self._num_max = 0
        """Data connections that the peer takes; 0 is no limit."""
        self._secret: LinkSecret | None = None
        self._refusal = ""
        self._lost = ""
        self._numbers = itertools.count()
        self._was_up = False
        self._meter = LinkMeter(budget_bits_per_s)
        self._pacer = Pacer(budget_bits_per_s)
        self._loss = PathLoss()

    @property
    def is_up(self) -> bool:
        """Return True if blocks can be sent to the peer, and it is the expected one."""
        return (
            self._channel is not None
            and self._channel.is_open
            and self._senders is not None
            and self._senders.num_open > 0
        )

    @property
    def is_welcome(self) -> bool:
        """Return True if the peer has said what it has, so that messages about transfers make
        sense."""
        return self._welcome.is_set()

    @property
    def telemetry(self) -> LinkTelemetry:
        """Latest measurements."""
        arrived = self._user.open_arrived_bytes
        return self._meter.telemetry(
            self._clock_ns(),
            open_arrived_bytes=arrived,
            queued_by_tenant=self._queue.queued_by_tenant,
            coding_ratio=self._coding.ratio,
            encryption=self._encryption.value,
        )

    @property
    def _encryption(self) -> LinkEncryption:
        """Protection of the data connections."""
        if self._senders is not None and self._senders.secret is None:
            return LinkEncryption.TLS
        return self._secret.encryption if self._secret is not None else LinkEncryption.TLS

    def limit(self, bits_per_s: int, idle_bits_per_s: int) -> None:
        """Send no more than that from now on; the budget of the link itself stays a limit."""
        bits_per_s = min(bits_per_s, self._own_bits_per_s or bits_per_s)
        idle_bits_per_s = min(idle_bits_per_s, self._own_bits_per_s or idle_bits_per_s)
        self._meter.limit(bits_per_s, idle_bits_per_s)
        if bits_per_s != self._budget_bits_per_s:
            self._budget_bits_per_s = bits_per_s
            self._pacer.limit(bits_per_s)
            if self._senders is not None:
                self._senders.tune(0, self._pacer.bits_per_s, 0, self._meter.path_rtt_ns)

    def set_budget(self, bits_per_s: int) -> None:
        """Change the budget of the link itself, 0 is no limit; its connections stay open."""
        if bits_per_s != self._own_bits_per_s:
            self._own_bits_per_s = bits_per_s
            self.limit(bits_per_s, bits_per_s)

    def seconds_to_send(self, num_bytes: int) -> float | None:
        """Expected time of a transfer of that many bytes; None if unknown."""
        return self._meter.seconds_to_send(num_bytes, self._coding.ratio)

    def send(self, message: Message) -> None:
        """Send it if there is a connection; important messages are repeated on the next one."""
        if self._channel is not None:
            self._channel.send(message)

    def welcomed(self, resumed: Resumed) -> None:
        """The peer has said what it has, and how blocks are protected.

        Raises:
            PeerError: There can be no keys of its secret.
        """
        self._num_max = resumed.connections
        for encryption, name in WIRE_NAMES.items():
            if name == resumed.encryption:
                if len(resumed.secret) != SECRET_BYTES:
                    raise PeerError(f"{self.peer} sends a secret of {len(resumed.secret)} bytes")
                ends = self._pool, self.peer, self._link
                self._secret = LinkSecret(encryption, *ends, resumed.secret)
        self._welcome.set()

    def allowed(self, num_max: int) -> None:
        """The peer takes that many data connections of this link from now on."""
        self._num_max = num_max
        if self._senders is not None:
            self._senders.allow(num_max)

    def refused(self, reason: str) -> None:
        """Handle the peer's reason for the end of the connection."""
        self._refusal = reason

    def heard(self, pong: Pong) -> None:
        """The peer answered a ping."""
        now = self._clock_ns()
        self._meter.rtt_ns = max(0, now - pong.at_ns)
        self._receiver_busy = pong.busy
        if self._senders is not None:
            self._senders.received(pong.received, now)

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        delay, said = RETRY_MIN_S, ""
        loop = asyncio.get_running_loop()
        while True:
            closed = asyncio.Event()
            began, reason, self._refusal, self._lost = loop.time(), "", "", ""
            try:
                await self._connect(closed)
                await self._serve(closed)
            except (OSError, ssl.SSLError, TimeoutError) as error:
                reason = words_of(error)
            finally:
                was_welcome = self.is_welcome
                self._disconnect()
            if self._refusal:
                reason = f"it refuses us: {self._refusal}"
            elif not was_welcome:
                reason = reason or self._lost
            if reason and reason != said:
                log.warning("link to %s: no connection, tried again: %s", self.peer, reason)
            said = "" if was_welcome else reason
            most = REFUSED_RETRY_MAX_S if self._refusal and not was_welcome else RETRY_MAX_S
            delay = RETRY_MIN_S if loop.time() - began > STABLE_S else min(2 * delay, most)
            await asyncio.sleep(delay)

    async def _connect(self, closed: asyncio.Event) -> None:
        def lost(_: Channel, reason: str) -> None:
            if self.is_welcome:
                log_event(log, logging.WARNING, "link_down", peer=self.peer, why=reason)
            self._lost = reason
            closed.set()
            self._update()

        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, self._channel = await loop.create_connection(
                lambda: Channel(self._user.on_frame, lost, self._greet),
                *self._address,
                ssl=self._tls.messages,
                happy_eyeballs_delay=await happy_eyeballs_s(*self._address),
            )

    def _greet(self, channel: Channel) -> None:
        if channel.socket is not None:
            prepare_messages(channel.socket)
        channel.peer = peer_name(channel.ssl_object, self._expected)
        self._user.met(channel)
        self._link = secrets.token_hex(16)
        channel.send(self._user.hello(self._link))

    async def _serve(self, closed: asyncio.Event) -> None:
        channel = self._channel
        if channel is None or not channel.is_open:
            return
        tasks = [asyncio.create_task(keep_alive(channel))]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if not await self._until_welcome(closed):
                    return
            self._meter.restart()
            self._senders = self._open_data(channel)
            tasks.append(asyncio.create_task(self._measure(channel, self._senders)))
            await closed.wait()
        finally:
            channel.close("this pool node stops")
            try:
                await cancel_all(tasks)
            finally:
                if self._senders is not None:
                    await self._senders.close()

    async def _until_welcome(self, closed: asyncio.Event) -> bool:
        """Wait for the peer's list of its blocks; False if it disconnects first."""
        waits = [asyncio.create_task(event.wait()) for event in (self._welcome, closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._welcome.is_set() and not closed.is_set()

    def _open_data(self, channel: Channel) -> DataSenders:
        connection = channel.socket
        if connection is None:
            raise OSError("the connection for messages is gone")
        rtt_ns = tcp_info(connection).rtt_ns
        return DataSenders(
            # The address that answered: of several, others may be dead, or of another pool node.
            address=connection.getpeername()[:2],
            tls=self._tls.data,
            peer=self.peer,
            pool=self._pool,
            link=self._link,
            secret=self._secret,
            queue=self._queue,
            coding=self._coding,
            numbers=lambda: next(self._numbers),
            num_connections=self._connections or num_connections(self._budget_bits_per_s, rtt_ns),
            num_max=self._num_max,
            pacing_bits_per_s=self._pacer.bits_per_s,
            io=self._io,
            on_change=self._update,
            limits=self._limits,
            expected=self._expected,
        )

    async def _measure(self, channel: Channel, senders: DataSenders) -> None:
        """Sample the connections, and report while the link is busy."""
        was_busy, looks = False, SampleCount()
        while True:
            queue, now = self._queue, self._clock_ns()
            is_idle = not (self._user.num_open or queue.queued_bytes or queue.in_flight_bytes)
            if not looks.is_due(is_idle=is_idle):
                await asyncio.sleep(SAMPLE_NS / NS_PER_S)
                continue
            infos = senders.tcp_infos()
            self._meter.sample(now, infos, queue.queued_bytes, queue.in_flight_bytes)
            self._loss.sample(infos)
            self._tune(senders, now)
            self._coding.sample(
                self._meter.fresh_bits_per_s / 8,
                self._busy.share(),
                self._receiver_busy,
                self._meter.network_share,
            )
            self._metrics.set_link(self.peer, self.telemetry)
            self._metrics.set_encryption(self.peer, "sent", self._encryption)
            if looks.is_report:
                channel.send(Ping(at_ns=self._clock_ns(), connections=senders.connections))
                if (self._user.num_open or was_busy) and self.is_up:
                    self._user.on_report()
                was_busy = self._user.num_open > 0
            await asyncio.sleep(SAMPLE_NS / NS_PER_S)

    def _tune(self, senders: DataSenders, now_ns: int) -> None:
        """Adapt pacing, fragments and the number of connections to the measurements."""
        meter = self._meter
        pace = self._pacer.sample(
            now_ns, meter.fresh_bits_per_s, meter.path_rtt_ns, senders.num_open
        )
        if meter.fresh_bits_per_s:
            rate = self.telemetry.goodput_bits_per_s
            wanted = self._connections or num_connections(
                max(rate, self._budget_bits_per_s),
                meter.path_rtt_ns,
                is_lossy=self._loss.is_lossy,
            )
            if pace.restart:
                senders.restart_control()
            paced = round(pace.bits_per_s * self._pacer.slack)
            senders.tune(wanted, paced, rate, meter.path_rtt_ns)

    def _disconnect(self) -> None:
        self._channel = self._senders = self._secret = None
        self._coding.agree(())
        self._welcome.clear()
        self._update()

    def _update(self) -> None:
        """Report if the link came up or went down."""
        if self.is_up == self._was_up:
            return
        self._was_up = self.is_up
        if self._was_up:
            log_event(log, logging.INFO, "link_up", peer=self.peer)
        self._metrics.link_up.labels(peer=self.peer).set(self._was_up)
        self._user.on_state()
