"""Limits on what peers may have a pool node receive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """Limits of the receiving end of a link.

    Attributes:
        transfers_max: Transfers known at once. Ended ones make room for new ones; where all are
            open, new ones are refused.
        peer_bytes_min: Memory that the unfinished blocks of a peer may take in any case, bytes.
        unfinished_blocks_max: Unfinished blocks of a peer. A sender starts the next block when it
            has handed out all fragments of the one before; each fragment that a slow connection
            still holds, in its window or in the buffers at either end, leaves a block unfinished.
            With fragments of 32 KiB the default is half a gigabyte of them.
        turn_bytes: Bytes that a data connection reads before the others are served.
        connections_max: Data connections over all peers. Each link may have an equal part of them,
            at least one, and is told how many (`Connections`).
    """

    transfers_max: int = 10_000
    peer_bytes_min: int = 64 << 20
    unfinished_blocks_max: int = 16_384
    turn_bytes: int = 512 << 10
    connections_max: int = 1024


DEFAULTS = ReceiveLimits()
