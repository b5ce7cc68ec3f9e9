"""Bytes on links by transfer: what the counters of links count, for the audit log.

Fragments are counted on the thread that sends and receives them, also of transfers that are over:
a fragment that was on its way when its transfer ended has crossed the link. So every byte that a
counter counts belongs to one entry here, and is taken out of it once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

ENTRIES_MAX = 50_000
"""More transfers are counted together: a peer chooses the ids of fragments that nobody wants."""
REST_MAX = 100
"""Late entries of one sweep that are reported each; others are reported together."""


@dataclass(frozen=True, slots=True)
class TransferBytes:
    """Bytes of one transfer.

    Attributes:
        peer: Pool at the other end.
        transfer_id: Empty for several together.
        link_bytes: As `prfaas_link_bytes` counts.
        wire_bytes: As `prfaas_link_wire_bytes` counts.
    """

    direction: str
    peer: str
    transfer_id: bytes
    link_bytes: int = 0
    wire_bytes: int = 0


_Key = tuple[str, str, bytes]


class MovedBytes:
    """Counts of bytes that no record has yet. Any thread may call it.

    Args:
        entries_max: Transfers that are counted each; further ones are counted together.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._lock = threading.Lock()
        self._counts: dict[_Key, list[int]] = {}
        self._late: set[_Key] = set()
        """Entries without an open transfer at the last sweep."""

    def add(
        self,
        direction: str,
        peer: str,
        transfer_id: bytes,
        *,
        link_bytes: int = 0,
        wire_bytes: int = 0,
    ) -> None:
        """Count bytes of a transfer."""
        key = direction, peer, transfer_id
        with self._lock:
            if key not in self._counts and len(self._counts) >= self._entries_max:
                key = direction, peer, b""
            counts = self._counts.setdefault(key, [0, 0])
            counts[0] += link_bytes
            counts[1] += wire_bytes

    def take(self, direction: str, peer: str, transfer_id: bytes) -> TransferBytes:
        """Take the bytes of a transfer that has ended."""
        key = direction, peer, transfer_id
        with self._lock:
            return TransferBytes(*key, *self._counts.pop(key, (0, 0)))

    def sweep(self, is_open: Callable[[str, bytes], bool]) -> list[TransferBytes]:
        """Take bytes of transfers that were not open at two sweeps in a row.

        Args:
            is_open: Returns True for a direction and the id of an open transfer.
        """
        with self._lock:
            over = {key for key in self._counts if not is_open(key[0], key[2])}
            found = [TransferBytes(*key, *self._counts.pop(key)) for key in over & self._late]
            self._late = over - {(each.direction, each.peer, each.transfer_id) for each in found}
        return [*found[:REST_MAX], *_together(found[REST_MAX:])]

    def take_all(self) -> list[TransferBytes]:
        """Take what is left, at the end of the process."""
        with self._lock:
            found = [TransferBytes(*key, *counts) for key, counts in self._counts.items()]
            self._counts.clear()
        return found


def _together(found: list[TransferBytes]) -> list[TransferBytes]:
    sums: dict[tuple[str, str], list[int]] = {}
    for each in found:
        row = sums.setdefault((each.direction, each.peer), [0, 0])
        row[0] += each.link_bytes
        row[1] += each.wire_bytes
    return [TransferBytes(*key, b"", *row) for key, row in sums.items()]
