"""Number of connections of a link: windows for what it carries, and more where windows are held."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.pacing import (
    CONNECTIONS_MAX,
    LOSSY,
    SEGMENTS_MIN,
    WINDOWS_MIN,
    PathLoss,
    num_connections,
)

MS = 1_000_000


@dataclass
class Counted:
    segments: int = 0
    retransmits: int = 0
    rtt_ns: int = 100 * MS
    min_rtt_ns: int = 100 * MS


def after(loss: float, rtt_ms: int = 100, windows: int = WINDOWS_MIN) -> PathLoss:
    """Knowledge of a path when so many windows of segments were sent."""
    found, counted = PathLoss(), Counted(rtt_ns=rtt_ms * MS)
    for _ in range(windows + 1):
        found.sample([counted])
        counted.segments += SEGMENTS_MIN
        counted.retransmits += round(loss * SEGMENTS_MIN)
    return found


def test_a_long_path_that_loses_has_windows_for_three_round_trips() -> None:
    assert num_connections(930e6, 100 * MS) == 6
    assert num_connections(930e6, 100 * MS, is_lossy=True) == 14
    assert num_connections(930e6, 40 * MS, is_lossy=True) == 7
    assert num_connections(930e6, 5 * MS, is_lossy=True) == 4
    assert num_connections(930e6, 300 * MS, is_lossy=True) == CONNECTIONS_MAX


@given(st.floats(0, 1e12), st.integers(0, 10**9))
def test_loss_never_takes_connections_away(bits_per_s: float, rtt_ns: int) -> None:
    least = num_connections(bits_per_s, rtt_ns)
    assert least <= num_connections(bits_per_s, rtt_ns, is_lossy=True) <= CONNECTIONS_MAX


def test_a_path_that_loses_in_every_window_is_lossy() -> None:
    assert after(loss=0.001).is_lossy
    assert after(loss=LOSSY).is_lossy
    assert not after(loss=LOSSY / 2, windows=10).is_lossy


def test_what_is_lost_once_is_not_the_path() -> None:
    assert not after(loss=0.02, windows=WINDOWS_MIN - 1).is_lossy


def test_what_is_lost_beside_a_queue_may_be_our_own() -> None:
    assert not after(loss=0.02, rtt_ms=120, windows=10).is_lossy


def test_closed_connections_count_as_nothing_lost() -> None:
    found, stays = PathLoss(), Counted()
    for number in range(10):
        found.sample([stays, Counted(10 * SEGMENTS_MIN, number * SEGMENTS_MIN)])
        found.sample([stays])
        stays.segments += SEGMENTS_MIN
    assert not found.is_lossy


def test_few_segments_are_no_proof() -> None:
    found, counted = PathLoss(), Counted()
    found.sample([counted])
    counted.segments, counted.retransmits = SEGMENTS_MIN - 1, SEGMENTS_MIN - 1
    for _ in range(10):
        found.sample([counted])
    assert not found.is_lossy
