"""Sizes of fragments: few, and long enough on far paths that each costs little of a core."""

from __future__ import annotations

import pytest

from prfaas.pool.net.link_end import SEND_LIMITS
from prfaas.pool.send.data_sender import FRAGMENT_BYTES_LARGEST, fragment_bytes

MS, KIB = 1_000_000, 1 << 10


@pytest.mark.parametrize(
    ("bits_per_s", "num_connections", "rtt_ms", "kib"),
    [
        (10**9, 4, 40, 256),
        (10**9, 4, 5, 256),
        (10**9, 6, 100, 512),
        (5 * 10**9, 6, 20, 1024),
        (10**7, 4, 40, 32),
        (10**11, 16, 300, 1024),
        (10**10, 2, 0, 1024),
    ],
)
def test_a_fragment_lasts_eight_milliseconds_or_a_fifth_of_a_round_trip(
    bits_per_s: int, num_connections: int, rtt_ms: int, kib: int
) -> None:
    assert fragment_bytes(bits_per_s // 8 // num_connections, rtt_ms * MS) == kib * KIB


def test_no_fragment_is_outside_of_its_limits() -> None:
    for bytes_per_s in (0, 1, 10**6, 10**12):
        for rtt_ns in (0, 10**6, 10**10):
            size = fragment_bytes(bytes_per_s, rtt_ns)
            assert SEND_LIMITS.fragment_bytes_min <= size <= FRAGMENT_BYTES_LARGEST
