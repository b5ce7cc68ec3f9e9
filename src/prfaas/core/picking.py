"""Which instance gets a request: filters drop candidates, scorers rate them, a picker decides.

Scores are absolute: the score of a candidate does not depend on who else is there, so adding a
worse candidate changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.core.routing import Reason
from prfaas.units import NS_PER_S

LOOKS_MAX = 256
"""Candidates that are scored at most: those behind them wait longer."""
HINT_WEIGHT = 0.5
"""What a prefix that may be cached counts, against one that is."""
SHOWN_MAX = 8
"""Candidates that a pick remembers, for whoever asks why."""
OPEN_HALF = 16
"""Open requests at which an instance counts half as attractive as an idle one."""


class Candidate(NamedTuple):
    """What is known of an instance. A tuple, because every decision makes several.

    Attributes:
        name: Unique.
        ready: Whether it is healthy.
        wait_ns: Predicted wait; None when unknown.
        hit_tokens: Usable cached prefix of this request, tokens.
        hint_tokens: Prefix that may be cached, tokens.
        num_open: Requests that it decodes or will decode.
        num_tokens_max: Longest prompt it takes, tokens.
        layouts_agree: Whether its blocks mean the same where the request will be decoded.
        link_up: Whether its blocks can get there.
    """

    name: str
    ready: bool = True
    wait_ns: int | None = 0
    hit_tokens: int = 0
    hint_tokens: int = 0
    num_open: int = 0
    num_tokens_max: int = 2**31
    layouts_agree: bool = True
    link_up: bool = True


Filter = Callable[[Candidate, int], bool]
Scorer = Callable[[Candidate, int], float]
Scorers = tuple[tuple[Scorer, float], ...]


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
    """Scorer in [0, 1]: share of the prompt that is cached, or may be."""
    if num_tokens <= 0:
        return 0.0
    return min(1.0, max(candidate.hit_tokens, HINT_WEIGHT * candidate.hint_tokens) / num_tokens)


def few_open(candidate: Candidate, _num_tokens: int) -> float:
    """Scorer in [0, 1]: 1 with nothing to decode, 0.5 at `OPEN_HALF` requests."""
    return OPEN_HALF / (OPEN_HALF + candidate.num_open)


DEFAULT_FILTERS: tuple[tuple[Filter, Reason], ...] = (
    (is_ready, Reason.NO_PREFILL_INSTANCE),
    (fits, Reason.NO_PREFILL_INSTANCE),
    (same_layout, Reason.LAYOUT_MISMATCH),
    (reachable, Reason.LINK_DOWN),
)
DEFAULT_SCORERS: Scorers = ((short_wait, 1.0), (cached_prefix, 0.5))


MIXED_SCORERS: Scorers = (*DEFAULT_SCORERS, (few_open, 0.25))
"""For instances that prefill and decode."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen candidate, or what was in the way of the one that got furthest.

    `looked_at` are the first `SHOWN_MAX` that were looked at, chosen or not.
    """

    candidate: Candidate | None
    obstacle: Reason | None = None
    looked_at: Sequence[Candidate] = ()


def pick(
    candidates: Iterable[Candidate],
    num_tokens: int,
    *,
    hit_tokens_max: int,
    filters: Sequence[tuple[Filter, Reason]] = DEFAULT_FILTERS,
    scorers: Scorers = DEFAULT_SCORERS,
) -> Pick:
    """The candidate that passes every filter and has the highest weighted score.

    Looks no further than needed: it stops once nobody who waits longer could score higher.

    Args:
        candidates: The instances, those that wait less first, which also decides among equals.
            An unknown wait may stand anywhere.
        num_tokens: Length of the prompt, tokens.
        hit_tokens_max: No candidate has a longer cached prefix, certain or not, tokens.
        filters: All have to agree; each with what it means when nobody passes it.
        scorers: Each with its weight, above 0. No score falls when a wait is shorter or a hit
            longer.

    Returns:
        The best of the first `LOOKS_MAX` that pass; without any, the reason of the filter that
        the one that got furthest failed.
    """

    best, best_score, furthest, num_looks = None, -1.0, 0, 0
    looked_at: list[Candidate] = []
    ideal = Candidate("", hit_tokens=hit_tokens_max)
    ideal_score = _score(ideal, num_tokens, scorers)
    for candidate in candidates:
        if len(looked_at) < SHOWN_MAX:
            looked_at.append(candidate)
        failed = _first_failed(candidate, num_tokens, filters)
        if failed is not None:
            furthest = max(furthest, failed)
            continue
        if (found := _score(candidate, num_tokens, scorers)) > best_score:
            best, best_score = candidate, found
        num_looks += 1
        if num_looks == LOOKS_MAX or _is_ideal(candidate, hit_tokens_max):
            break
        # Nobody behind this one is better than an ideal one with the same wait.
        wait_ns = candidate.wait_ns or 0
        if wait_ns != ideal.wait_ns:
            ideal = ideal._replace(wait_ns=wait_ns)
            ideal_score = _score(ideal, num_tokens, scorers)
        if best_score >= ideal_score:
            break
    if best is not None:
        return Pick(best, looked_at=looked_at)
    return Pick(None, filters[furthest][1], looked_at)


def _is_ideal(candidate: Candidate, hit_tokens_max: int) -> bool:
    """Whether nothing but a shorter wait could be better."""
    return (
        candidate.hit_tokens >= hit_tokens_max
        and candidate.num_open == 0
        and candidate.wait_ns is not None
    )


def _score(candidate: Candidate, num_tokens: int, scorers: Scorers) -> float:
    total = 0.0
    for rate, weight in scorers:
        total += weight * rate(candidate, num_tokens)
    return total


def _first_failed(
    candidate: Candidate, num_tokens: int, filters: Sequence[tuple[Filter, Reason]]
) -> int | None:
    for index, (keep, _) in enumerate(filters):
        if not keep(candidate, num_tokens):
            return index
    return None


def scores(
    candidate: Candidate, num_tokens: int, scorers: Scorers
) -> tuple[Reason | None, dict[str, float]]:
    """What dropped a candidate, if a filter did, and its weighted scores by name."""
    failed = _first_failed(candidate, num_tokens, DEFAULT_FILTERS)
    obstacle = None if failed is None else DEFAULT_FILTERS[failed][1]
    found = {rate.__name__: weight * rate(candidate, num_tokens) for rate, weight in scorers}
    return obstacle, found
