"""A limit on wrong operator keys. Right keys are never refused: a stranger locks nobody out."""

from __future__ import annotations

from prfaas.units import NS_PER_S

TRIES_MAX = 10
WINDOW_NS = 60 * NS_PER_S
ADDRESSES_MAX = 1024
"""Addresses that are remembered; beyond it the oldest is forgotten."""


class WrongKeys:
    """Counts wrong keys by address."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}

    def wrong(self, address: str, now_ns: int) -> int:
        """Count a wrong key.

        Returns:
            Seconds after which another try is answered; 0 if this one is.
        """
        since_ns, count = self._counts.pop(address, (now_ns, 0))
        if now_ns - since_ns >= WINDOW_NS:
            since_ns, count = now_ns, 0
        while len(self._counts) >= ADDRESSES_MAX:
            del self._counts[next(iter(self._counts))]
        self._counts[address] = since_ns, count + 1
        if count < TRIES_MAX:
            return 0
        return max(1, -(-(since_ns + WINDOW_NS - now_ns) // NS_PER_S))
