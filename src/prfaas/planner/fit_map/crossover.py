"""Crossover: the bandwidth at which prefill-as-a-service begins to pay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.planner import formatting as w

LEAST_BITS_PER_S, MOST_BITS_PER_S = 1e6, 1e13
TOLERANCE = 0.01
"""Width at which the bisection stops, as a share of the bandwidth."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Bandwidth above which the gain at equal cost is positive.

    Args:
        bits_per_s: Bandwidth; 0 when it pays at any, inf when at none.
    """

    bits_per_s: float

    @property
    def text(self) -> str:
        """The bandwidth, "any" or "never"."""
        if self.bits_per_s == 0:
            return "any"
        return "never" if math.isinf(self.bits_per_s) else w.bandwidth(self.bits_per_s)


def crossover(gain: Callable[[float], float]) -> Crossover:
    """Find the bandwidth at which a gain turns positive, by bisection.

    Args:
        gain: Gain at equal cost at a bandwidth, bit/s; rises with it.
    """
    low, high = LEAST_BITS_PER_S, MOST_BITS_PER_S
    if gain(high) <= 0:
        return Crossover(math.inf)
    if gain(low) > 0:
        return Crossover(0.0)
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return Crossover(high)
