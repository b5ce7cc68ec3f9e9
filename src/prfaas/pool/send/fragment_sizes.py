"""Sizes of the fragments of a link's connections, by what each carries and the round trip."""

from __future__ import annotations

from typing import NamedTuple

from prfaas.units import NS_PER_S

FRAGMENT_BYTES_LARGEST = 1 << 20
FIRST_NS = 4_000_000
"""Duration of a fragment of the first block of a transfer, which all connections share."""
FRAGMENT_NS, FRAGMENT_ROUND_TRIPS = 16_000_000, 1 / 5
"""Duration of the others: the longer of a time and a part of the round trip.

It is short enough that an urgent block waits little, and long enough that headers and scheduling do
not matter: most of the CPU time of a slow link is spent for each fragment, and not for each byte.
"""


class FragmentSizes(NamedTuple):
    """Bytes; fragments are powers of two, so that sizes are few."""

    largest: int
    """Of a fragment."""
    first: int
    """Largest fragment of a first block."""
    backlog: int
    """What a socket holds beyond its congestion window; an urgent block waits for it. The kernel
    asks for more when half of it is left, which has to last until the lane runs; on far paths half
    a fragment lasts so long."""


def fragment_sizes(bytes_per_s: int, rtt_ns: int, bytes_min: int) -> FragmentSizes:
    """Return the sizes of one connection.

    Args:
        bytes_per_s: Throughput of the connection.
        rtt_ns: Round trip of the path.
        bytes_min: Smallest fragment.
    """
    lasts_ns = max(FRAGMENT_NS, round(rtt_ns * FRAGMENT_ROUND_TRIPS))
    largest = _size(bytes_per_s, lasts_ns, bytes_min)
    first = _size(bytes_per_s, FIRST_NS, bytes_min)
    return FragmentSizes(largest, first, max(largest, 4 * first))


def _size(bytes_per_s: int, lasts_ns: int, bytes_min: int) -> int:
    wanted = 1 << max(0, bytes_per_s * lasts_ns // NS_PER_S - 1).bit_length()
    return max(bytes_min, min(FRAGMENT_BYTES_LARGEST, wanted))
