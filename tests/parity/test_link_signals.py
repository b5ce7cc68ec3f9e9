"""One link under the same traffic, as a pool node samples it and as the simulator counts it.

The pool node reads acknowledged bytes and whether bytes wait twenty times a second; a round trip
passes before an acknowledgement comes. The simulator knows when its link turned busy or idle. Both
report twice a second, late, and some reports are lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from prfaas.core.dispatch.links import LinkBook
from prfaas.gateway.routing.dispatch_driver import link_report
from prfaas.pool.send.link_control import SAMPLE_NS, LinkMeter
from prfaas.sim.resources.shared_link import SharedLink
from prfaas.sim.system.clock import Clock
from prfaas.units import NS_PER_S
from prfaas.wire.sockets import TcpInfo

GBIT = 10**9
RTT_NS = 20_000_000
PLANNED = 10.0 * GBIT
REPORT_NS, DELAY_NS = NS_PER_S // 2, NS_PER_S // 20
STALE_NS = 3 * NS_PER_S
LOST = 0.2


class Both:
    """A link, its pool node, and what two gateways know of it: one is told by either."""

    def __init__(self, bits_per_s: float, seed: int) -> None:
        self.clock, self._draw = Clock(), random.Random(seed)
        self.link = SharedLink(self.clock, bits_per_s, on_landed=lambda _: None, rtt_ns=RTT_NS)
        self.live, self.simulated = (LinkBook(STALE_NS, PLANNED) for _ in range(2))
        self._meter, self._sent = LinkMeter(), list[tuple[int, float]]()
        for book in (self.live, self.simulated):
            book.promise(10**15, 0)  # There is always more to come.
        self.clock.at(0, self._sample)
        self.clock.at(0, self._report)

    def _sample(self, _argument: None) -> None:
        now = self.clock.now_ns
        self.link.open_sent_bytes()  # brings the counters up to now
        self._sent.append((now, self.link.sent_bytes))
        acked = next((sent for at, sent in reversed(self._sent) if at <= now - RTT_NS), 0.0)
        queued = int(self.link.backlog_bytes())
        self._meter.sample(now, [TcpInfo(RTT_NS, 10, 0, round(acked), 0)], queued, 0)
        self.clock.after(SAMPLE_NS, self._sample)

    def _report(self, _argument: None) -> None:
        if self._draw.random() >= LOST:
            telemetry = self._meter.telemetry(self.clock.now_ns)
            report = self.link.report(self.clock.now_ns)
            self.clock.after(
                DELAY_NS, lambda _: self.live.report(link_report(telemetry, self.clock.now_ns))
            )
            self.clock.after(DELAY_NS, lambda _: self.simulated.report(report))
        self.clock.after(REPORT_NS, self._report)

    def load(self, until_s: float, num_bytes: int, every_s: Callable[[], float]) -> None:
        """Send transfers of a size now and then, until an instant."""
        at_s = self.clock.now_ns / NS_PER_S
        while (at_s := at_s + every_s()) < until_s:
            self.clock.at(round(at_s * NS_PER_S), lambda _: self._send(num_bytes))
        self.clock.run(round(until_s * NS_PER_S))

    def _send(self, num_bytes: int) -> None:
        self.link.add(self.link.open(None, num_bytes), num_bytes, last=True)

    def known(self) -> list[tuple[float, float]]:
        """Rate in Gbit/s, and mean utilisation, live and simulated."""
        now, found = self.clock.now_ns, list[tuple[float, float]]()
        for book in (self.live, self.simulated):
            state = book.latest(now)
            assert state is not None
            found.append((state.bits_per_s / GBIT, book.mean_utilisation(now)))
        return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("load", [0.2, 0.5, 0.8, 1.2])
def test_a_pool_node_and_the_simulator_report_the_same_link(load: float, seed: int) -> None:
    made, draw = Both(GBIT, seed), random.Random(seed)
    num_bytes = 50 * 10**6
    made.load(120, num_bytes, lambda: draw.expovariate(load * GBIT / 8 / num_bytes))
    (live, live_use), (simulated, simulated_use) = made.known()
    assert simulated == pytest.approx(1.0, rel=0.001)
    assert live == pytest.approx(simulated, rel=0.05)
    assert live_use == pytest.approx(simulated_use, abs=0.06)
    assert simulated_use == pytest.approx(min(load, 1), abs=0.25)


def test_both_notice_a_slower_link_at_once_and_a_recovery_by_short_bursts() -> None:
    made = Both(10 * GBIT, 1)
    short_bytes = 30 * 10**6  # 24 ms at the whole rate: never filled
    made.load(30, short_bytes, lambda: 0.2)
    assert [rate for rate, _ in made.known()] == [10.0, 10.0]
    made.link.set_rate(GBIT)
    made.load(33, short_bytes, lambda: 0.2)
    assert [rate for rate, _ in made.known()] == pytest.approx([1.0, 1.0], rel=0.1)
    made.link.set_rate(10 * GBIT)
    made.load(60, short_bytes, lambda: 0.2)
    live, simulated = (rate for rate, _ in made.known())
    # Samples of 50 ms hold bursts of 24 ms, and what they show is a lower bound.
    assert 4 < live <= 10
    assert simulated == pytest.approx(10, rel=0.05)
