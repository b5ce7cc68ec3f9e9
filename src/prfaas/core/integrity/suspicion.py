"""Sources whose blocks verification does not reach: a share of unknown results, or ends that avoid
it.

Sources that are to blame for altered blocks of a prompt.

A block is altered by the pool that sent it, whichever transfer is verified: the source of that
transfer may have shipped the same block later, and its version was not kept. A pool that computed
from blocks of others (inherited) is to blame only if nothing before its block is altered. Otherwise
a source that alters a shared prefix could have those barred that continue it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class AlteredBlock:
    """A block that is not what an engine of this site computes."""

    position: int
    """Of the block in its prompt, in entries of the hash chain."""
    sender: str
    """Pool that sent it over a link; empty if it was computed at this site or the sender is not
    known."""
    is_inherited: bool = False
    """True if the sender has it, or computed it, from blocks of others."""


def blamed(altered: Sequence[AlteredBlock], *, is_complete: bool) -> frozenset[str]:
    """Return the pools that are to blame for altered blocks of one prompt.

    Args:
        altered: All altered blocks, or at least the first of each sender.
        is_complete: True if all blocks of the prompt up to the last one were compared. If not, a
            block before an inherited one may be altered, and its sender is not blamed.
    """
    first: dict[str, int] = {}
    for block in altered:
        first[block.sender] = min(block.position, first.get(block.sender, block.position))

    def is_excused(block: AlteredBlock) -> bool:
        earlier = (at for sender, at in first.items() if sender != block.sender)
        return not is_complete or any(at <= block.position for at in earlier)

    return frozenset(
        block.sender
        for block in altered
        if block.sender and not (block.is_inherited and is_excused(block))
    )


WINDOW = 12
"""Verifications of a source that are judged together."""
UNKNOWN_MAX = WINDOW // 2
"""Unknown ones among them that are no alarm."""
STOPPED_MAX = 2
"""Transfers among them that the source may stop once all blocks are there."""
SOURCES_MAX = 1000


class Suspicion(StrEnum):
    """Reason of an alarm; labels a metric."""

    UNKNOWN = "unknown"
    """Most of its transfers could not be compared."""
    NOT_COMMITTED = "not_committed"
    """Its transfers end without a commit although all blocks have arrived."""


class Suspicions:
    """Counts the verifications of each source; the one that began first is forgotten."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, list[int]] = OrderedDict()

    def add(self, source: str, *, is_unknown: bool, is_stopped: bool) -> Suspicion | None:
        """Count a verification; return the reason of an alarm, which begins a new window.

        Args:
            source: Pool that sent blocks.
            is_unknown: True if nothing could be compared.
            is_stopped: True if its transfer ended without a commit though all blocks are there.
        """
        counts = self._counts.setdefault(source, [0, 0, 0])
        for place, value in enumerate((1, is_unknown, is_stopped)):
            counts[place] += value
        if len(self._counts) > SOURCES_MAX:
            self._counts.popitem(last=False)
        num, num_unknown, num_stopped = counts
        found = None
        if num_stopped > STOPPED_MAX:
            found = Suspicion.NOT_COMMITTED
        elif num_unknown > UNKNOWN_MAX:
            found = Suspicion.UNKNOWN
        if found or num >= WINDOW:
            self._counts.pop(source, None)
        return found
