"""Goodput of a link from bandwidth, round trip and loss, held to what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.tcp_goodput import (
    MEASURED,
    CongestionControl,
    TcpEnds,
    TcpPath,
    goodput_bits_per_s,
    most_bits_per_s,
)

MS = 1e-3
BBR, CUBIC = CongestionControl
LOSSES = st.one_of(st.just(0.0), st.floats(1e-7, 0.5))
PATHS = st.builds(TcpPath, st.floats(1e6, 1e12), st.floats(0, 1), LOSSES)
TRANSPORTS = st.builds(
    TcpEnds, st.integers(1, 64), st.integers(0, 16), st.sampled_from(CongestionControl)
)


@given(PATHS, TRANSPORTS, st.floats(1, 100))
def test_goodput_never_falls_with_bandwidth(path: TcpPath, transport: TcpEnds, more: float) -> None:
    wider = replace(path, bits_per_s=path.bits_per_s * more)
    assert goodput_bits_per_s(wider, transport) >= goodput_bits_per_s(path, transport) * (1 - 1e-12)


@given(PATHS, TRANSPORTS, LOSSES)
def test_goodput_never_rises_with_loss(path: TcpPath, transport: TcpEnds, loss: float) -> None:
    low, high = sorted((path.loss, loss))
    less, more = (replace(path, loss=each) for each in (low, high))
    assert goodput_bits_per_s(more, transport) <= goodput_bits_per_s(less, transport) * (1 + 1e-12)


@given(PATHS, TRANSPORTS, st.floats(0, 1))
def test_goodput_with_loss_never_rises_with_the_round_trip(
    path: TcpPath, transport: TcpEnds, rtt_s: float
) -> None:
    low, high = sorted((path.rtt_s, rtt_s))
    near, far = (goodput_bits_per_s(replace(path, rtt_s=each), transport) for each in (low, high))
    assert far <= near * (1 + 1e-12)


@given(PATHS, TRANSPORTS)
def test_goodput_is_within_the_path(path: TcpPath, transport: TcpEnds) -> None:
    found = goodput_bits_per_s(path, transport)
    assert 0 <= found <= path.bits_per_s
    assert goodput_bits_per_s(path, transport.alone) <= found
    assert most_bits_per_s(path, transport) >= found * (1 - 1e-12)


@pytest.mark.parametrize(
    ("rtt_ms", "loss", "connections", "mbit_per_s"),
    [
        # iperf3 in the WAN lab at 1 Gbit/s; docs/results/link.md has rows of one connection.
        (20, 1e-3, 1, 22),
        (20, 1e-3, 4, 90),
        (20, 1e-3, 16, 367),
        (20, 1e-2, 1, 7),
        (20, 1e-2, 16, 91),
        (40, 1e-3, 1, 22),
        (40, 1e-3, 4, 66),
        (40, 1e-3, 16, 224),
        (40, 1e-2, 1, 3),
        (40, 1e-2, 16, 50),
    ],
)
def test_cubic_under_loss_is_within_a_factor_of_two_of_the_lab(
    rtt_ms: float, loss: float, connections: int, mbit_per_s: float
) -> None:
    found = goodput_bits_per_s(
        TcpPath(1e9, rtt_ms * MS, loss), TcpEnds(connections=connections, control=CUBIC)
    )
    assert mbit_per_s / 2 <= found / 1e6 <= mbit_per_s * 2


def test_bbr_keeps_nine_tenths_of_a_path_that_loses_one_segment_in_a_hundred() -> None:
    found = goodput_bits_per_s(TcpPath(1e9, 40 * MS, 0.01), TcpEnds())
    assert found == pytest.approx(0.92e9)
    assert goodput_bits_per_s(TcpPath(1e9, 40 * MS, 0.3), TcpEnds()) == 0


def test_send_buffers_hold_a_long_path() -> None:
    far = TcpPath(100e9, 300 * MS)
    held = goodput_bits_per_s(far, TcpEnds(4))
    assert held == pytest.approx(0.75 * 4 * 16 * 2.7e6 * 8 / 0.3)
    assert most_bits_per_s(far, TcpEnds(4)) == pytest.approx(4 * 16 * 2**22 * 8 / 0.3)
    assert goodput_bits_per_s(far, TcpEnds(8)) == pytest.approx(2 * held)
    assert goodput_bits_per_s(far, TcpEnds(4, window_bytes=4 * 2.7e6)) == pytest.approx(4 * held)


def test_what_was_never_measured_is_named() -> None:
    metro = TcpPath(10e9, 2 * MS, 1e-4)
    far = replace(metro, rtt_s=0.3)
    assert MEASURED.gaps(far, TcpEnds(4), 2e9) == []
    assert MEASURED.gaps(far, TcpEnds(4), 8e9) == ["more than 24 MB in flight from one pool node"]
    assert MEASURED.gaps(metro, TcpEnds(4), 8e9) == []
    assert MEASURED.gaps(metro, TcpEnds(1), 8e9)[0].startswith("more than")
    gap, _ = MEASURED.gaps(replace(metro, rtt_s=10), TcpEnds(4), 1e9)
    assert gap.startswith("round trips above")
    (gap,) = MEASURED.gaps(replace(metro, loss=0.3), TcpEnds(4), 1e9)
    assert gap.startswith("loss above")


@pytest.mark.parametrize(
    ("rtt_ms", "loss", "mbit_per_s"),
    [
        # Links of pool nodes in the WAN lab at 1 Gbit/s: docs/results/fit.md.
        (10, 1e-3, 888.6),
        (40, 0.03, 668.2),
        (80, 0, 887.4),
        (80, 1e-3, 699.5),
        (80, 1e-2, 581.4),
        (160, 0, 741.3),
        (160, 1e-3, 556.0),
        (160, 1e-2, 459.3),
        (300, 0, 635.3),
        (300, 1e-3, 474.7),
        (300, 1e-2, 388.3),
    ],
)
def test_bbr_over_long_and_lossy_paths_is_as_measured(
    rtt_ms: float, loss: float, mbit_per_s: float
) -> None:
    bits = 256 * 2**20 * 8
    path = TcpPath(0.93e9, rtt_ms * MS, loss)
    seconds = bits / goodput_bits_per_s(path, TcpEnds()) + path.rtt_s
    assert bits / seconds / 1e6 == pytest.approx(mbit_per_s, rel=0.04)
