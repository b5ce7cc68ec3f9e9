"""A link between two pools: capacity that its flows share equally, with those of other links where
several share one WAN.

All active flows get the same rate: an equal share of the capacity, or what loss lets the
connections of one pool node carry, whichever is less. One counter of bytes served to each flow is
enough: a flow with b bytes left ends when the counter has moved on by b. An event costs O(log
flows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from math import isfinite

from prfaas.core.dispatch.links import LinkReport
from prfaas.core.transfer.link_goodput import LinkGoodput
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.units import BITS_PER_BYTE, NS_PER_S

_EPSILON_BYTES = 1e-3


class Purpose(StrEnum):
    """Purpose of bytes on a link."""

    HANDOFF = "handoff"
    """Hand-off from prefill to decode."""
    PULL = "pull"
    """A prefix, for a prefill elsewhere."""
    COPY = "copy"
    """A hot prefix, for nobody in particular."""


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes of one transfer. `closed` says that no more will be added."""

    request: Request | None
    promised_bytes: int
    purpose: Purpose = Purpose.HANDOFF
    added_bytes: int = 0
    end_at: float = 0.0
    active: bool = False
    closed: bool = False
    ended: bool = False


class HostLinks:
    """Links between the hosts of two clusters, whose flows share one capacity."""

    def __init__(self) -> None:
        self.links: list[SharedLink] = []
        self.num_active = 0
        """Flows of all links with bytes to send."""

    def change(self, num_flows: int) -> None:
        """So many more flows have bytes to send, or less."""
        self.num_active += num_flows
        for link in self.links:
            if link.num_active:
                link.share_again()


