"""Attributes of many requests as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from prfaas.core.request.events import Outcome
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import SloSetup

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
    return np.array([r.outcome is Outcome.FINISHED for r in requests], dtype=bool)


class FinishedRequests:
    """Requests that have finished.

    Attributes:
        ttft_ns: Time to first token.
        latency_ns: From arrival to the last token.
        tpot_ns: Mean time per output token after the first; 0 without any.
        has_steps: True if there is a token after the first.
    """

    def __init__(self, columns: Columns) -> None:
        arrived, first = columns["arrived_at_ns"], columns["first_token_at_ns"]
        ended, steps = columns["finished_at_ns"], columns["num_output_tokens"] - 1
        self.ttft_ns, self.latency_ns = first - arrived, ended - arrived
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
