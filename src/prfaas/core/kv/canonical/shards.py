"""The units of a section that each rank of tensor parallelism holds.

Two rules cover the engines there are. With at least as many units as ranks, ranks hold runs of
equal length; where that does not come out even, the last ranks have slots without a unit. With
fewer units than ranks, each rank holds one, and neighbouring ranks hold copies of it.

Sources: vLLM 0.32, `QKVParallelLinear` (`tp_size // total_num_kv_heads` ranks share a head) and
`mamba_v2_sharded_weight_loader` (one group of Mamba-2 is copied to all ranks).
"""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """The units of one rank."""

    first: int
    num: int
    """Their number; 0 if all slots are padding."""
    slots: int
    """Places for units in the memory of a rank, the same for all ranks, at least 1."""


def shard(units: int, tp_rank: int, tp_size: int) -> Shard:
    """Return the units of a rank.

    Args:
        units: Units of the section, at least 1.
        tp_rank: Number of the rank, below `tp_size`.
        tp_size: Ranks that divide the units, at least 1.
    """
    if units < tp_size:
        return Shard(tp_rank * units // tp_size, 1, 1)
    slots = -(-units // tp_size)
    first = min(tp_rank * slots, units)
    return Shard(first, min(slots, units - first), slots)


def divides(units: int, tp_size: int) -> bool:
    """Return True if all ranks hold equally many units, and all units equally many copies."""
    return units % tp_size == 0 or tp_size % units == 0
