"""Attributes of many requests as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from prfaas.planner.geometry import FloatArray
from prfaas.sim.request import Request
from prfaas.sim.setup import SloSetup

IntArray = NDArray[np.int64]


def column(requests: Sequence[Request], name: str) -> IntArray:
    """One attribute, a whole number, of every request."""
    return np.fromiter(map(attrgetter(name), requests), np.int64, len(requests))


class Finished:
    """Requests that have finished, as columns.

    Args:
        requests: They have finished.

    Attributes:
        ttft_ns: Time to first token.
        latency_ns: From arrival to the last token.
        tpot_ns: Mean time per output token after the first; 0 without any.
        has_steps: Whether there is a token after the first.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        arrived, first = column(requests, "arrived_at_ns"), column(requests, "first_token_at_ns")
        ended = column(requests, "finished_at_ns")
        steps = column(requests, "num_output_tokens") - 1
        self.ttft_ns, self.latency_ns = first - arrived, ended - arrived
        self.has_steps = steps > 0
        self.tpot_ns: FloatArray = np.where(
            self.has_steps, (ended - first) / np.maximum(steps, 1), 0.0
        )

    def good(self, slo: SloSetup) -> NDArray[np.bool_]:
        """Which requests met every target."""
        good = np.ones(len(self.ttft_ns), dtype=bool)
        if slo.ttft_ns is not None:
            good &= self.ttft_ns <= slo.ttft_ns
        if slo.tpot_ns is not None:
            good &= self.tpot_ns <= slo.tpot_ns
        return good
