"""Measurements of a link; its pace, budget and number of connections, which follow from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from msgspec import structs

from prfaas.core.facts import FactStream
from prfaas.core.transfer.facts import SENT, LinksChanged
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.core.transfer.link_goodput import LinkGoodput
from prfaas.core.transfer.pacing import BOUND, Pacer, PathLoss, num_connections
from prfaas.core.transfer.sender import Sender
from prfaas.pool.net.io_thread import BusyMeter
from prfaas.pool.net.link_end import Destination, LinkEnd
from prfaas.pool.send.data_sender import DataSenders, SendQueue
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.units import NS_PER_S
from prfaas.wire.channel import Channel
from prfaas.wire.messages.base import Ping, Pong
from prfaas.wire.messages.fields import TENANTS_SHOWN_MAX
from prfaas.wire.messages.gateway import RATIO_MAX, LinkTelemetry
from prfaas.wire.sockets import TcpInfo

SAMPLE_NS = 50_000_000
REPORT_EVERY, IDLE_EVERY = 10, 20
"""Samples of a busy link between two reports, and looks at an idle one between two samples."""

SHRINK, BUSY = 0.98, 0.2
"""Fragments get half as large in two seconds at least, and no smaller while a lane at either end
needs a core for that part of the time."""


class SampleCount:
    """Counts the looks at a link, and decides at which of them its counters are read.

    The counters of an idle link stand still. A look for work costs a twentieth of a sample, and a
    pool node has as many links as its own site and the other one have hosts.
    """

    def __init__(self) -> None:
        self._num_looks = -1
        self._num_idle = 0

    def is_due(self, *, is_idle: bool) -> bool:
        """Count a look; True if it is to be a sample."""
        self._num_looks += 1
        self._num_idle = self._num_idle + 1 if is_idle else 0
        return self._num_idle <= REPORT_EVERY or self._num_looks % IDLE_EVERY == 0

    @property
    def is_report(self) -> bool:
        """Return True if the peer and the gateways get a report of this sample."""
        return self._num_looks % REPORT_EVERY == 0


class LinkMeter:
    """Turns samples of the kernel's counters into rates. Gets the time as an argument.

    Args:
        budget_bits_per_s: The operator's; stands in for a rate that was not measured yet.
    """

    def __init__(self, budget_bits_per_s: int = 0) -> None:
        self._budget_bits_per_s = self._idle_bits_per_s = budget_bits_per_s
        self._filled_bits_per_s = 0
        """Budget while the link was filled last."""
        self._goodput = LinkGoodput()
        self._sampled_at_ns = 0
        self._telemetry = LinkTelemetry(
            age_ns=0,
            goodput_bits_per_s=0,
            rtt_ns=0,
            queued_bytes=0,
            in_flight_bytes=0,
            retransmits=0,
            delivery_bits_per_s=0,
            window_segments=0,
            num_connections=0,
            budget_bits_per_s=budget_bits_per_s,
        )
        self.rtt_ns = 0
        """Round trip of the last ping; 0 is unknown."""
        self.network_share = 1.0
        """Share of the time since the sample before in which connections waited for the network,
        and for neither end; mean of all."""
        self._network_ns = 0
        self.path_rtt_ns = 0
        """Smoothed round trip as the kernel sees it, of the connection with the shortest: a queue
        lengthens all of them, retransmissions only one."""

    @property
    def fresh_bits_per_s(self) -> int:
        """Bytes that arrived since the previous sample; 0 unless the link was busy all the time."""
        return round(self._goodput.fresh_bits_per_s)

    def sample(
        self, now_ns: int, infos: Sequence[TcpInfo], queued_bytes: int, in_flight_bytes: int
    ) -> None:
        """Take the counters of all connections in."""
        acked_bytes, goodput = sum(info.acked_bytes for info in infos), self._goodput
        self.path_rtt_ns = min((info.rtt_ns for info in infos), default=0)
        self._see_network(now_ns - self._sampled_at_ns, infos)
        is_busy = queued_bytes > 0
        delivered = sum(info.delivered_bytes or info.acked_bytes for info in infos)
        goodput.sample(now_ns, delivered, is_busy=is_busy, rtt_ns=self.path_rtt_ns)
        if goodput.fresh_bits_per_s:
            self._filled_bits_per_s = self._budget_bits_per_s
        self._sampled_at_ns = now_ns
        self._telemetry = LinkTelemetry(
            age_ns=0,
            goodput_bits_per_s=goodput.bits_per_s,
            rtt_ns=self.rtt_ns or self.path_rtt_ns,
            queued_bytes=queued_bytes,
            in_flight_bytes=in_flight_bytes,
            retransmits=sum(info.retransmits for info in infos),
            delivery_bits_per_s=sum(info.delivery_bits_per_s for info in infos),
            window_segments=sum(info.window_segments for info in infos),
            num_connections=len(infos),
            budget_bits_per_s=self._budget_bits_per_s,
            arrived_bytes=acked_bytes,
            busy_ns=goodput.busy_ns,
        )

    def limit(self, bits_per_s: int, idle_bits_per_s: int) -> None:
        """The budget has changed.

        Args:
            idle_bits_per_s: What it would be if the link had something to send: a part of a site's
                budget is small while nothing waits, and says nothing of the link.
        """
        self._budget_bits_per_s, self._idle_bits_per_s = bits_per_s, idle_bits_per_s

    @property
    def _is_idle(self) -> bool:
        return not (self._telemetry.queued_bytes or self._telemetry.in_flight_bytes)

    @property
    def _shown_budget(self) -> int:
        return self._idle_bits_per_s if self._is_idle else self._budget_bits_per_s

    @property
    def shown_goodput(self) -> int:
        """The goodput; 0 where a smaller budget held it, which shows nothing of the path."""
        rate, held = self._telemetry.goodput_bits_per_s, self._filled_bits_per_s
        is_held = rate >= BOUND * held and 0 < held < self._idle_bits_per_s
        return 0 if self._is_idle and is_held else rate

    def restart(self) -> None:
        """The link is connected anew."""
        self._goodput.restart()
        rate = self._goodput.bits_per_s
        self._telemetry = structs.replace(self._telemetry, goodput_bits_per_s=rate)

    def _see_network(self, passed_ns: int, infos: Sequence[TcpInfo]) -> None:
        network_ns = sum(info.network_ns for info in infos)
        if infos and passed_ns > 0:
            share = (network_ns - self._network_ns) / (passed_ns * len(infos))
            self.network_share = max(0.0, min(1.0, share))
        self._network_ns = network_ns

    def telemetry(
        self,
        now_ns: int,
        *,
        open_arrived_bytes: int = 0,
        queued_by_tenant: Mapping[str, int] | None = None,
        coding_ratio: float = 1.0,
        encryption: str = "tls",
    ) -> LinkTelemetry:
        """The last sample with its age, what has arrived of open transfers, and who waits now."""
        last = self._telemetry
        values = {name: getattr(last, name) for name in last.__struct_fields__}
        values["age_ns"] = max(0, now_ns - self._sampled_at_ns)
        values["budget_bits_per_s"] = self._shown_budget
        values["goodput_bits_per_s"] = self.shown_goodput
        values["open_arrived_bytes"] = open_arrived_bytes
        values["coding_ratio"] = min(coding_ratio, RATIO_MAX)
        values["encryption"] = encryption
        longest = sorted((queued_by_tenant or {}).items(), key=lambda item: -item[1])
        values["queued_by_tenant"] = dict(longest[:TENANTS_SHOWN_MAX])
        return LinkTelemetry(**values)


class LinkControl:
    """Measures a link, and adapts its data connections.

    Args:
        machine: The transfers of the link.
        facts: Gets `LinksChanged` while the link is busy.
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
        self._size_bits_per_s = 0
        """Rate by which fragments are cut."""

    @property
    def telemetry(self) -> LinkTelemetry:
        """Latest measurements."""
        with self._queue as share:
            queued_by_tenant = share.queued_by_tenant
        return self._meter.telemetry(
            time.monotonic_ns(),
            open_arrived_bytes=self._machine.arrived_bytes,
            queued_by_tenant=queued_by_tenant,
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
        was_busy, looks = False, SampleCount()
        while True:
            now_ns, num_open = time.monotonic_ns(), len(self._machine.open)
            with self._queue as share:
                left = share.queued_bytes, share.in_flight_bytes
            if looks.is_due(is_idle=not (num_open or any(left))):
                self._sample(senders, now_ns, *left)
                if looks.is_report:
                    self._metrics.set_link(self._to.peer, self.telemetry)
                    self._metrics.set_encryption(self._to.peer, SENT, self._encryption)
                    ping = Ping(at_ns=time.monotonic_ns(), connections=senders.connections)
                    channel.send(ping)
                    if (num_open or was_busy) and channel.is_open and senders.num_open:
                        self._facts.report(LinksChanged())
                    was_busy = num_open > 0
            await asyncio.sleep(SAMPLE_NS / NS_PER_S)

    def _sample(
        self, senders: DataSenders, now_ns: int, queued_bytes: int, in_flight_bytes: int
    ) -> None:
        infos, meter = senders.tcp_infos(), self._meter
        meter.sample(now_ns, infos, queued_bytes, in_flight_bytes)
        self._loss.sample(infos)
        busy = self._busy.share()
        self._tune(senders, now_ns, max(busy, self._receiver_busy))
        self._coding.sample(
            meter.fresh_bits_per_s / 8, busy, self._receiver_busy, meter.network_share
        )

    def _tune(self, senders: DataSenders, now_ns: int, busy: float) -> None:
        """Adapt pacing, fragments and the number of connections to the measurements."""
        meter = self._meter
        pace = self._pacer.sample(
            now_ns, meter.fresh_bits_per_s, meter.path_rtt_ns, senders.num_open
        )
        if meter.fresh_bits_per_s:
            rate = meter.shown_goodput
            wanted = self._to.num_connections or num_connections(
                max(rate, self._budget_bits_per_s),
                self._pacer.shortest_rtt_ns,  # Not what waiting for a core adds.
                is_lossy=self._loss.is_lossy,
            )
            if pace.restart or pace.renew:
                senders.restart_control(is_one=not pace.restart)
            paced = round(pace.bits_per_s * self._pacer.slack)
            # Not by what is sent, nor by a ceiling that was cut just now: smaller fragments cost
            # more of the CPU for each byte, and a host that is short of it would send ever less.
            kept = 1.0 if busy > BUSY else SHRINK
            self._size_bits_per_s = max(rate, pace.bits_per_s, round(kept * self._size_bits_per_s))
            senders.tune(wanted, paced, self._size_bits_per_s, meter.path_rtt_ns)
