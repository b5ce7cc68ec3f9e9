"""Limits and times of the sending end of a link."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SendLimits:
    """Limits of the data connections of a link.

    Attributes:
        stuck_ns: A connection without delivery for this time is closed.
        redial_s: Wait before a lost connection is dialled again, seconds. It doubles while
            connections end soon.
        redial_max_s: Longest such wait, seconds.
        fragment_bytes_min: Smallest fragment that the size of fragments adapts to, bytes.
    """

    stuck_ns: int = 5 * 10**9
    redial_s: float = 0.5
    redial_max_s: float = 8.0
    fragment_bytes_min: int = 32 << 10


DEFAULTS = SendLimits()
