"""Pace, budget and number of connections of a link, by the measurements of its connections."""

from __future__ import annotations

import asyncio
import time

from prfaas.core.facts import FactStream
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.core.transfer.pacing import Pacer, PathLoss, num_connections
from prfaas.core.transfer.sender import Sender
from prfaas.core.transfer.transfer_state import SENT, ChangedLink
from prfaas.pool.net.io_thread import BusyMeter
from prfaas.pool.net.link_end import Destination, LinkEnd
from prfaas.pool.send.data_sender import DataSenders
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.pool.send.link_meter import SAMPLE_NS, LinkMeter, SampleCount
from prfaas.pool.send.send_queue import SendQueue
from prfaas.units import NS_PER_S
from prfaas.wire.channel import Channel
from prfaas.wire.messages.base import Ping, Pong
from prfaas.wire.messages.gateway import LinkTelemetry


class LinkControl:
    """Measures a link, and adapts its data connections.

    Args:
        machine: The transfers of the link.
        facts: Gets a `ChangedLink` while the link is busy.
    """

    def __init__(
        self,
        end: LinkEnd,
        to: Destination,
        machine: Sender,
        queue: SendQueue,
        coding: LinkCoding,
        facts: FactStream,
    ) -> None:
        self._to, self._metrics, self._facts = to, end.metrics, facts
        self._machine, self._queue, self._coding = machine, queue, coding
        self._own_bits_per_s = self._budget_bits_per_s = to.budget_bits_per_s
        self._senders: DataSenders | None = None
        self._busy = BusyMeter(end.io)
        self._receiver_busy = 0.0
        self._meter = LinkMeter(to.budget_bits_per_s)
        self._pacer = Pacer(to.budget_bits_per_s)
        self._loss = PathLoss()

    @property
    def telemetry(self) -> LinkTelemetry:
        """Latest measurements."""
        return self._meter.telemetry(
            time.monotonic_ns(),
            open_arrived_bytes=self._machine.arrived_bytes,
            queued_by_tenant=self._queue.queued_by_tenant,
            coding_ratio=self._coding.ratio,
            encryption=self._encryption.value,
        )

    @property
    def _encryption(self) -> LinkEncryption:
        secret = self._senders.secret if self._senders is not None else None
        return LinkEncryption.TLS if secret is None else secret.encryption

    def limit(self, bits_per_s: int, idle_bits_per_s: int) -> None:
        """Send no more than that from now on, over all data connections together.

        The budget of the link itself stays a limit.

        Args:
            bits_per_s: Limit of the rate.
            idle_bits_per_s: Limit that an idle link would have with something to send.
        """
        bits_per_s = min(bits_per_s, self._own_bits_per_s or bits_per_s)
        idle_bits_per_s = min(idle_bits_per_s, self._own_bits_per_s or idle_bits_per_s)
        self._meter.limit(bits_per_s, idle_bits_per_s)
        if bits_per_s != self._budget_bits_per_s:
            self._budget_bits_per_s = bits_per_s
            self._pacer.limit(bits_per_s)
            if self._senders is not None:
                self._senders.tune(0, self._pacer.bits_per_s, 0, self._meter.path_rtt_ns)

    def set_budget(self, bits_per_s: int) -> None:
        """Change the budget of the link itself, 0 is no limit; its transfers go on."""
        if bits_per_s != self._own_bits_per_s:
            self._own_bits_per_s = bits_per_s
            self.limit(bits_per_s, bits_per_s)

    def answered(self, pong: Pong) -> None:
        """The peer answered a ping."""
        now_ns = time.monotonic_ns()
        self._meter.rtt_ns = max(0, now_ns - pong.at_ns)
        self._receiver_busy = pong.busy
        if self._senders is not None:
            self._senders.received(pong.received, now_ns)

    def allow(self, num_max: int) -> None:
        """The peer takes that many data connections of this link from now on."""
        if self._senders is not None:
            self._senders.allow(num_max)

    def begin(self, senders: DataSenders, rtt_ns: int) -> None:
        """Open the data connections of a session."""
        self._senders = senders
        self._meter.restart()
        wanted = self._to.num_connections or num_connections(self._budget_bits_per_s, rtt_ns)
        senders.tune(wanted, self._pacer.bits_per_s, 0, rtt_ns)

    def end(self) -> None:
        """The session is over."""
        self._senders = None

    async def measure(self, channel: Channel, senders: DataSenders) -> None:
        """Sample the connections of a session, and report while the link is busy."""
        was_busy, looks, queue = False, SampleCount(), self._queue
        while True:
            now_ns, num_open = time.monotonic_ns(), len(self._machine.open)
            is_idle = not (num_open or queue.queued_bytes or queue.in_flight_bytes)
            if looks.is_due(is_idle=is_idle):
                self._sample(senders, now_ns)
                if looks.is_report:
                    ping = Ping(at_ns=time.monotonic_ns(), connections=senders.connections)
                    channel.send(ping)
                    if (num_open or was_busy) and channel.is_open and senders.num_open:
                        self._facts.report(ChangedLink(self._to.peer))
                    was_busy = num_open > 0
            await asyncio.sleep(SAMPLE_NS / NS_PER_S)

    def _sample(self, senders: DataSenders, now_ns: int) -> None:
        infos, meter, queue = senders.tcp_infos(), self._meter, self._queue
        meter.sample(now_ns, infos, queue.queued_bytes, queue.in_flight_bytes)
        self._loss.sample(infos)
        self._tune(senders, now_ns)
        self._coding.sample(
            meter.fresh_bits_per_s / 8,
            self._busy.share(),
            self._receiver_busy,
            meter.network_share,
        )
        self._metrics.set_link(self._to.peer, self.telemetry)
        self._metrics.set_encryption(self._to.peer, SENT, self._encryption)

    def _tune(self, senders: DataSenders, now_ns: int) -> None:
        """Adapt pacing, fragments and the number of connections to the measurements."""
        meter = self._meter
        pace = self._pacer.sample(
            now_ns, meter.fresh_bits_per_s, meter.path_rtt_ns, senders.num_open
        )
        if meter.fresh_bits_per_s:
            rate = self.telemetry.goodput_bits_per_s
            wanted = self._to.num_connections or num_connections(
                max(rate, self._budget_bits_per_s),
                meter.path_rtt_ns,
                is_lossy=self._loss.is_lossy,
            )
            if pace.restart:
                senders.restart_control()
            paced = round(pace.bits_per_s * self._pacer.slack)
            senders.tune(wanted, paced, rate, meter.path_rtt_ns)
