"""Requests: synthetic arrivals and lengths, or a trace."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from math import pi
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.errors import ConfigError
from prfaas.planner.geometry import FloatArray
from prfaas.planner.lengths import LengthDistribution
from prfaas.sim.request import Request
from prfaas.units import NS_PER_S

IntArray = npt.NDArray[np.int64]

NUM_REQUESTS_MAX = 5_000_000
_NS_PER_MS = 1_000_000


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests without common prefixes.

    Attributes:
        rate_per_s: Mean arrival rate.
        duration_ns: Length of the arrivals.
        lengths: Prompt lengths.
        output_tokens: Mean output length.
        arrival_cv: Variation of the gaps: 1 is Poisson, more is burstier (Gamma).
        diurnal_ratio: Swing of the rate around its mean, in [0, 1); 0 is constant.
        diurnal_period_ns: Period of the swing.
        fixed_output: Every output has the mean length; else they are geometric.
    """

    rate_per_s: float
    duration_ns: int
    lengths: LengthDistribution
    output_tokens: float
    arrival_cv: float = 1.0
    diurnal_ratio: float = 0.0
    diurnal_period_ns: int = 3600 * NS_PER_S
    fixed_output: bool = True

    def requests(self, seed: int) -> list[Request]:
        """The requests, in order of arrival.

        Raises:
            ConfigError: They would be too many.
        """
        rng = np.random.default_rng(seed)
        at_ns = self._arrivals(rng)
        prompts = draw_lengths(self.lengths, len(at_ns), rng)
        outputs = self._outputs(len(at_ns), rng)
        rows = zip(at_ns.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        return [Request(i, at, prompt, out) for i, (at, prompt, out) in enumerate(rows)]

    def _arrivals(self, rng: np.random.Generator) -> IntArray:
        seconds = self.duration_ns / NS_PER_S
        expected = self.rate_per_s * seconds
        if expected > NUM_REQUESTS_MAX:
            raise ConfigError(
                f"workload: {self.rate_per_s} req/s for {seconds:.0f} s are {expected:,.0f} "
                f"requests, at most {NUM_REQUESTS_MAX:,} are simulated; shorten the duration"
            )
        shape = 1 / self.arrival_cv**2
        count = int(expected + 10 * (expected + 1) ** 0.5 * max(self.arrival_cv, 1)) + 10
        gaps = rng.gamma(shape, 1 / (self.rate_per_s * shape), count)
        times = self._warp(np.cumsum(gaps))
        return np.rint(times[times < seconds] * NS_PER_S).astype(np.int64)

    def _warp(self, times: FloatArray) -> FloatArray:
        """Stretch time so that the rate swings: invert its integral."""
        if self.diurnal_ratio == 0:
            return times
        period = self.diurnal_period_ns / NS_PER_S
        grid = np.linspace(0, self.duration_ns / NS_PER_S * 1.5, 20_001)
        # The swing starts at its low point.
        swing = self.diurnal_ratio * period / (2 * pi) * np.sin(2 * pi * grid / period)
        return np.asarray(np.interp(times, grid - swing, grid), dtype=np.float64)

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


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in Mooncake's schema; the last id of a prompt usually names a partial block.

    Attributes:
        path: JSON lines, gzipped or not.
        jitter_ns: Each arrival is moved by up to so much, within the trace's tick.
        rate_scale: Arrivals come so many times as fast.
        num_requests_max: Only the first so many; None is all.
    """

    path: Path
    jitter_ns: int = 0
    rate_scale: float = 1.0
    num_requests_max: int | None = None

    def requests(self, seed: int) -> list[Request]:
        """The requests, in order of arrival.

        Raises:
            ConfigError: The trace can not be read.
        """
        rng = np.random.default_rng(seed)
        found = []
        for row in self._rows():
            jitter = int(rng.integers(self.jitter_ns)) if self.jitter_ns else 0
            at_ns = round((row.timestamp * _NS_PER_MS + jitter) / self.rate_scale)
            found.append((at_ns, row))
        found.sort(key=lambda entry: entry[0])
        return [
            Request(
                i,
                at_ns,
                max(row.input_length, 1),
                max(row.output_length, 1),
                tuple(row.hash_ids),
            )
            for i, (at_ns, row) in enumerate(found[: self.num_requests_max])
        ]

    def _rows(self) -> Iterator[_Row]:
        decoder = msgspec.json.Decoder(_Row)
        try:
            raw = self.path.read_bytes()
            data = gzip.decompress(raw) if self.path.suffix == ".gz" else raw
            yield from (decoder.decode(line) for line in data.splitlines() if line.strip())
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise ConfigError(f"trace {self.path}: {error}") from error
