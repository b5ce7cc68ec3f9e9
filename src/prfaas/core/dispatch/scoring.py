"""Selection of an instance: filters drop candidates, scorers rate them, a picker decides.

Scores are absolute: the score of a candidate does not depend on who else is there, so adding a
worse candidate changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from prfaas.core.routing.decision import Reason
from prfaas.records import Record
from prfaas.units import NS_PER_S

LOOKS_MAX = 256
"""Candidates that are scored at most: those behind them wait longer."""
HINT_WEIGHT = 0.5
"""Weight of a hint, relative to a hit."""
SHOWN_MAX = 8
"""Candidates that a pick remembers, for whoever asks why."""
OPEN_MAX = 2**31
"""More requests than any instance decodes."""
OPEN_HALF = 16
"""Open requests at which an instance counts half as attractive as an idle one."""


class Candidate(Record, frozen=True):
    """State of an instance. Every decision creates several."""

    name: str
    ready: bool = True
    """True if it is healthy."""
    wait_ns: int | None = 0
    """Predicted wait; None when unknown."""
    hit_tokens: int = 0
    """Usable cached prefix of this request, tokens."""
    hint_tokens: int = 0
    """Prefix that may be cached, tokens."""
    num_open: int = 0
    """Requests that it decodes or will decode."""
    num_tokens_max: int = 2**31
    """Longest prompt it takes, tokens."""
    layouts_agree: bool = True
    """True if its blocks mean the same where the request will be decoded."""
    unreachable: Reason | None = None
    """Reason why its blocks cannot get there; one of `UNREACHABLE`, or None if they can."""
    device_tokens: int = 0
    """Prefix that it holds in its own memory, tokens; of `hit_tokens`."""
    pulled_from: str = ""
    """Pool of another host that `hit_tokens` is fetched from within `wait_ns`; "" if the instance
    and its own pool hold it."""
    adds_cores: bool = True
    """False if the instance that would prefill locally has all of its cores."""


class Weights(NamedTuple):
    """Weights of scores; no score falls with a shorter wait or a longer hit."""

    short_wait: float = 1.0
    cached_prefix: float = 0.5
    few_open: float = 0.0
    on_device: float = 0.0


ON_DEVICE = 0.05
"""Value of a prompt in device memory, as time of wait: 50 ms for the whole prompt."""
PREFILL_WEIGHTS = Weights(on_device=ON_DEVICE)
MIXED_WEIGHTS = Weights(few_open=0.25, on_device=ON_DEVICE)
"""Weights for instances that prefill and decode."""

UNREACHABLE = (
    Reason.ENGINE_NOT_CONNECTED,
    Reason.POOL_NOT_CONNECTED,
    Reason.POOL_DRAINING,
    Reason.LINK_BARRED,
    Reason.LINK_DOWN,
)
"""Why blocks of an instance cannot get to the pool of the one that decodes."""
OBSTACLES = (
    Reason.NO_PREFILL_INSTANCE,
    Reason.PROMPT_TOO_LONG,
    Reason.LAYOUT_MISMATCH,
    *UNREACHABLE,
    Reason.SHARED_CORES,
)
"""Refusal if no candidate passes a filter, in the order of the filters."""
_INDEX = {reason: index for index, reason in enumerate(OBSTACLES)}
_TOO_LONG = _INDEX[Reason.PROMPT_TOO_LONG]
_MISMATCH = _INDEX[Reason.LAYOUT_MISMATCH]
_SHARED_CORES = _INDEX[Reason.SHARED_CORES]
BY_POOL = frozenset(_INDEX[reason] for reason in (Reason.LAYOUT_MISMATCH, *UNREACHABLE))
"""Indices of the obstacles that all instances of a pool and a layout share."""


class Pick(Record, frozen=True):
    """The chosen candidate, or what was in the way of the one that got furthest.

    `looked_at` are the first `SHOWN_MAX` candidates, selected or not.
    """

    candidate: Candidate | None
    obstacle: Reason | None = None
    looked_at: Sequence[Candidate] = ()


def stopped_at(candidate: Candidate, num_tokens: int) -> int | None:
    """Filters: index of the obstacle that a candidate does not pass; None when it passes all."""
    if not candidate.ready:
        return 0
    if num_tokens >= candidate.num_tokens_max:
        return _TOO_LONG
    if not candidate.layouts_agree:
        return _MISMATCH
    if candidate.unreachable is not None:
        return _INDEX[candidate.unreachable]
    return None if candidate.adds_cores else _SHARED_CORES


def short_wait(wait_ns: int | None) -> float:
    """Scorer in [0, 1]: 1 at no wait, 0.5 at one second; an unknown wait counts as the worst."""
    return 0.0 if wait_ns is None else NS_PER_S / (NS_PER_S + wait_ns)


def cached_prefix(hit_tokens: int, hint_tokens: int, num_tokens: int) -> float:
    """Scorer in [0, 1]: share of the prompt that is cached, or may be."""
    if num_tokens <= 0:
        return 0.0
    return min(1.0, max(hit_tokens, HINT_WEIGHT * hint_tokens) / num_tokens)


def few_open(num_open: int) -> float:
    """Scorer in [0, 1]: 1 with nothing to decode, 0.5 at `OPEN_HALF` requests."""
    return OPEN_HALF / (OPEN_HALF + num_open)


def on_device(device_tokens: int, num_tokens: int) -> float:
    """Scorer in [0, 1]: share of the prompt that lies in the instance's own memory."""
    return min(1.0, device_tokens / num_tokens) if num_tokens > 0 else 0.0


