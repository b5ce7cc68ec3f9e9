"""Attributes of many requests as arrays, their spread, and the parts of TTFT.

    arrived ─ lost ─► routed ─ queue ─► started ─ prefill ─► prefilled ─ transfer ─► landed
                                                      landed ─ decode admission ─► first token

The last instant is the second token where the engine that prefilled gave the first one.
A request whose first token came before its last prefill (its decode instance failed later) has no
such parts, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from prfaas.core.request.events import Outcome
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import SloSetup
from prfaas.units import NS_PER_MS

IntArray = NDArray[np.int64]


def column(requests: Sequence[Request], name: str) -> IntArray:
    """One attribute, a whole number, of every request."""
    return np.fromiter(map(attrgetter(name), requests), np.int64, len(requests))


class Columns(dict[str, IntArray]):
    """Attributes of requests by name; each is read once.

    Args:
        read: Gives the column of a name.
    """

    def __init__(self, read: Callable[[str], IntArray]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, name: str) -> IntArray:
        found = self[name] = self._read(name)
        return found

    def chosen(self, which: NDArray[np.bool_]) -> Columns:
        """The same of some of the requests."""
        return Columns(lambda name: self[name][which])


def columns_of(requests: Sequence[Request]) -> Columns:
    """All columns of some requests."""
    return Columns(lambda name: column(requests, name))


def have_finished(requests: Sequence[Request]) -> NDArray[np.bool_]:
    """Mask of finished requests."""
    finished = Outcome.FINISHED
    return np.array([r.outcome is finished for r in requests], dtype=bool)


class FinishedRequests:
    """Requests that have finished.

    Attributes:
        ttft_ns: Time to first token.
        ttst_ns: Time to the second token of those whose first one came early.
        latency_ns: From arrival to the last token.
        tpot_ns: Mean time per output token after the first; 0 without any.
        has_steps: True if there is a token after the first.
    """

    def __init__(self, columns: Columns) -> None:
        arrived, first = columns["arrived_at_ns"], columns["first_token_at_ns"]
        ended, steps = columns["finished_at_ns"], columns["num_output_tokens"] - 1
        self.ttft_ns, self.latency_ns = first - arrived, ended - arrived
        second = columns["second_token_at_ns"]
        self.ttst_ns = (second - arrived)[second >= 0]
        self.has_steps = steps > 0
        self.tpot_ns: FloatArray = np.where(
            self.has_steps, (ended - first) / np.maximum(steps, 1), 0.0
        )

    def good(self, slo: SloSetup) -> NDArray[np.bool_]:
        """Mask of requests that met every target."""
        good = np.ones(len(self.ttft_ns), dtype=bool)
        if slo.ttft_ns is not None:
            good &= self.ttft_ns <= slo.ttft_ns
        if slo.tpot_ns is not None:
            good &= self.tpot_ns <= slo.tpot_ns
        return good


PERCENTILES = (50, 75, 90, 95, 99)


def spread(values: Sequence[float] | FloatArray | NDArray[np.int64]) -> dict[str, float]:
    """avg, min, max, std (of the population) and percentiles, linear between values; returns empty
    without values."""
    found = np.asarray(values, dtype=np.float64)
    if found.size == 0:
        return {}
    percentiles = np.percentile(found, PERCENTILES)
    return {
        "avg": float(found.mean()),
        "min": float(found.min()),
        **{f"p{p}": float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)},
        "max": float(found.max()),
        "std": float(found.std()),
    }


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
    instants[:, -1] = np.maximum(instants[:, -1], done["second_token_at_ns"])
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
