"""Workloads: prompt lengths, from distributions and traces.

The incremental length L of a prompt is left to prefill after the prefix cache. The throughput model
asks four things of a distribution: the share above a threshold, the mean and any other expectation
below it, and quantiles. All are vectorised over thresholds, because the search asks for every
threshold at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np

from prfaas.errors import ConfigError
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.traces.formats.detect import BLOCK_TOKENS, SESSIONS, detect
from prfaas.traces.reader import read_requests
from prfaas.traces.requests import RecordedRequest, new_tokens
from prfaas.traces.sessions.session_file import block_tokens_of, flattened, read_sessions

LengthFunction = Callable[[FloatArray], FloatArray]

_SIGMA_MIN = 0.001
_NUM_CELLS = 256
# Gauss-Legendre rule of a cell; the integrand is smooth between profile knots.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_NUM_QUANTILES = 4000


def _normal() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Distribution function of the standard normal, and its inverse.

    scipy's are six times as fast. A gateway and timing engines read plans without scipy: the
    standard library's differ by 2e-15 of a value.
    """
    try:
        from scipy.special import ndtr, ndtri
    except ModuleNotFoundError:
        normal = NormalDist()
        below = np.frompyfunc(lambda z: math.erfc(-z * math.sqrt(0.5)) / 2, 1, 1)
        inverse = np.frompyfunc(normal.inv_cdf, 1, 1)
        return (
            lambda z: np.asarray(below(z), dtype=np.float64),
            lambda ratio: np.asarray(inverse(ratio), dtype=np.float64),
        )
    return ndtr, ndtri


ndtr, ndtri = _normal()


class LengthDistribution(Protocol):
    """Incremental length of requests, tokens."""

    @property
    def low(self) -> float:
        """Shortest length, tokens."""

    @property
    def high(self) -> float:
        """Longest length, tokens."""

    @property
    def whole_high(self) -> float:
        """Longest whole prompt, cached prefix included, tokens."""

    def prefix(self, num_new_tokens: FloatArray) -> FloatArray:
        """Mean cached prefix of the requests of each incremental length, tokens."""

    def prob_above(self, threshold: FloatArray) -> FloatArray:
        """P(L > t) for each t."""

    def expectation_up_to(self, function: LengthFunction, threshold: FloatArray) -> FloatArray:
        """E[f(L); L <= t] for each t: the integral, not divided by the probability."""

    def mean_up_to(self, threshold: FloatArray) -> FloatArray:
        """E[L; L <= t] for each t, tokens."""

    def quantiles(self, ratios: FloatArray) -> FloatArray:
        """Length that a share of requests does not exceed, for each share, tokens."""

    def sample(self) -> tuple[FloatArray, FloatArray]:
        """Representative lengths in rising order and their weights, which sum to 1."""

    def scaled(self, factor: float) -> LengthDistribution:
        """The distribution of `factor * L`, with prefixes as much longer."""

    def with_more_hits(self, ratio: float) -> LengthDistribution:
        """A share `ratio` of the tokens that now miss the prefix cache hits it."""


def mean_length(lengths: LengthDistribution) -> float:
    """E[L], tokens."""
    return float(lengths.mean_up_to(np.array([lengths.high]))[0])


