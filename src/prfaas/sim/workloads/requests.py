"""Instants of arrivals, and requests of synthetic and recorded workloads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from prfaas.errors import ConfigError
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.planner.workload import LengthDistribution
from prfaas.sim.system.request import Request
from prfaas.traces.checks import NUM_REQUESTS_MAX
from prfaas.traces.formats.columns import Steps
from prfaas.traces.requests import RecordedRequest
from prfaas.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class SineSwing:
    """A sine around the mean, from its low point."""

    ratio: float
    """Swing, as a share of the mean, in [0, 1)."""
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
    """Instants below `until_s`, s, rising; ConfigError if they would be too many.

    Args:
        until_s: End of the arrivals.
        cv: Variation of the gaps: 1 is Poisson, more is burstier (Gamma).
        shape: How the rate moves; None is constant. Gaps are stretched by it.
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


IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests without common prefixes."""

    rate_per_s: float
    duration_ns: int
    """Length of the arrivals."""
    lengths: LengthDistribution
    output_tokens: float
    arrival_cv: float = 1.0
    """Variation of the gaps: 1 is Poisson, more is burstier (Gamma)."""
    shape: RateShape | None = None
    """How the rate moves around its mean; None is constant."""
    fixed_output: bool = True
    """Every output has the mean length; else they are geometric."""

    def requests(self, seed: int) -> list[Request]:
        """The requests, in order of arrival; ConfigError if they would be too many."""
        rng = np.random.default_rng(seed)
        duration_s = self.duration_ns / NS_PER_S
        times = draw_arrivals(rng, self.rate_per_s, duration_s, self.arrival_cv, self.shape)
        at_ns = np.rint(times * NS_PER_S).astype(np.int64)
        prompts = draw_lengths(self.lengths, len(at_ns), rng)
        outputs = self._outputs(len(at_ns), rng)
        rows = zip(at_ns.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        return [Request(i, at, prompt, out) for i, (at, prompt, out) in enumerate(rows)]

    def with_rate_scaled(self, factor: float) -> Synthetic:
        """The same at `factor` times the rate."""
        return replace(self, rate_per_s=self.rate_per_s * factor)

    @property
    def num_prompt_tokens_max(self) -> int:
        """The longest of the distribution, tokens."""
        return max(round(self.lengths.high), 1)

    def _outputs(self, count: int, rng: np.random.Generator) -> IntArray:
        if self.fixed_output:
            return np.full(count, round(self.output_tokens), dtype=np.int64)
        drawn = rng.geometric(1 / max(self.output_tokens, 1.0), count)
        return np.array(drawn, dtype=np.int64)


def draw_lengths(lengths: LengthDistribution, count: int, rng: np.random.Generator) -> IntArray:
    """Prompt lengths by inversion of the distribution function, tokens, at least 1."""
    ratios = np.linspace(0, 1, 20_001)
    drawn = np.interp(rng.random(count), ratios, lengths.quantiles(ratios))
    return np.array(np.maximum(np.rint(drawn), 1), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests."""

    rows: tuple[RecordedRequest, ...]
    jitter_ns: int = 0
    """Each arrival is moved by up to so much, within the trace's tick."""
    rate_scale: float = 1.0
    """Arrivals come so many times as fast."""
    num_requests_max: int | None = None
    """Only the first so many; None is all."""

    def requests(self, seed: int) -> list[Request]:
        """The requests, in order of arrival."""
        rng, count = np.random.default_rng(seed), len(self.rows)
        jitters = rng.integers(self.jitter_ns, size=count).tolist() if self.jitter_ns else []
        found = [
            (round((row.at_ns + jitter) / self.rate_scale), row)
            for row, jitter in zip(self.rows, jitters or [0] * count, strict=True)
        ]
        found.sort(key=itemgetter(0))
        return [
            Request(i, at_ns, r.num_prompt_tokens, r.num_output_tokens, r.block_ids, r.tenant)
            for i, (at_ns, r) in enumerate(found[: self.num_requests_max])
        ]

    def with_rate_scaled(self, factor: float) -> Trace:
        """The same, `factor` times as fast."""
        return replace(self, rate_scale=self.rate_scale * factor)

    @property
    def num_prompt_tokens_max(self) -> int:
        """The longest prompt, tokens."""
        return max(row.num_prompt_tokens for row in self.rows)
