"""Figures of a recorded workload: load, lengths, bursts, common prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prfaas.traces.requests import RecordedRequest, new_tokens
from prfaas.traces.sessions.session_file import Session
from prfaas.units import NS_PER_S

NUM_BINS = 60
"""Width of the plot of arrivals."""
_PEAK_S = 60
_TICK_S_MIN = 0.1
_NUM_PER_TICK_MIN = 1.5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and maximum of a length or a time."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Arrivals at instants of their own."""

    span_s: float
    """From the first to the last request."""
    rate_per_s: float
    peak_ratio: float | None
    """Rate of the fullest minute to the mean rate; None for a shorter span."""
    gap_cv: float
    """Variation of the gaps between arrivals: 1 is Poisson, more is burstier."""
    tick_s: float | None
    """Several requests share an instant, and instants are so far apart; None if not."""
    arrivals: tuple[int, ...]
    """Requests in each of `NUM_BINS` equal parts of the span."""


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Number of sessions, requests of each, pauses before a turn (s), starts per second."""

    num_sessions: int
    turns: Spread
    pause_s: Spread | None
    start_rate_per_s: float | None


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """A recorded workload."""

    num_requests: int
    prompt_tokens: Spread
    output_tokens: Spread
    new_tokens: Spread
    """Prompts without the prefix that an unlimited cache has of them."""
    prefix_hit_ratio: float
    """Share of prompt tokens that such a cache has."""
    num_with_ids: int
    """Requests with ids of blocks; of the others no common prefix is known."""
    load: LoadFigures | None
    """None for sessions whose starts are not recorded."""
    sessions: SessionFigures | None = None
    """None for requests without sessions."""


def figures_of(
    rows: Sequence[RecordedRequest], block_tokens: int, sessions: Sequence[Session] = ()
) -> TraceFigures:
    """The figures of a workload.

    Args:
        rows: In order of arrival; at least one.
        sessions: Those that the rows were made of; empty if they come by themselves.
    """
    prompts = np.array([row.num_prompt_tokens for row in rows], dtype=np.float64)
    outputs = np.array([row.num_output_tokens for row in rows], dtype=np.float64)
    asked = [(row.num_prompt_tokens, row.block_ids) for row in rows]
    new = np.array(new_tokens(asked, block_tokens, None), dtype=np.float64)
    timed = all(session.start_s is not None for session in sessions)
    return TraceFigures(
        len(rows),
        _spread(prompts),
        _spread(outputs),
        _spread(new),
        float(1 - new.sum() / prompts.sum()),
        sum(1 for row in rows if row.block_ids),
        _load(rows) if timed else None,
        _sessions(sessions) if sessions else None,
    )


def _spread(values: Floats) -> Spread:
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Spread(float(values.mean()), p50, p90, p99, float(values.max()))


def _load(rows: Sequence[RecordedRequest]) -> LoadFigures:
    at_s = np.array([row.at_ns for row in rows], dtype=np.float64) / NS_PER_S
    gaps, span_s = np.diff(at_s), float(at_s[-1] - at_s[0])
    rate = (len(rows) - 1) / span_s if span_s else 0.0
    peak = None
    if span_s >= 2 * _PEAK_S:
        counts = np.histogram(at_s, np.arange(at_s[0], at_s[-1] + _PEAK_S, _PEAK_S))[0]
        peak = float(counts.max() / _PEAK_S / rate)
    bins = np.histogram(at_s, NUM_BINS)[0]
    cv = float(gaps.std() / gaps.mean()) if span_s else 0.0
    return LoadFigures(span_s, rate, peak, cv, _tick_s(rows), tuple(bins.tolist()))


def _tick_s(rows: Sequence[RecordedRequest]) -> float | None:
    instants = np.unique(np.array([row.at_ns for row in rows]))
    if len(instants) < 2 or len(rows) < _NUM_PER_TICK_MIN * len(instants):
        return None
    tick_s = float(np.median(np.diff(instants))) / NS_PER_S
    return None if tick_s < _TICK_S_MIN else tick_s


def _sessions(sessions: Sequence[Session]) -> SessionFigures:
    turns = np.array([len(session.turns) for session in sessions], dtype=np.float64)
    pauses = [t.think_s for session in sessions for t in session.turns if t.after is not None]
    starts = [session.start_s for session in sessions if session.start_s is not None]
    span_s = max(starts) - min(starts) if len(starts) == len(sessions) else 0.0
    return SessionFigures(
        len(sessions),
        _spread(turns),
        _spread(np.array(pauses)) if pauses else None,
        (len(starts) - 1) / span_s if span_s else None,
    )
