"""Recent traffic, for which splits are planned."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

NUM_MIN = 50
"""Minimum sample size."""
NUM_MAX = 1000
"""Number of requests that are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class TrafficMix:
    """Requests of some time, at least `NUM_MIN`.

    Attributes:
        new_tokens: Incremental length of each.
        mean_output_tokens: Mean output of those that ended.
    """

    new_tokens: tuple[int, ...]
    mean_prompt_tokens: float
    mean_output_tokens: float


class Mixes:
    """Remembers what came and what ended within some time, and describes it now and then.

    Lengths are known when a request comes: those that end are the short ones where a stage is
    overloaded. Outputs are known at its end alone.
    """

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._came: deque[tuple[int, int, int]] = deque(maxlen=NUM_MAX)
        self._ended: deque[tuple[int, int]] = deque(maxlen=NUM_MAX)
        self._latest: TrafficMix | None = None
        self._made_at_ns: int | None = None

    def came(self, now_ns: int, num_new: int, num_prompt: int) -> None:
        """A request has come, of so many incremental and prompt tokens."""
        self._came.append((now_ns, num_new, num_prompt))

    def ended(self, now_ns: int, num_output: int) -> None:
        """A request was answered with this number of tokens."""
        self._ended.append((now_ns, num_output))

    def look(self, now_ns: int) -> TrafficMix | None:
        """Recent traffic, at most an eighth of the window old; None is unknown."""
        if self._made_at_ns is None or now_ns - self._made_at_ns >= self._window_ns // 8:
            self._latest, self._made_at_ns = self._describe(now_ns), now_ns
        return self._latest

    def _describe(self, now_ns: int) -> TrafficMix | None:
        came, ended = self._came, self._ended
        for seen in (came, ended):
            while seen and seen[0][0] < now_ns - self._window_ns:
                seen.popleft()
        if min(len(came), len(ended)) < NUM_MIN:
            return None
        _, new, prompts = zip(*came, strict=True)
        outputs = sum(output for _, output in ended)
        return TrafficMix(new, sum(prompts) / len(came), outputs / len(ended))
