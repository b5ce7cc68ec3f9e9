"""Synthetic requests: random arrivals, lengths of a distribution, no common prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prfaas.planner.workload.prompt_lengths import LengthDistribution
from prfaas.sim.system.request import Request
from prfaas.sim.workloads.arrivals import RateShape, draw_arrivals
from prfaas.units import NS_PER_S

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests without common prefixes.

    Attributes:
        duration_ns: Length of the arrivals.
        arrival_cv: Variation of the gaps: 1 is Poisson, more is burstier (Gamma).
        shape: How the rate moves around its mean; None is constant.
        fixed_output: Every output has the mean length; else they are geometric.
    """

    rate_per_s: float
    duration_ns: int
    lengths: LengthDistribution
    output_tokens: float
    arrival_cv: float = 1.0
    shape: RateShape | None = None
    fixed_output: bool = True

    def requests(self, seed: int) -> list[Request]:
        """The requests, in order of arrival.

        Raises:
            ConfigError: They would be too many.
        """
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
    knots = np.array([lengths.quantile(float(ratio)) for ratio in ratios])
    drawn = np.interp(rng.random(count), ratios, knots)
    return np.array(np.maximum(np.rint(drawn), 1), dtype=np.int64)
