"""Blocks that overtook the offer of their transfer, which comes over another connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.wire.fragments import ReceivedBlock

EARLY_NS = 5 * 10**9
"""A connection for messages that is later than this is dead."""

Delivery = tuple[ReceivedBlock, Callable[[], None]]
"""A block, and what to call once it is dealt with."""


@dataclass(slots=True)
class _Waiting:
    since_ns: int
    num_bytes: int = 0
    deliveries: list[Delivery] = field(default_factory=list)


class EarlyBlocks:
    """Holds blocks until the offer of their transfer is answered.

    There are never many: a data connection continues only when its last few blocks are dealt with.

    Args:
        bytes_max: Of one peer; a single block may be larger.
    """

    def __init__(self, clock_ns: Callable[[], int], bytes_max: int) -> None:
        self._clock_ns = clock_ns
        self._bytes_max = bytes_max
        self._waiting: dict[tuple[str, bytes], _Waiting] = {}

    def add(self, peer: str, block: ReceivedBlock, done: Callable[[], None]) -> bool:
        """A block came before its offer.

        Returns:
            False if the peer has too many of them; it is not held.
        """
        held = sum(one.num_bytes for (other, _), one in self._waiting.items() if other == peer)
        if held and held + len(block.data) > self._bytes_max:
            return False
        waiting = self._waiting.setdefault((peer, block.transfer_id), _Waiting(self._clock_ns()))
        waiting.num_bytes += len(block.data)
        waiting.deliveries.append((block, done))
        return True

    def take(self, peer: str, transfer_id: bytes) -> list[Delivery]:
        """Return and remove the early blocks of a transfer, in order."""
        waiting = self._waiting.pop((peer, transfer_id), None)
        return waiting.deliveries if waiting is not None else []

    def all(self) -> list[tuple[str, bytes]]:
        """Peers and transfers of which blocks wait."""
        return list(self._waiting)

    def overdue(self) -> list[tuple[str, bytes]]:
        """Peers and transfers without an expected offer."""
        oldest = self._clock_ns() - EARLY_NS
        return [name for name, waiting in self._waiting.items() if waiting.since_ns < oldest]
