"""Which instance gets a request: filters drop candidates, scorers rate them, a picker decides.

Scores are absolute: the score of a candidate does not depend on who else is there, so adding a
worse candidate changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prfaas.core.routing import Reason
from prfaas.units import NS_PER_S

LOOKS_MAX = 64
"""Candidates that are scored at most: those behind them wait longer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of an instance.

    Attributes:
        name: Unique.
        ready: Whether it is healthy.
        wait_ns: Predicted wait; None when unknown.
        hit_tokens: Usable cached prefix of this request, tokens.
        num_tokens_max: Longest prompt it takes, tokens.
        layouts_agree: Whether its blocks mean the same where the request will be decoded.
        link_up: Whether its blocks can get there.
    """

    name: str
    ready: bool = True
    wait_ns: int | None = 0
    hit_tokens: int = 0
    num_tokens_max: int = 2**31
    layouts_agree: bool = True
    link_up: bool = True


Filter = Callable[[Candidate, int], bool]
Scorer = Callable[[Candidate, int], float]


def is_ready(candidate: Candidate, _num_tokens: int) -> bool:
    """Filter: healthy instances."""
    return candidate.ready


def fits(candidate: Candidate, num_tokens: int) -> bool:
    """Filter: instances whose context is long enough."""
    return num_tokens < candidate.num_tokens_max


def same_layout(candidate: Candidate, _num_tokens: int) -> bool:
    """Filter: instances whose blocks the decoding one understands."""
    return candidate.layouts_agree


def reachable(candidate: Candidate, _num_tokens: int) -> bool:
    """Filter: instances whose blocks can reach the decoding one."""
    return candidate.link_up


def short_wait(candidate: Candidate, _num_tokens: int) -> float:
    """Scorer in [0, 1]: 1 at no wait, 0.5 at one second; an unknown wait counts as the worst."""
    return 0.0 if candidate.wait_ns is None else NS_PER_S / (NS_PER_S + candidate.wait_ns)


def cached_prefix(candidate: Candidate, num_tokens: int) -> float:
    """Scorer in [0, 1]: share of the prompt that is cached."""
    return min(1.0, candidate.hit_tokens / num_tokens) if num_tokens > 0 else 0.0


DEFAULT_FILTERS: tuple[tuple[Filter, Reason], ...] = (
    (is_ready, Reason.NO_PREFILL_INSTANCE),
    (fits, Reason.NO_PREFILL_INSTANCE),
    (same_layout, Reason.LAYOUT_MISMATCH),
    (reachable, Reason.LINK_DOWN),
)
DEFAULT_SCORERS: tuple[tuple[Scorer, float], ...] = ((short_wait, 1.0), (cached_prefix, 0.5))


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen candidate, or what was in the way of the one that got furthest."""

    candidate: Candidate | None
    obstacle: Reason | None = None


def pick(
    candidates: Iterable[Candidate],
    num_tokens: int,
    *,
    hit_tokens_max: int,
    filters: Sequence[tuple[Filter, Reason]] = DEFAULT_FILTERS,
    scorers: Sequence[tuple[Scorer, float]] = DEFAULT_SCORERS,
) -> Pick:
    """The candidate that passes every filter and has the highest weighted score.

    Looks no further than needed: it stops once nobody who waits longer could score higher.

    Args:
        candidates: The instances, those that wait less first, which also decides among equals.
            An unknown wait may stand anywhere.
        num_tokens: Length of the prompt, tokens.
        hit_tokens_max: No candidate has a longer usable cached prefix, tokens.
        filters: All have to agree; each with what it means when nobody passes it.
        scorers: Each with its weight, above 0. No score falls when a wait is shorter or a hit
            longer.

    Returns:
        The best of the first `LOOKS_MAX` that pass; without any, the reason of the filter that
        the one that got furthest failed.
    """

    def score(candidate: Candidate) -> float:
        return sum(weight * rate(candidate, num_tokens) for rate, weight in scorers)

    best, best_score, furthest, num_looks = None, -1.0, 0, 0
    for candidate in candidates:
        failed = _first_failed(candidate, num_tokens, filters)
        if failed is not None:
            furthest = max(furthest, failed)
            continue
        if (found := score(candidate)) > best_score:
            best, best_score = candidate, found
        num_looks += 1
        # Nobody behind this one is better than an ideal one with the same wait.
        ideal = Candidate("", wait_ns=candidate.wait_ns or 0, hit_tokens=hit_tokens_max)
        if num_looks == LOOKS_MAX or best_score >= score(ideal):
            break
    return Pick(best) if best is not None else Pick(None, filters[furthest][1])


def _first_failed(
    candidate: Candidate, num_tokens: int, filters: Sequence[tuple[Filter, Reason]]
) -> int | None:
    for index, (keep, _) in enumerate(filters):
        if not keep(candidate, num_tokens):
            return index
    return None
