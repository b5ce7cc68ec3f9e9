"""Which instance gets a request: filters drop candidates, scorers rate them, a picker decides.

Scores are absolute: the score of a candidate does not depend on who else is there, so adding a
worse candidate changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prfaas.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of an instance.

    Attributes:
        name: Unique; decides among equals.
        ready: Whether it is healthy.
        wait_ns: Predicted wait; None when unknown.
        hit_tokens: Usable cached prefix of this request, tokens.
        num_tokens_max: Longest prompt it takes, tokens.
    """

    name: str
    ready: bool = True
    wait_ns: int | None = 0
    hit_tokens: int = 0
    num_tokens_max: int = 2**31


Filter = Callable[[Candidate, int], bool]
Scorer = Callable[[Candidate, int], float]


def is_ready(candidate: Candidate, _num_tokens: int) -> bool:
    """Filter: healthy instances."""
    return candidate.ready


def fits(candidate: Candidate, num_tokens: int) -> bool:
    """Filter: instances whose context is long enough."""
    return num_tokens < candidate.num_tokens_max


def short_wait(candidate: Candidate, _num_tokens: int) -> float:
    """Scorer in [0, 1]: 1 at no wait, 0.5 at one second; an unknown wait counts as the worst."""
    return 0.0 if candidate.wait_ns is None else NS_PER_S / (NS_PER_S + candidate.wait_ns)


def cached_prefix(candidate: Candidate, num_tokens: int) -> float:
    """Scorer in [0, 1]: share of the prompt that is cached."""
    return min(1.0, candidate.hit_tokens / num_tokens) if num_tokens > 0 else 0.0


DEFAULT_FILTERS: tuple[Filter, ...] = (is_ready, fits)
DEFAULT_SCORERS: tuple[tuple[Scorer, float], ...] = ((short_wait, 1.0),)


def pick(
    candidates: Iterable[Candidate],
    num_tokens: int,
    filters: Sequence[Filter] = DEFAULT_FILTERS,
    scorers: Sequence[tuple[Scorer, float]] = DEFAULT_SCORERS,
) -> Candidate | None:
    """The candidate that passes every filter and has the highest weighted score.

    Args:
        candidates: The instances.
        num_tokens: Length of the prompt, tokens.
        filters: All have to agree.
        scorers: Each with its weight.

    Returns:
        The best, the first by name among equals; None when nobody passes.
    """
    passed = [c for c in candidates if all(keep(c, num_tokens) for keep in filters)]
    if not passed:
        return None
    return min(
        passed, key=lambda c: (-sum(w * score(c, num_tokens) for score, w in scorers), c.name)
    )