def scores(
    candidate: Candidate, num_tokens: int, weights: Weights
) -> tuple[Reason | None, dict[str, float]]:
    """The filter that dropped a candidate, if any, and its weighted scores by name."""
    stopped = stopped_at(candidate, num_tokens)
    rated = Weights(
        short_wait(candidate.wait_ns),
        cached_prefix(candidate.hit_tokens, candidate.hint_tokens, num_tokens),
        few_open(candidate.num_open),
        on_device(candidate.device_tokens, num_tokens),
    )
    found = {n: w * s for n, w, s in zip(Weights._fields, weights, rated, strict=True) if w}
    return None if stopped is None else OBSTACLES[stopped], found


def score(candidate: Candidate, num_tokens: int, weights: Weights) -> float:
    """Weighted sum of all scores."""
    return (
        weights.short_wait * short_wait(candidate.wait_ns)
        + weights.cached_prefix
        * cached_prefix(candidate.hit_tokens, candidate.hint_tokens, num_tokens)
        + weights.few_open * few_open(candidate.num_open)
        + weights.on_device * on_device(candidate.device_tokens, num_tokens)
    )


def is_ideal(
    candidate: Candidate, num_tokens: int, hit_tokens_max: int, device_tokens_max: int
) -> bool:
    """Return True if a candidate passes every filter and only a shorter wait could be better."""
    return (
        stopped_at(candidate, num_tokens) is None
        and candidate.hit_tokens >= hit_tokens_max
        and candidate.device_tokens >= device_tokens_max
        and candidate.num_open == 0
        and candidate.wait_ns is not None
        and not candidate.pulled_from
    )


def pick(
    candidates: Iterable[Candidate],
    num_tokens: int,
    *,
    hit_tokens_max: int,
    weights: Weights = PREFILL_WEIGHTS,
    device_tokens_max: int = 0,
) -> Pick:
    """The candidate that passes every filter and has the highest score.

    Looks no further than needed: it stops once nobody who waits longer could score higher.

    Args:
        candidates: The instances, those that wait less first, which also decides among equals.
            An unknown wait may stand anywhere.
        num_tokens: Length of the prompt, tokens.
        hit_tokens_max: No candidate has a longer cached prefix, certain or not, tokens.
        device_tokens_max: No candidate holds a longer prefix in its own memory, tokens.

    Returns:
        The best of the first `LOOKS_MAX` that pass; without any, what stopped the one that got
        furthest.
    """
    best, best_score, furthest, num_looks = None, -1.0, 0, 0
    looked_at: list[Candidate] = []
    ideal: Candidate | None = None
    for candidate in candidates:
        if len(looked_at) < SHOWN_MAX:
            looked_at.append(candidate)
        wait_ns, stopped = candidate.wait_ns, stopped_at(candidate, num_tokens)
        if stopped is not None:
            furthest = max(furthest, stopped)
            continue
        if (found := score(candidate, num_tokens, weights)) > best_score:
            best, best_score = candidate, found
        num_looks += 1
        if num_looks == LOOKS_MAX or is_ideal(
            candidate, num_tokens, hit_tokens_max, device_tokens_max
        ):
            break
        if candidate.pulled_from:
            # Its wait has the pull in it, and those behind it may have the prefix.
            continue
        # Nobody behind this one is better than an ideal one with the same wait.
        if ideal is None or (wait_ns or 0) != ideal.wait_ns:
            ideal = Candidate(
                "",
                wait_ns=wait_ns or 0,
                hit_tokens=hit_tokens_max,
                device_tokens=device_tokens_max,
            )
            ideal_score = score(ideal, num_tokens, weights)
        if best_score >= ideal_score:
            break
    return Pick(best, None if best else OBSTACLES[furthest], looked_at)


