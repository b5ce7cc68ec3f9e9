"""Sources that are to blame for altered blocks of a prompt.

A block is altered by the pool that sent it, whichever transfer is verified: the source of that
transfer may have shipped the same block later, and its version was not kept. A pool that computed
from blocks of others (inherited) is to blame only if nothing before its block is altered. Otherwise
a source that alters a shared prefix could have those barred that continue it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlteredBlock:
    """A block that is not what an engine of this site computes.

    Attributes:
        position: Of the block in its prompt, in entries of the hash chain.
        sender: Pool that sent it over a link; empty if it was computed at this site or the sender
            is not known.
        is_inherited: True if the sender has it, or computed it, from blocks of others.
    """

    position: int
    sender: str
    is_inherited: bool = False


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