class SharedLink:
    """One direction of a link.

    Args:
        flow_bits_per_s: What one flow gets at most.
        rtt_ns: Round trip; a byte is there after half of it.
        on_landed: A closed flow's last byte has arrived.
    """

    def __init__(
        self,
        clock: Clock,
        bits_per_s: float,
        *,
        on_landed: Callable[[Flow], None],
        flow_bits_per_s: float = float("inf"),
        rtt_ns: int = 0,
    ) -> None:
        self.bits_per_s = bits_per_s
        self.goodput = LinkGoodput()
        self.landed_bytes = self.lost_bytes = self.added_bytes = 0
        self.window_bytes: dict[int, float] = {}
        self.busy_ns = 0
        self._served_bytes = 0.0
        self.rounded_bytes = 0.0
        """Rounding error of `sent_bytes` from whole nanoseconds."""
        self._ended_bytes = dict.fromkeys(Purpose, 0.0)
        self._clock, self._on_landed, self._rtt_ns = clock, on_landed, rtt_ns
        self._flow_bits_per_s, self._is_limited = flow_bits_per_s, isfinite(flow_bits_per_s)
        self._heap: list[tuple[float, int, Flow]] = []
        """Ends of flows; one that its flow has not any more is void."""
        self._served, self._moved_at_ns = 0.0, 0
        self._num_active, self._num_pushed, self._version = 0, 0, 0
        self._wan: HostLinks | None = None
        self._in_flight: dict[Flow, None] = {}
        self._share()

    def join(self, wan: HostLinks) -> None:
        """Share the capacity with other links, before anything is sent."""
        wan.links.append(self)
        self._wan = wan

    @property
    def sent_bytes(self) -> float:
        """Bytes that have left."""
        return self._served_bytes

    @property
    def num_active(self) -> int:
        """Flows with bytes to send."""
        return self._num_active

    @property
    def num_open(self) -> int:
        """Flows that have neither landed nor been lost."""
        return len(self._in_flight)

    @property
    def open_bytes(self) -> int:
        """Bytes added by flows that have neither landed nor been lost."""
        return sum(flow.added_bytes for flow in self._in_flight)

    def backlog_bytes(self) -> float:
        """Bytes that may leave and have not left. Changes nothing; costs O(flows)."""
        served = self._served + (self._clock.now_ns - self._moved_at_ns) * self._bytes_per_ns
        return sum(max(f.end_at - served, 0.0) for f in self._in_flight if f.active)

    def sent_of(self, flow: Flow) -> float:
        """Bytes of a flow that have left."""
        self._advance()
        left = max(flow.end_at - self._served, 0.0) if flow.active else 0.0
        return flow.added_bytes - left

    def open_sent_bytes(self) -> float:
        """Bytes that have left of flows that have neither landed nor been lost."""
        self._advance()
        sent, served = 0.0, self._served
        for flow in self._in_flight:
            left = flow.end_at - served if flow.active else 0.0
            sent += flow.added_bytes - left if left > 0 else flow.added_bytes
        return sent

    def report(self, now_ns: int) -> LinkReport:
        """Counters of the link, as its sending pool node reads them."""
        sent_bytes = round(self.open_sent_bytes())
        self._activate(0)
        goodput = self.goodput
        return LinkReport(now_ns, goodput.bits_per_s, sent_bytes, goodput.busy_ns, self._rtt_ns)

    def sent_by_purpose(self) -> dict[Purpose, float]:
        """Bytes that have left, by what they were for; lost ones count too."""
        found = dict(self._ended_bytes)
        for flow in self._in_flight:
            found[flow.purpose] += self.sent_of(flow)
        return found

    def open(
        self, request: Request | None, promised_bytes: int, purpose: Purpose = Purpose.HANDOFF
    ) -> Flow:
        """Begin a transfer, of a request or of nobody's."""
        flow = Flow(request, promised_bytes, purpose)
        self._in_flight[flow] = None
        return flow

    def add(self, flow: Flow, num_bytes: int, *, last: bool) -> None:
        """More bytes of a flow may leave."""
        if flow.ended:
            return
        self._advance()
        flow.closed = last
        flow.added_bytes += num_bytes
        self.added_bytes += num_bytes
        if flow.active:
            flow.end_at += num_bytes
        else:
            flow.end_at = self._served + num_bytes
            flow.active = True
            self._activate(1)
        self._num_pushed += 1
        heappush(self._heap, (flow.end_at, self._num_pushed, flow))
        self._plan_next()

    def set_rate(self, bits_per_s: float) -> None:
        """The capacity changes; 0 is a cut."""
        self.bits_per_s = bits_per_s
        self.share_again()

    def share_again(self) -> None:
        """Flows of other links that share the capacity began or ended, or the capacity changed."""
        self._advance()
        self._activate(0)
        self._share()
        self._plan_next()

    def drop(self, flow: Flow) -> None:
        """Give a transfer up; its bytes count as lost."""
        if flow.ended:
            return
        self._ended_bytes[flow.purpose] += self.sent_of(flow)
        if flow.active:
            flow.active = False
            self._activate(-1)
        flow.ended = True
        del self._in_flight[flow]
        self.lost_bytes += flow.added_bytes
        self._plan_next()

    def flows(self) -> list[Flow]:
        """Open flows, oldest first."""
        return list(self._in_flight)

    def _share(self) -> None:
        """Divide the capacity between the active flows."""
        num_active = self._num_active if self._wan is None else self._wan.num_active
        share, most = self.bits_per_s / (num_active or 1), self._flow_bits_per_s
        self._bytes_per_ns = (share if share < most else most) / BITS_PER_BYTE / NS_PER_S

    def _advance(self) -> None:
        """Bring the counters up to now, and the bytes of each second."""
        start, end, rate = self._moved_at_ns, self._clock.now_ns, self._bytes_per_ns
        self._moved_at_ns, num_active = end, self._num_active
        if not num_active or end == start or rate <= 0:
            return
        elapsed_ns = end - start
        self._served += elapsed_ns * rate
        self.busy_ns += elapsed_ns
        self._served_bytes += elapsed_ns * rate * num_active
        rate, found, window = rate * num_active, self.window_bytes, start // NS_PER_S
        while end > (stop := (window + 1) * NS_PER_S):
            found[window] = found.get(window, 0.0) + (stop - start) * rate
            start, window = stop, window + 1
        found[window] = found.get(window, 0.0) + (end - start) * rate

    def _activate(self, num_flows: int) -> None:
        """So many more flows have bytes to send, or less; 0 is a sample of the goodput alone."""
        before = self._num_active
        self._num_active = num_active = before + num_flows
        if self._is_limited or not (num_active and before and num_flows):
            self.goodput.change_rate(
                self._moved_at_ns, self._served_bytes, is_busy=num_active > 0, rtt_ns=self._rtt_ns
            )
        if self._wan is not None and num_flows:
            self._wan.change(num_flows)
        elif num_active > 1 or before > 1:
            self._share()

    def _plan_next(self) -> None:
        self._version += 1
        heap, rate = self._heap, self._bytes_per_ns
        while heap:
            end_at, _, flow = heap[0]
            if flow.active and flow.end_at == end_at:
                left = end_at - self._served
                if rate > 0:
                    due_ns = round(left / rate) if left > 0.0 else 0
                    self._clock.after(due_ns, self._drained, self._version)
                return
            heappop(heap)

    def _drained(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        # The instant was rounded to whole nanoseconds: take the counter to the planned end.
        heap, served = self._heap, self._served
        planned = heap[0][0]
        self.rounded_bytes += abs(planned - served) * self._num_active
        self._served = served = max(served, planned)
        while heap and heap[0][0] <= served + _EPSILON_BYTES:
            end_at, _, flow = heappop(heap)
            if flow.active and flow.end_at == end_at:
                flow.active = False
                self._activate(-1)
                if flow.closed:
                    self._clock.after(self._rtt_ns // 2, self._land, flow)
        if heap or self._wan is not None:
            self._plan_next()

    def _land(self, flow: Flow) -> None:
        if flow.ended:
            return
        flow.ended = True
        del self._in_flight[flow]
        self._ended_bytes[flow.purpose] += flow.added_bytes
        self.landed_bytes += flow.added_bytes
        self._on_landed(flow)
