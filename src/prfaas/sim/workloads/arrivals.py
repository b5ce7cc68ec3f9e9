"""Instants of arrival: random gaps, at a rate that may change over time."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import numpy as np

from prfaas.errors import ConfigError
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.traces.formats.rate_curve import Steps
from prfaas.traces.limits import NUM_REQUESTS_MAX


@dataclass(frozen=True, slots=True)
class SineSwing:
    """A sine around the mean, from its low point.

    Attributes:
        ratio: Swing, as a share of the mean, in [0, 1).
    """

    ratio: float
    period_s: float

    def knots(self, until_s: float) -> FloatArray:
        """A fine grid."""
        return np.linspace(0, until_s, 20_001)

    def integral(self, at_s: FloatArray) -> FloatArray:
        """Closed form."""
        swing = self.ratio * self.period_s / (2 * pi) * np.sin(2 * pi * at_s / self.period_s)
        return at_s - swing


RateShape = SineSwing | Steps
"""Shape of a rate around its mean: instants between which it hardly changes, and its integral."""


def draw_arrivals(
    rng: np.random.Generator,
    rate_per_s: float,
    until_s: float,
    cv: float = 1.0,
    shape: RateShape | None = None,
) -> FloatArray:
    """Instants below `until_s`, s, rising.

    Args:
        until_s: End of the arrivals.
        cv: Variation of the gaps: 1 is Poisson, more is burstier (Gamma).
        shape: How the rate moves; None is constant. Gaps are stretched by it.

    Raises:
        ConfigError: They would be too many.
    """
    if shape is None:
        return _constant(rng, rate_per_s, until_s, cv)
    knots = shape.knots(until_s)
    work = shape.integral(knots)
    return np.interp(_constant(rng, rate_per_s, float(work[-1]), cv), work, knots)


def _constant(rng: np.random.Generator, rate_per_s: float, until_s: float, cv: float) -> FloatArray:
    expected = rate_per_s * until_s
    if expected > NUM_REQUESTS_MAX:
        raise ConfigError(
            f"workload: {rate_per_s:g} per second for {until_s:.0f} s are {expected:,.0f} "
            f"requests, at most {NUM_REQUESTS_MAX:,} are simulated; shorten the duration"
        )
    gamma, count = 1 / cv**2, int(expected + 10 * (expected + 1) ** 0.5 * max(cv, 1)) + 10
    times = np.cumsum(rng.gamma(gamma, 1 / (rate_per_s * gamma), count))
    return times[times < until_s]