@dataclass(frozen=True)
class LogNormalLengths:
    """Log-normal lengths truncated to [low, high].

    Raises:
        ConfigError: A parameter is outside its range.

    References:
        arXiv:2604.15039, section 5: mu 9.90, sigma 1.00, [128, 128K].
    """

    mu: float
    """Mean of ln L before truncation."""
    sigma: float
    """Standard deviation of ln L before truncation, above 0."""
    low: float
    """Shortest length, tokens, above 0."""
    high: float
    """Longest length, tokens, above `low`."""
    prefix_ratio: float = 0.0
    """Cached tokens for each of L, 0 or more."""

    def __post_init__(self) -> None:
        if not self.sigma >= _SIGMA_MIN:
            raise ConfigError(
                f"sigma of the log-normal is {self.sigma:g}; it has to be at least {_SIGMA_MIN:g}"
            )
        if not 0 < self.low < self.high:
            raise ConfigError(
                f"log-normal lengths from {self.low} to {self.high} tokens: the range has to start "
                "above 0 and end above its start"
            )

    @cached_property
    def _range(self) -> tuple[float, float, float]:
        a, b = (float(self._z(np.array([x]))[0]) for x in (self.low, self.high))
        return a, b, float(ndtr(b) - ndtr(a))

    @property
    def whole_high(self) -> float:
        """Longest whole prompt, cached prefix included, tokens."""
        return self.high * (1 + self.prefix_ratio)

    def prefix(self, num_new_tokens: FloatArray) -> FloatArray:
        """Cached prefix of the requests of each incremental length, tokens."""
        return np.asarray(num_new_tokens * self.prefix_ratio, dtype=np.float64)

    def _z(self, length: FloatArray) -> FloatArray:
        return (np.log(np.clip(length, self.low, self.high)) - self.mu) / self.sigma

    def prob_above(self, threshold: FloatArray) -> FloatArray:
        """P(L > t), closed form."""
        _, b, mass = self._range
        return np.asarray((ndtr(b) - ndtr(self._z(threshold))) / mass, dtype=np.float64)

    def mean_up_to(self, threshold: FloatArray) -> FloatArray:
        """E[L; L <= t], closed form."""
        a, _, mass = self._range
        z = self._z(threshold)
        whole = np.exp(self.mu + self.sigma**2 / 2) / mass
        return np.asarray(whole * (ndtr(z - self.sigma) - ndtr(a - self.sigma)), dtype=np.float64)

    def expectation_up_to(self, function: LengthFunction, threshold: FloatArray) -> FloatArray:
        """E[f(L); L <= t] by Gauss-Legendre quadrature over cells of ln L."""
        edges = self._edges
        cells = self._integrate(function, edges[:-1], edges[1:])
        below = np.concatenate(([0.0], np.cumsum(cells)))
        z = self._z(threshold)
        cell = np.clip(np.searchsorted(edges, z, side="right") - 1, 0, len(cells) - 1)
        return below[cell] + self._integrate(function, edges[cell], z)

    @cached_property
    def _edges(self) -> FloatArray:
        a, b, _ = self._range
        return np.linspace(a, b, _NUM_CELLS + 1)

    def _integrate(self, function: LengthFunction, z0: FloatArray, z1: FloatArray) -> FloatArray:
        half = (z1 - z0)[:, None] / 2
        z = z0[:, None] + half * (_NODES + 1)
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) / self._range[2]
        values = function(np.exp(self.mu + self.sigma * z))
        return np.asarray(np.sum(values * density * _WEIGHTS * half, axis=1), dtype=np.float64)

    def quantiles(self, ratios: FloatArray) -> FloatArray:
        """Inverse of the distribution function."""
        a, _, mass = self._range
        return np.asarray(np.exp(self.mu + self.sigma * ndtri(ndtr(a) + ratios * mass)))

    def sample(self) -> tuple[FloatArray, FloatArray]:
        """Midpoints of equally likely slices."""
        ratios = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
        return self.quantiles(ratios), np.full(_NUM_QUANTILES, 1 / _NUM_QUANTILES)

    def scaled(self, factor: float) -> LogNormalLengths:
        """The log-normal of `factor * L`, with prefixes as much longer."""
        mu = self.mu + float(np.log(factor))
        low, high = self.low * factor, self.high * factor
        return LogNormalLengths(mu, self.sigma, low, high, self.prefix_ratio)

    def with_more_hits(self, ratio: float) -> LogNormalLengths:
        """A share `ratio` of the tokens that now miss the prefix cache hits it."""
        prefix_ratio = (self.prefix_ratio + ratio) / (1 - ratio)
        return replace(self.scaled(1 - ratio), prefix_ratio=prefix_ratio)


