"""A first-come-first-served queue with several servers, simulated: the judge of the formula."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def waits(arrivals_s: FloatArray, service_s: FloatArray, num_servers: int) -> FloatArray:
    """Waiting time of each arrival, s."""
    free_at = [0.0] * num_servers
    heapq.heapify(free_at)
    found = np.empty_like(arrivals_s)
    for i, (arrival, service) in enumerate(
        zip(arrivals_s.tolist(), service_s.tolist(), strict=True)
    ):
        start = max(arrival, heapq.heappop(free_at))
        heapq.heappush(free_at, start + service)
        found[i] = start - arrival
    return found
