"""The link between two pools, and what is in transit over it.

Pool nodes code blocks by the core's rule (`core/codec/gain.py`). Flows count bytes of blocks, as
gateways do. Sent bytes, and so traffic and its price, are the network's.

Hand-offs go chunk by chunk as they are computed. Prefixes that are pulled for a prefill, and copies
of hot ones, go whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.core.codec.gain import BlockCoder, BlockCoding
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.routing.predictions import Costs
from prfaas.core.transfer.link_goodput import BITS_PER_BYTE
from prfaas.records import MutableRecord
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
        self._catch_up()
        return self._served_bytes * self.coder.wire_share

    def set_rate(self, bits_per_s: float) -> None:
        """The capacity changes, and with it whether coding pays; 0 is a cut."""
        self._catch_up()
        super().set_rate(self.coder.set_capacity(bits_per_s / BITS_PER_BYTE) * BITS_PER_BYTE)

    def open(
        self, request: Request | None, promised_bytes: int, purpose: Purpose = Purpose.HANDOFF
    ) -> Flow:
        """Begin a transfer."""
        flow = CodedFlow(request, promised_bytes, purpose)
        self._in_flight[flow] = None
        return flow

    def _count(self, flow: Flow, num_bytes: int, *, last: bool) -> int:
        """Take blocks of a flow in; the bytes for which they count."""
        tenant = flow.request.tenant if flow.request is not None else ""
        counted = self.coder.counted_bytes(num_bytes, is_last=last, tenant=tenant)
        super()._count(flow, num_bytes, last=last)
        if isinstance(flow, CodedFlow):
            flow.counted_bytes += counted
        return counted

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


class _Transfer(MutableRecord):
    """Blocks of one request. `present_tokens` of its prompt are at the destination already.

    Of the first tokens of the prompt, all KV bytes but `kept_bytes` may leave once they are
    computed: what is present stays, and the linear state comes with the last chunk.
    """

    shipped_bytes: int
    present_tokens: int
    kept_bytes: int = 0
    flow: Flow | None = None


Ended = Callable[[bool], None]
"""Called with True if a copy has landed, False if it was lost."""


class Transport:
    """One direction of a link.

    Args:
        ends: Pools that send and receive.
        costs: Bytes of prompts.
        on_landed: All blocks of a request have arrived: those of a hand-off, or a pulled prefix.
        on_change: The link was found dead (False) or alive (True).
        told_after_ns: From the link's recovery, or a pool's failure, until it is known.
    """

    def __init__(
        self,
        clock: Clock,
        ends: tuple[str, str],
        setup: LinkSetup,
        costs: Costs,
        *,
        on_landed: Callable[[Request, Transport, Purpose], None],
        on_change: Callable[[Transport, bool], None],
        told_after_ns: int,
    ) -> None:
        self.ends, self.setup, self.costs = ends, setup, costs
        self._clock = clock
        self._on_landed, self._on_change = on_landed, on_change
        self._told_after_ns = told_after_ns
        self._taken_for_alive = True
        self.changed_at_ns = 0
        self._capacity_ratio, self._num_pools_down = 1.0, 0
        self._open: dict[Request, _Transfer] = {}
        self._copies: dict[Flow, Ended] = {}
        self.link = make_link(clock, setup, costs.state_bytes, self._landed)

    # Hand-offs

    def promise(self, request: Request, shipped_bytes: int, present_tokens: int) -> None:
        """A transfer was decided; its bytes come once prefill starts."""
        costs = self.costs
        kept = costs.sent_bytes(present_tokens) if present_tokens else costs.state_bytes
        self._open[request] = _Transfer(shipped_bytes, present_tokens, kept)

    def start(self, request: Request) -> None:
        """The prefill of a promised transfer starts."""
        transfer = self._open[request]
        transfer.flow = self.link.open(request, transfer.shipped_bytes)

    def ship(self, request: Request, chunks: list[tuple[int, int]], since_ns: int) -> None:
        """Ship what belongs to the first new tokens of a prompt as they are computed.

        Args:
            chunks: Tokens, and the time since `since_ns` when they are computed, ns; the last one
                is left out, which `finish` ships.
        """
        transfer = self._open.get(request)
        if transfer is None or transfer.flow is None:
            return
        flow, link, costs = transfer.flow, self.link, self.costs
        before, num_present = flow.added_bytes, request.num_hit_tokens
        for i in range(len(chunks) - 1):
            tokens, after_ns = chunks[i]
            ready_bytes = costs.sent_bytes(num_present + tokens) - transfer.kept_bytes
            if ready_bytes > before:
                link.feed(flow, since_ns + after_ns, ready_bytes - before)
                before = ready_bytes
        link.plan()

    def finish(self, request: Request) -> None:
        """All of a prompt is computed: ship what is left."""
        transfer = self._open.get(request)
        if transfer is not None and transfer.flow is not None:
            self.link.close(transfer.flow, transfer.shipped_bytes)

    def hold(self, request: Request) -> None:
        """The prefill of a prompt does not go on: nothing more of it is computed."""
        transfer = self._open.get(request)
        if transfer is not None and transfer.flow is not None:
            self.link.stop_feeding(transfer.flow)

    # Prefixes

    def pull(self, request: Request, num_bytes: int, present_tokens: int) -> None:
        """Ask for a prefix; it leaves when the question has crossed the link."""
        flow = self.link.open(request, num_bytes, Purpose.PULL)
        self._open[request] = _Transfer(num_bytes, present_tokens, flow=flow)
        self._clock.after(self.setup.rtt_ns // 2, self._answer, flow)

    def _answer(self, flow: Flow) -> None:
        self.link.add(flow, flow.promised_bytes, last=True)

    def copy(self, num_bytes: int, ended: Ended) -> None:
        """Copy blocks."""
        flow = self.link.open(None, num_bytes, Purpose.COPY)
        self._copies[flow] = ended
        self.link.add(flow, num_bytes, last=True)

    # Endings

    def arrived_tokens(self, request: Request) -> int:
        """Usable leading tokens of a prompt at the destination, earlier ones included.

        Attention blocks are of use one by one; a model with linear state can resume only at a
        state, of which the last comes at the end, and others if checkpoints are shipped.
        """
        transfer = self._open.get(request)
        if transfer is None or transfer.flow is None:
            return 0
        sent = self.link.sent_of(transfer.flow)
        return self.costs.tokens_in(transfer.present_tokens, sent)

    def give_up(self, request: Request) -> None:
        """End the wait for a request's blocks; no effect without a transfer."""
        transfer = self._open.pop(request, None)
        if transfer is not None and transfer.flow is not None:
            self.link.drop(transfer.flow)

    def _landed(self, flow: Flow) -> None:
        if flow.purpose is Purpose.COPY:
            self._copies.pop(flow)(True)
            return
        request = flow.request
        assert request is not None  # noqa: S101 (only copies are nobody's)
        transfer = self._open.get(request)
        if transfer is not None and transfer.flow is flow:
            del self._open[request]
            self._on_landed(request, self, flow.purpose)

    # Failures

    def set_capacity(self, ratio: float) -> None:
        """The capacity changes to a share of the whole; a cut that lasts is noticed later."""
        self._capacity_ratio = ratio
        self._apply(self.setup.dead_after_ns)

    def set_pool(self, *, up: bool) -> None:
        """A pool at one end failed, which closes its connections, or came back."""
        self._num_pools_down += -1 if up else 1
        self._apply(self._told_after_ns)

    def _apply(self, noticed_after_ns: int) -> None:
        ratio = 0.0 if self._num_pools_down else self._capacity_ratio
        if (self.link.bits_per_s > 0) != (ratio > 0):
            self.changed_at_ns = self._clock.now_ns
        self.link.set_rate(self.setup.bits_per_s * ratio)
        if ratio <= 0:
            self._clock.after(noticed_after_ns, self._maybe_dead, self.changed_at_ns)
        else:
            self._clock.after(self._told_after_ns, self._tell_alive, self.changed_at_ns)

    def _maybe_dead(self, silent_since_ns: int) -> None:
        """The link is dead if the silence has lasted."""
        if silent_since_ns == self.changed_at_ns and self._taken_for_alive:
            self._taken_for_alive = False
            self._lose_copies()
            self._on_change(self, False)

    def _lose_copies(self) -> None:
        for flow, ended in list(self._copies.items()):
            self.link.drop(flow)
            ended(False)
        self._copies.clear()

    def _tell_alive(self, back_since_ns: int) -> None:
        if back_since_ns == self.changed_at_ns and not self._taken_for_alive:
            self._taken_for_alive = True
            self.link.restart()
            self._on_change(self, True)