class Best:
    """The best of candidates that come in any order.

    Args:
        num_tokens: Length of the prompt, tokens.

    Attributes:
        score: Of the best one; -1 without any.
        place: Its place, which decides among equals.
        num_looks: Candidates that passed every filter.
    """

    def __init__(self, num_tokens: int, weights: Weights) -> None:
        self._num_tokens, self._weights = num_tokens, weights
        self._candidate: Candidate | None = None
        self.score, self.place, self.num_looks = -1.0, (0, ""), 0
        self._furthest, self._looked_at = 0, list[Candidate]()

    def look(self, candidate: Candidate, place: tuple[int, str]) -> int | None:
        """Compare one more; return what `stopped_at` does."""
        if len(self._looked_at) < SHOWN_MAX:
            self._looked_at.append(candidate)
        stopped = stopped_at(candidate, self._num_tokens)
        if stopped is not None:
            self._furthest = max(self._furthest, stopped)
            return stopped
        self.num_looks += 1
        found = score(candidate, self._num_tokens, self._weights)
        if found > self.score or (found == self.score and place < self.place):
            self._candidate, self.score, self.place = candidate, found, place
        return None

    def beats(self, score_max: float, place: tuple[int, str]) -> bool:
        """Return True if nobody at a place or behind it can be better with this score."""
        return score_max < self.score or (score_max == self.score and self.place < place)

    @property
    def shows_link_down(self) -> bool:
        """Return True if the result is a missing link, with as many candidates as it shows, unless
        one passes every filter."""
        is_link_down = OBSTACLES[self._furthest] in UNREACHABLE
        return is_link_down and self._candidate is None and len(self._looked_at) == SHOWN_MAX

    @property
    def picked(self) -> Pick:
        """The result."""
        found = self._candidate
        return Pick(found, None if found else OBSTACLES[self._furthest], self._looked_at)


class Fetched(NamedTuple):
    """Prefix that some instances can fetch."""

    num_tokens: int
    """Its length, at most."""
    soonest_ns: int
    """Time of the transfer, at least."""
    needs_wait: bool
    """Only instances with a known wait fetch it."""


def any_of(fetched: Collection[Fetched]) -> Fetched | None:
    """Upper bound of all these for one unknown instance; None if there are none."""
    if not fetched:
        return None
    longest, soonest_ns, needs_wait = zip(*fetched, strict=True)
    return Fetched(max(longest), min(soonest_ns), all(needs_wait))


class Bound:
    """Highest score of instances of which only wait and open requests are known.

    Args:
        num_tokens: Length of the prompt, tokens.
        hit_tokens: None has a longer cached prefix, tokens.
    """

    def __init__(self, num_tokens: int, weights: Weights, hit_tokens: int) -> None:
        self._num_tokens, self._weights = num_tokens, weights
        self._cached = weights.cached_prefix * cached_prefix(hit_tokens, 0, num_tokens)
        self._device = weights.on_device * on_device(hit_tokens, num_tokens)

    def __call__(self, wait_ns: int | None, num_open: int, fetched: Fetched | None = None) -> float:
        """The bound; terms are added in the order of `score`, so it is never rounded below it.

        `fetched` is the longer prefix that they can fetch; None if they cannot.
        """
        weights, few = self._weights, self._weights.few_open * few_open(num_open)
        most = weights.short_wait * short_wait(wait_ns) + self._cached + few + self._device
        if fetched is None:
            return most
        longest, later_ns, needs_wait = fetched
        if needs_wait:
            if wait_ns is None:
                return most
            later_ns = max(later_ns, wait_ns)
        longer = weights.cached_prefix * cached_prefix(longest, 0, self._num_tokens)
        return max(most, weights.short_wait * short_wait(later_ns) + longer + few + self._device)
