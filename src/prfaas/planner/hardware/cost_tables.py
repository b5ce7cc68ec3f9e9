"""Profiles and geometry as the tables that decisions are made from."""

from __future__ import annotations

import numpy as np

from prfaas.core.routing.predictions import RESUME_SHIFT, Costs
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.model.kv_geometry import KvGeometry, kv_bytes_at
from prfaas.units import NS_PER_S


def prefill_table(profile: PrefillProfile, num_tokens_max: int) -> list[int]:
    """Prefill time at every length from 0 to `num_tokens_max`, ns; 0 at 0."""
    seconds = profile.at(np.arange(num_tokens_max + 1, dtype=np.float64))
    table: list[int] = np.rint(seconds * NS_PER_S).astype(np.int64).tolist()
    table[0] = 0
    return table


def resume_table(profile: PrefillProfile, num_tokens_max: int) -> list[int]:
    """Time of a resumed prefill beside its tokens, ns, for each 2**`RESUME_SHIFT` tokens of prefix:
    that of the one in the middle."""
    step = 1 << RESUME_SHIFT
    prefixes = np.arange(0, num_tokens_max + 1, step, dtype=np.float64) + step / 2
    table: list[int] = np.rint(profile.resume_at(prefixes) * NS_PER_S).astype(np.int64).tolist()
    return table


def make_costs(
    geometry: KvGeometry,
    local: PrefillProfile,
    remote: PrefillProfile,
    *,
    num_tokens_max: int,
    chunk_tokens: int,
    overlap: bool,
) -> Costs:
    """Tables up to `num_tokens_max` tokens."""
    lengths = np.arange(num_tokens_max + 1, dtype=np.float64)
    sizes: list[int] = np.rint(kv_bytes_at(geometry, lengths)).astype(np.int64).tolist()
    return Costs(
        prefill_table(local, num_tokens_max),
        prefill_table(remote, num_tokens_max),
        sizes,
        geometry.state_bytes,
        chunk_tokens,
        overlap,
        local_resume_ns=resume_table(local, num_tokens_max),
        remote_resume_ns=resume_table(remote, num_tokens_max),
    )
