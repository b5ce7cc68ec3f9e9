"""A link between two pools: capacity that its flows share equally, with those of other links where
several share one WAN.

All active flows get the same rate: an equal share of the capacity, or what loss lets the
connections of one pool node carry, whichever is less. One counter of bytes served to each flow is
enough: a flow with b bytes left ends when the counter has moved on by b. A change costs O(log
flows).

Instants at which bytes of a flow are there are known in advance, and only whole flows are of
interest to others. So a link catches up with what was due when it is looked at, and has the clock
call it for landings alone; links that share one WAN also for every change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from math import isfinite

from prfaas.core.dispatch.links import LinkReport
from prfaas.core.transfer.link_goodput import LinkGoodput
from prfaas.sim.system.clock import NEVER, Action, Clock
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
            link.others_changed()


class ServedFlows:
    """Flows of a link from one instant to the next, and the counters of what was served.

    Args:
        flow_bits_per_s: What one flow gets at most.
        rtt_ns: Round trip; a byte is there after half of it.
    """

    def __init__(self, bits_per_s: float, flow_bits_per_s: float, rtt_ns: int) -> None:
        self.bits_per_s = bits_per_s
        self.goodput = LinkGoodput()
        self.added_bytes = self.busy_ns = 0
        self.rounded_bytes = 0.0
        """Rounding error of `sent_bytes` from whole nanoseconds."""
        self._served_bytes = 0.0
        self._rtt_ns, self._flow_bits_per_s = rtt_ns, flow_bits_per_s
        self._is_limited = isfinite(flow_bits_per_s)
        self._heap: list[tuple[float, int, Flow]] = []
        """Ends of flows; one that its flow has not any more is void."""
        self._served, self._moved_at_ns = 0.0, 0
        self._num_active = self._num_closed = self._num_pushed = 0
        self._landing: deque[tuple[int, Flow]] = deque()
        """Flows that have left, by the instant at which their last byte arrives."""
        self._drains_at_ns = NEVER
        self._window_bytes: dict[int, float] = {}
        self._window, self._window_end_ns, self._window_sum = 0, NS_PER_S, 0.0
        self._wan: HostLinks | None = None
        self._share()

    def _share(self) -> None:
        """Divide the capacity between the active flows."""
        num_active = self._num_active if self._wan is None else self._wan.num_active
        share, most = self.bits_per_s / (num_active or 1), self._flow_bits_per_s
        self._bytes_per_ns = (share if share < most else most) / BITS_PER_BYTE / NS_PER_S

    def _advance(self, now_ns: int) -> None:
        """Bring the counters up to an instant, and the bytes of each second."""
        start, rate, num_active = self._moved_at_ns, self._bytes_per_ns, self._num_active
        self._moved_at_ns = now_ns
        if not num_active or now_ns == start or rate <= 0:
            return
        elapsed_ns = now_ns - start
        self._served += elapsed_ns * rate
        self.busy_ns += elapsed_ns
        self._served_bytes += elapsed_ns * rate * num_active
        rate *= num_active
        while now_ns > self._window_end_ns:
            if start < self._window_end_ns:
                self._window_sum += (self._window_end_ns - start) * rate
                start = self._window_end_ns
            self._window_bytes[self._window] = self._window_sum
            self._window = start // NS_PER_S
            self._window_sum = self._window_bytes.get(self._window, 0.0)
            self._window_end_ns = (self._window + 1) * NS_PER_S
        self._window_sum += (now_ns - start) * rate

    def _count(self, flow: Flow, num_bytes: int, *, last: bool) -> int:
        """Take blocks of a flow in; the bytes for which they count."""
        flow.added_bytes += num_bytes
        self.added_bytes += num_bytes
        return num_bytes

    def _enter(self, flow: Flow, num_bytes: int, now_ns: int, *, last: bool) -> None:
        """More bytes of a flow may leave from an instant on."""
        if flow.ended:
            return
        self._advance(now_ns)
        num_bytes = self._count(flow, num_bytes, last=last)
        if flow.active:
            flow.end_at += num_bytes
        else:
            flow.end_at = self._served + num_bytes
            flow.active = True
            self._activate(1)
        if last:
            flow.closed = True
            self._num_closed += 1
        self._num_pushed += 1
        heappush(self._heap, (flow.end_at, self._num_pushed, flow))
        self._find_next_end(now_ns)

    def _bursts(self, flow: Flow, num_bytes: int, at_ns: int, until_ns: int) -> bool:
        """Have bytes enter and leave in one step, if the link is idle and nothing else is due
        meanwhile; else return False."""
        rate, served = self._bytes_per_ns, self._served
        if self._num_active or rate <= 0 or self._wan is not None:
            return False
        # The last bytes of what came before may be a rounding error, so this is no estimate.
        if at_ns + (num_bytes + 2) / rate + 1 > until_ns:
            return False
        counted = self._count(flow, num_bytes, last=False)
        end_at, goodput, rtt_ns = served + counted, self.goodput, self._rtt_ns
        goodput.change_rate(at_ns, self._served_bytes, is_busy=True, rtt_ns=rtt_ns)
        self._moved_at_ns, self._num_active = at_ns, 1
        left = end_at - served
        ends_at_ns = at_ns + (round(left / rate) if left > 0.0 else 0)
        self._advance(ends_at_ns)
        self.rounded_bytes += abs(end_at - self._served)
        self._served, self._num_active = max(self._served, end_at), 0
        goodput.change_rate(ends_at_ns, self._served_bytes, is_busy=False, rtt_ns=rtt_ns)
        return True

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

    def _find_next_end(self, now_ns: int) -> None:
        heap, rate = self._heap, self._bytes_per_ns
        while heap:
            end_at, _, flow = heap[0]
            if flow.active and flow.end_at == end_at:
                if rate > 0:
                    left = end_at - self._served
                    self._drains_at_ns = now_ns + (round(left / rate) if left > 0.0 else 0)
                    return
                break
            heappop(heap)
        self._drains_at_ns = NEVER

    def _drain(self, now_ns: int) -> None:
        """All bytes of a flow, or of several, have left."""
        self._advance(now_ns)
        # The instant was rounded to whole nanoseconds: take the counter to the planned end.
        heap, served = self._heap, self._served
        planned = heap[0][0]
        self.rounded_bytes += abs(planned - served) * self._num_active
        self._served = served = max(served, planned)
        while heap and heap[0][0] <= served + _EPSILON_BYTES:
            end_at, _, flow = heappop(heap)
            if flow.active and flow.end_at == end_at:
                if flow.closed:
                    self._landing.append((now_ns + self._rtt_ns // 2, flow))
                self._end(flow)
        self._find_next_end(now_ns)

    def _end(self, flow: Flow) -> None:
        """A flow has nothing to send."""
        flow.active = False
        self._num_closed -= flow.closed
        self._activate(-1)


class SharedLink(ServedFlows):
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
        super().__init__(bits_per_s, flow_bits_per_s, rtt_ns)
        self.landed_bytes = self.lost_bytes = 0
        self._ended_bytes = dict.fromkeys(Purpose, 0.0)
        self._clock, self._on_landed = clock, on_landed
        self._due: list[tuple[int, int, Flow, int]] = []
        """Bytes of flows that will be there, by instant."""
        self._next_at_ns = self._asked_at_ns = NEVER
        self._in_flight: dict[Flow, None] = {}
        self._calling: Action = self._called

    def join(self, wan: HostLinks) -> None:
        """Share the capacity with other links, before anything is sent."""
        wan.links.append(self)
        self._wan = wan

    @property
    def sent_bytes(self) -> float:
        """Bytes that have left."""
        self._catch_up()
        return self._served_bytes

    @property
    def window_bytes(self) -> dict[int, float]:
        """Bytes that have left, by windows of one second."""
        self._catch_up()
        self._window_bytes[self._window] = self._window_sum
        return self._window_bytes

    @property
    def num_active(self) -> int:
        """Flows with bytes to send."""
        self._catch_up()
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
        self._catch_up()
        served = self._served + (self._clock.now_ns - self._moved_at_ns) * self._bytes_per_ns
        return sum(max(f.end_at - served, 0.0) for f in self._in_flight if f.active)

    def sent_of(self, flow: Flow) -> float:
        """Bytes of a flow that have left."""
        self._look()
        left = max(flow.end_at - self._served, 0.0) if flow.active else 0.0
        return flow.added_bytes - left

    def open_sent_bytes(self) -> float:
        """Bytes that have left of flows that have neither landed nor been lost."""
        self._look()
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

    def feed(self, flow: Flow, at_ns: int, num_bytes: int) -> None:
        """More bytes of a flow may leave from an instant to come, ns, unless it is ended by then;
        `plan` has to follow."""
        self._num_pushed += 1
        heappush(self._due, (at_ns, self._num_pushed, flow, num_bytes))

    def stop_feeding(self, flow: Flow) -> None:
        """Take back the bytes that a flow was to be fed."""
        self._catch_up()
        self._due = [each for each in self._due if each[2] is not flow]
        heapify(self._due)
        self.plan()

    def add(self, flow: Flow, num_bytes: int, *, last: bool) -> None:
        """More bytes of a flow may leave."""
        self._catch_up()
        self._enter(flow, num_bytes, self._clock.now_ns, last=last)
        self.plan()

    def close(self, flow: Flow, num_bytes: int) -> None:
        """The last bytes of a flow may leave, which has so many in all."""
        self._catch_up()
        left = num_bytes - flow.added_bytes
        self._enter(flow, left if left > 0 else 0, self._clock.now_ns, last=True)
        self.plan()

    def set_rate(self, bits_per_s: float) -> None:
        """The capacity changes; 0 is a cut."""
        self._catch_up()
        self.bits_per_s = bits_per_s
        self.share_again()

    def others_changed(self) -> None:
        """Flows of links that share the capacity began or ended."""
        if self._num_active:
            self.share_again()

    def share_again(self) -> None:
        """The capacity changed, or what this link gets of it."""
        now_ns = self._clock.now_ns
        self._advance(now_ns)
        self._activate(0)
        self._share()
        self._find_next_end(now_ns)
        self.plan()

    def restart(self) -> None:
        """The link is connected anew."""
        self._catch_up()
        self.goodput.restart()

    def drop(self, flow: Flow) -> None:
        """Give a transfer up; its bytes count as lost."""
        if flow.ended:
            return
        self._ended_bytes[flow.purpose] += self.sent_of(flow)
        if flow.active:
            self._end(flow)
        flow.ended = True
        del self._in_flight[flow]
        self.lost_bytes += flow.added_bytes
        self._find_next_end(self._clock.now_ns)
        self.plan()

    def flows(self) -> list[Flow]:
        """Open flows, oldest first."""
        return list(self._in_flight)

    # Time

    def _look(self) -> None:
        """Bring all counters up to now."""
        self._catch_up()
        self._advance(self._clock.now_ns)

    def _catch_up(self) -> None:
        """Do what was due up to now."""
        now_ns, due = self._clock.now_ns, self._due
        if self._next_at_ns > now_ns:
            return
        while True:
            at_ns = self._drains_at_ns
            if not due or due[0][0] >= at_ns:
                if at_ns > now_ns:
                    break
                self._drain(at_ns)
                continue
            if due[0][0] > now_ns:
                break
            at_ns, _, flow, num_bytes = heappop(due)
            until_ns = now_ns
            if due and due[0][0] < now_ns:
                until_ns = due[0][0]
            if flow.ended or self._bursts(flow, num_bytes, at_ns, until_ns):
                continue
            self._enter(flow, num_bytes, at_ns, last=False)
        self.plan()

    def plan(self) -> None:
        """Be called when the next flow can land, or before, or at the next change."""
        drains_at_ns, due = self._drains_at_ns, self._due
        next_at_ns = drains_at_ns
        if due and due[0][0] < next_at_ns:
            next_at_ns = due[0][0]
        self._next_at_ns, at_ns = next_at_ns, NEVER
        if self._landing:
            at_ns = self._landing[0][0]
        elif self._num_closed:
            # Bytes that come make all flows slower: none ends before the next one could.
            at_ns = drains_at_ns + self._rtt_ns // 2
            if (self._num_active > 1 or self._is_limited) and at_ns > self._clock.now_ns + 1:
                at_ns -= 1  # An end that is rounded anew may be so much earlier than it was.
        if self._wan is not None and next_at_ns < at_ns:
            at_ns = next_at_ns
        if at_ns < self._asked_at_ns:
            self._asked_at_ns = at_ns
            self._clock.at(at_ns, self._calling, at_ns)

    def _called(self, at_ns: int) -> None:
        if at_ns != self._asked_at_ns:
            return
        self._catch_up()
        self._asked_at_ns, landing = NEVER, self._landing
        while landing and landing[0][0] <= at_ns:
            self._land(landing.popleft()[1])
        self.plan()

    def _land(self, flow: Flow) -> None:
        if flow.ended:
            return
        flow.ended = True
        del self._in_flight[flow]
        self._ended_bytes[flow.purpose] += flow.added_bytes
        self.landed_bytes += flow.added_bytes
        self._on_landed(flow)
