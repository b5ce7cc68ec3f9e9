"""Parts of the time to first token.

    arrived ─ lost ─► routed ─ queue ─► started ─ prefill ─► prefilled ─ transfer ─► landed
                                                      landed ─ decode admission ─► first token

A request whose first token came before its last prefill (its decode instance failed later) has no
such parts, and is left out.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.sim.results.columns import Columns
from prfaas.units import NS_PER_MS

PARTS = ("lost_attempts", "queue", "prefill", "transfer", "decode_admission")
_INSTANTS = (
    "arrived_at_ns",
    "routed_at_ns",
    "prefill_started_at_ns",
    "prefilled_at_ns",
    "landed_at_ns",
    "first_token_at_ns",
)
BUCKETS = ((0, 50), (50, 90), (90, 99), (99, 100))
"""Ranges of percentiles of TTFT."""


def parts_of(done: Columns) -> FloatArray:
    """Parts of each finished request, ms: one row a request, one column a part."""
    instants = np.stack([done[name] for name in _INSTANTS], axis=1)
    whole = instants[:, -1] >= instants[:, -2]
    return np.diff(instants[whole], axis=1) / NS_PER_MS


def means(parts: FloatArray) -> dict[str, float]:
    """Mean of each part, ms; empty without requests."""
    if not len(parts):
        return {}
    return dict(zip(PARTS, parts.mean(axis=0).tolist(), strict=True))


def by_percentile(parts: FloatArray) -> dict[str, dict[str, float]]:
    """Mean of each part, ms, over the requests in each range of percentiles of TTFT."""
    ordered = parts[np.argsort(parts.sum(axis=1), kind="stable")]
    edges = [round(len(ordered) * high / 100) for _, high in ((0, 0), *BUCKETS)]
    return {
        f"p{low}-p{high}": means(ordered[start:end])
        for (low, high), (start, end) in zip(BUCKETS, pairwise(edges), strict=True)
        if end > start
    }
