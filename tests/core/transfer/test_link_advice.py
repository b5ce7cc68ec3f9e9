"""Advice from the figures of a link test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.tcp_goodput import Probe, SendingHost, advise, best_of, budget_for

MS = 10**6
BBR = SendingHost("bbr", 4 << 20)


def a_probe(count: int, mbit: float, **fields: int) -> Probe:
    values = {"rtt_ns": 40 * MS, "loaded_rtt_ns": 40 * MS, "segments": 1000, "retransmits": 0}
    return Probe(num_connections=count, goodput_bits_per_s=round(mbit * 1e6), **(values | fields))


WAN = [a_probe(1, 502), a_probe(2, 931), a_probe(4, 935), a_probe(8, 920)]


def test_the_fewest_connections_that_carry_enough_are_best() -> None:
    assert best_of(WAN).num_connections == 2
    assert best_of(WAN[:1]).num_connections == 1
    assert advise(WAN, BBR)[0].startswith("connections = 2 ")


@given(
    rates=st.lists(st.integers(1, 10**12), min_size=1, max_size=8),
)
def test_the_budget_is_just_under_what_arrived(rates: list[int]) -> None:
    probes = [a_probe(1, rate / 1e6) for rate in rates]
    most = max(probe.goodput_bits_per_s for probe in probes)
    assert 0.98 * most <= budget_for(probes) <= most


def test_a_budget_is_written_as_the_deployment_file_takes_it() -> None:
    from prfaas.units import parse_rate

    line = next(line for line in advise(WAN, BBR) if line.startswith("budget"))
    assert parse_rate(line.split('"')[1]) == 935_000_000


def test_a_congestion_control_that_gives_way_is_named() -> None:
    assert not any("congestion" in line for line in advise(WAN, BBR))
    advice = advise(WAN, SendingHost("cubic", 4 << 20))
    assert any("cubic" in line and "tcp_allowed_congestion_control" in line for line in advice)


def test_what_bbr_loses_itself_calls_for_a_budget() -> None:
    lossy = [a_probe(4, 900, retransmits=20)]
    assert any("2.0% of segments" in line for line in advise(lossy, BBR))
    assert not any("sent again" in line for line in advise([a_probe(4, 900)], BBR))


def test_a_queue_that_builds_up_is_told() -> None:
    full = [a_probe(4, 900, loaded_rtt_ns=60 * MS)]
    assert any("from 40.0 ms by 20.0 ms" in line for line in advise(full, BBR))


@pytest.mark.parametrize(
    ("buffer_bytes", "is_told"), [(4 << 20, True), (16 << 20, False), (0, False)]
)
def test_a_send_buffer_that_is_too_small_is_told(buffer_bytes: int, is_told: bool) -> None:
    """935 Mbit/s at 40 ms are 4.7 MB under way."""
    advice = advise(WAN, SendingHost("bbr", buffer_bytes))
    assert any('tcp_wmem="4096 65536 8388608"' in line for line in advice) is is_told


def test_of_nothing_sent_nothing_was_lost() -> None:
    assert a_probe(1, 0, segments=0).retransmit_ratio == 0