@dataclass(frozen=True)
class EmpiricalLengths:
    """Lengths as they were observed, each as likely as often as it occurs. `ConfigError`: No
    lengths, or a length that is not above 0, or other prefixes than lengths."""

    lengths: tuple[float, ...]
    """Tokens, any order, at least one, all above 0."""
    prefixes: tuple[float, ...] = ()
    """Cached tokens of each, 0 or more; empty without any."""

    def __post_init__(self) -> None:
        if self.prefixes and len(self.prefixes) != len(self.lengths):
            raise ConfigError(
                f"{len(self.prefixes)} cached prefixes for {len(self.lengths)} prompt lengths; "
                "each length has one"
            )
        if not self.lengths:
            raise ConfigError("workload.lengths is empty; give at least one prompt length")
        if min(self.lengths) <= 0:
            raise ConfigError(f"prompt length {min(self.lengths)} is not above 0 tokens")

    @cached_property
    def _sorted(self) -> FloatArray:
        return np.sort(np.asarray(self.lengths, dtype=np.float64))

    @property
    def low(self) -> float:
        """Shortest observed length, tokens."""
        return float(self._sorted[0])

    @property
    def high(self) -> float:
        """Longest observed length, tokens."""
        return float(self._sorted[-1])

    @property
    def whole_high(self) -> float:
        """Longest whole prompt, cached prefix included, tokens."""
        if not self.prefixes:
            return self.high
        return max(n + p for n, p in zip(self.lengths, self.prefixes, strict=True))

    @cached_property
    def _means(self) -> tuple[FloatArray, FloatArray]:
        """Distinct lengths, and the mean prefix of each."""
        lengths, places, counts = np.unique(
            np.asarray(self.lengths, dtype=np.float64), return_inverse=True, return_counts=True
        )
        sums = np.bincount(places, weights=np.asarray(self.prefixes, dtype=np.float64))
        return lengths, sums / counts

    def prefix(self, num_new_tokens: FloatArray) -> FloatArray:
        """Mean cached prefix of the requests of each incremental length, tokens."""
        if not self.prefixes:
            return np.zeros_like(num_new_tokens, dtype=np.float64)
        return np.asarray(np.interp(num_new_tokens, *self._means), dtype=np.float64)

    def prob_above(self, threshold: FloatArray) -> FloatArray:
        """Share of observations above t."""
        return 1.0 - self._count_up_to(threshold) / len(self._sorted)

    def mean_up_to(self, threshold: FloatArray) -> FloatArray:
        """Sum of observations up to t, divided by the number of all observations."""
        return self.expectation_up_to(lambda x: x, threshold)

    def expectation_up_to(self, function: LengthFunction, threshold: FloatArray) -> FloatArray:
        """Sum of f over observations up to t, divided by the number of all observations."""
        sums = np.concatenate(([0.0], np.cumsum(function(self._sorted)) / len(self._sorted)))
        return np.asarray(sums[self._count_up_to(threshold)], dtype=np.float64)

    def _count_up_to(self, threshold: FloatArray) -> np.typing.NDArray[np.intp]:
        return np.searchsorted(self._sorted, threshold, side="right")

    def quantiles(self, ratios: FloatArray) -> FloatArray:
        """Smallest observation that a share of all does not exceed, for each share."""
        found = np.quantile(self._sorted, ratios, method="inverted_cdf")
        return np.asarray(found, dtype=np.float64)

    def sample(self) -> tuple[FloatArray, FloatArray]:
        """All observations."""
        return self._sorted, np.full(len(self._sorted), 1 / len(self._sorted))

    def scaled(self, factor: float) -> EmpiricalLengths:
        """The same observations times `factor`, with prefixes as much longer."""
        lengths = tuple(length * factor for length in self.lengths)
        return EmpiricalLengths(lengths, tuple(prefix * factor for prefix in self.prefixes))

    def with_more_hits(self, ratio: float) -> EmpiricalLengths:
        """A share `ratio` of the tokens that now miss the prefix cache hits it."""
        before = self.prefixes or (0.0,) * len(self.lengths)
        pairs = zip(self.lengths, before, strict=True)
        prefixes = tuple(prefix + ratio * length for length, prefix in pairs)
        return EmpiricalLengths(tuple(x * (1 - ratio) for x in self.lengths), prefixes)


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Lengths of a trace."""

    new_tokens: tuple[int, ...]
    """Incremental length of each request, at least 1 token."""
    cached_tokens: tuple[int, ...]
    mean_prompt_tokens: float
    mean_output_tokens: float
    """Mean output; one that is missing or 0 counts as 1."""

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of prompt tokens that the cache served."""
        return 1 - sum(self.new_tokens) / (self.mean_prompt_tokens * len(self.new_tokens))


def read_trace(path: Path, cache_blocks: int | None = None) -> TraceLengths:
    """Incremental lengths of a trace replayed against one prefix cache.

    Args:
        path: A trace in any of the formats of `prfaas.traces`, or sessions; gzipped or not.
        cache_blocks: Size of the cache in blocks of 512 tokens; None is infinite.

    Raises:
        ConfigError: The file cannot be read, is in no known format, or a line is damaged.
    """
    form, block_tokens = detect(path), BLOCK_TOKENS
    rows: tuple[RecordedRequest, ...]
    if form == SESSIONS:
        sessions = read_sessions(path)
        block_tokens = block_tokens_of(sessions, BLOCK_TOKENS)
        rows = flattened(sessions, block_tokens)
    else:
        rows = read_requests(path, form, complete=False).rows
    prompts = [(row.num_prompt_tokens, row.block_ids) for row in rows]
    cached = None if cache_blocks is None else cache_blocks * BLOCK_TOKENS // block_tokens
    new = tuple(new_tokens(prompts, block_tokens, cached))
    return TraceLengths(
        new,
        tuple(max(row.num_prompt_tokens - n, 0) for row, n in zip(rows, new, strict=True)),
        sum(row.num_prompt_tokens for row in rows) / len(rows),
        sum(row.num_output_tokens for row in rows) / len(rows),
    )
