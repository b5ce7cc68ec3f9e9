"""Sizes of fragments: few, and long enough on far paths that each costs little of a core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.core.facts import FactStream
from prfaas.core.transfer.sender import Sender
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.net.link_end import SEND_LIMITS, Destination, LinkEnd
from prfaas.pool.send.data_sender import SendQueue
from prfaas.pool.send.fragment_sizes import (
    FRAGMENT_BYTES_LARGEST,
    FragmentSizes,
    fragment_sizes,
)
from prfaas.pool.send.link_control import LinkControl
from prfaas.wire.sockets import TcpInfo

MS, KIB = 1_000_000, 1 << 10
LEAST = SEND_LIMITS.fragment_bytes_min


def sizes(bits_per_s: int, num_connections: int, rtt_ms: int) -> FragmentSizes:
    return fragment_sizes(bits_per_s // 8 // num_connections, rtt_ms * MS, LEAST)


@pytest.mark.parametrize(
    ("bits_per_s", "num_connections", "rtt_ms", "kib"),
    [
        (10**9, 4, 40, 512),
        (10**9, 4, 5, 512),
        (10**9, 6, 100, 512),
        (5 * 10**9, 6, 20, 1024),
        (10**7, 4, 40, 32),
        (10**11, 16, 300, 1024),
        (10**10, 2, 0, 1024),
    ],
)
def test_a_fragment_lasts_sixteen_milliseconds_or_a_fifth_of_a_round_trip(
    bits_per_s: int, num_connections: int, rtt_ms: int, kib: int
) -> None:
    assert sizes(bits_per_s, num_connections, rtt_ms).largest == kib * KIB


@pytest.mark.parametrize(("num_connections", "kib"), [(4, 128), (6, 128), (16, 32)])
def test_a_fragment_of_a_first_block_lasts_four_milliseconds(
    num_connections: int, kib: int
) -> None:
    assert sizes(10**9, num_connections, 40).first == kib * KIB


def test_no_fragment_is_outside_of_its_limits() -> None:
    for bytes_per_s in (0, 1, 10**6, 10**12):
        for rtt_ns in (0, 10**6, 10**10):
            for size in fragment_sizes(bytes_per_s, rtt_ns, LEAST)[:2]:
                assert LEAST <= size <= FRAGMENT_BYTES_LARGEST


@pytest.mark.parametrize(
    ("num_connections", "rtt_ms", "backlog_ms"), [(4, 40, 17), (6, 100, 26), (8, 200, 68)]
)
def test_an_urgent_block_waits_for_two_short_fragments_or_a_long_one(
    num_connections: int, rtt_ms: int, backlog_ms: int
) -> None:
    bytes_per_s = 10**9 // 8 // num_connections
    found = sizes(10**9, num_connections, rtt_ms)
    assert backlog_ms - 1 < found.backlog / bytes_per_s * 1e3 <= backlog_ms
    assert found.backlog >= found.largest


class Tuned:
    """Data connections that are told what the path carries."""

    num_open = 4

    def __init__(self) -> None:
        self.bits_per_s: list[int] = []
        self.nums: set[int] = set()
        self.paces: list[int] = []
        self.sent_bytes, self.rtt_ns = 0, 40 * MS

    def tcp_infos(self) -> list[TcpInfo]:
        return [TcpInfo(self.rtt_ns, 10, 0, self.sent_bytes, 0)]

    def tune(self, num: int, pace: int, bits_per_s: int, _rtt_ns: int) -> None:
        self.nums.add(num)
        self.paces.append(pace)
        self.bits_per_s.append(bits_per_s)

    def restart_control(self, *, is_one: bool) -> None: ...


@pytest.mark.parametrize(
    ("rtt_ms", "busy", "least"), [(40, 0.0, 1.0), (200, 0.5, 1.0), (200, 0.0, 0.5)]
)
def test_a_host_that_is_short_of_cpu_does_not_cut_smaller_fragments(
    rtt_ms: int, busy: float, least: float
) -> None:
    """They would cost more of the CPU for each byte, and the link would carry ever less. Round
    trips in which a lane waits for a core look like a queue, and the ceiling follows; fragments and
    the number of connections do not, or not at once."""
    budget, carried = 930_000_000, 60_000_000
    end = LinkEnd("prfaas-pool", "epoch", IoThread(), PoolMetrics())
    coding: Any = SimpleNamespace(sample=lambda *_: None, ratio=1.0)
    to = Destination("pd-pool", ("", 0), budget)
    control = LinkControl(end, to, Sender("pd-pool", 0), SendQueue(), coding, FactStream())
    control._receiver_busy = busy
    senders: Any = Tuned()
    for step in range(40):
        senders.rtt_ns = (rtt_ms if step > 5 else 40) * MS
        senders.sent_bytes += carried // 8 // 20
        control._sample(senders, 10**9 + step * 50 * MS, 10**6, 0)
    assert (senders.paces[-1] < budget / 2) == (rtt_ms > 40)
    assert least * budget <= min(senders.bits_per_s)
    assert (senders.bits_per_s[-1] == budget) == (least == 1)
    assert senders.nums == {4}
