"""A link whose pool nodes code blocks by the core's rule (`core/codec/gain.py`).

Flows count bytes of blocks, as gateways do. Sent bytes, and so traffic and its price, are the
network's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.core.codec.gain import BlockCoder, BlockCoding
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.transfer.link_goodput import BITS_PER_BYTE
from prfaas.sim.resources.shared_link import Flow, Purpose, SharedLink
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import LinkSetup


def make_link(
    clock: Clock, link: LinkSetup, state_bytes: int, on_landed: Callable[[Flow], None]
) -> SharedLink:
    """Return one direction of a link; the last `state_bytes` of a flow are recurrent state."""
    limit, rtt_ns = link.flow_bits_per_s, link.rtt_ns
    if link.coding is None:
        return SharedLink(
            clock, link.bits_per_s, on_landed=on_landed, flow_bits_per_s=limit, rtt_ns=rtt_ns
        )
    made = CodedLink(clock, 0.0, on_landed=on_landed, flow_bits_per_s=limit, rtt_ns=rtt_ns)
    made.begin(link.coding, state_bytes, link.bits_per_s)
    return made


@dataclass(slots=True, eq=False)
class CodedFlow(Flow):
    """A transfer of blocks, and the bytes for which they count on the link."""

    counted_bytes: int = 0


class CodedLink(SharedLink):
    """One direction of a link that may code."""

    def begin(self, coding: BlockCoding, state_bytes: int, bits_per_s: float) -> None:
        """Set coding and capacity, before anything is sent."""
        self.coder = BlockCoder(coding, state_bytes)
        self.set_rate(bits_per_s)

    @property
    def sent_bytes(self) -> float:
        """Bytes on the network."""
        return self._served_bytes * self.coder.wire_share

    def set_rate(self, bits_per_s: float) -> None:
        """The capacity changes, and with it whether coding pays; 0 is a cut."""
        super().set_rate(self.coder.set_capacity(bits_per_s / BITS_PER_BYTE) * BITS_PER_BYTE)

    def open(
        self, request: Request | None, promised_bytes: int, purpose: Purpose = Purpose.HANDOFF
    ) -> Flow:
        """Begin a transfer."""
        flow = CodedFlow(request, promised_bytes, purpose)
        self._in_flight[flow] = None
        return flow

    def add(self, flow: Flow, num_bytes: int, *, last: bool) -> None:
        """More blocks of a flow may leave."""
        if flow.ended or not isinstance(flow, CodedFlow):
            return
        tenant = flow.request.tenant if flow.request is not None else ""
        counted = self.coder.counted_bytes(num_bytes, is_last=last, tenant=tenant)
        super().add(flow, counted, last=last)
        flow.added_bytes += num_bytes - counted
        self.added_bytes += num_bytes - counted
        flow.counted_bytes += counted

    def sent_of(self, flow: Flow) -> float:
        """Bytes of a flow's blocks that have left."""
        sent = super().sent_of(flow)
        if not isinstance(flow, CodedFlow) or not flow.counted_bytes:
            return sent
        left = (flow.added_bytes - sent) / flow.counted_bytes
        return flow.added_bytes * (1 - left)

    def open_sent_bytes(self) -> float:
        """Bytes of blocks that have left of flows that have neither landed nor been lost."""
        return sum(map(self.sent_of, self._in_flight), 0.0)

    def sent_by_purpose(self) -> dict[Purpose, float]:
        """Bytes on the network, by what they were for."""
        blocks = super().sent_by_purpose()
        share = self.sent_bytes / (sum(blocks.values()) or 1.0)
        return {purpose: count * share for purpose, count in blocks.items()}

    def report(self, now_ns: int) -> LinkReport:
        """Counters in bytes of blocks, as a gateway converts those of a pool node."""
        report = super().report(now_ns)
        return report._replace(goodput_bits_per_s=report.goodput_bits_per_s * self.coder.ratio)
