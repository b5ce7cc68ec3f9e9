"""What requests are like lately: the traffic that splits are planned for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

NUM_MIN = 50
"""Fewer requests say too little."""
NUM_MAX = 1000
"""No more than the last so many are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Requests that have ended, at least `NUM_MIN`.

    Attributes:
        new_tokens: Incremental length of each.
        mean_prompt_tokens: Mean whole prompt.
        mean_output_tokens: Mean output.
    """

    new_tokens: tuple[int, ...]
    mean_prompt_tokens: float
    mean_output_tokens: float


class Mixes:
    """Remembers requests that ended within some time, and describes them now and then.

    Args:
        window_ns: Time.
    """

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._ended: deque[tuple[int, int, int, int]] = deque(maxlen=NUM_MAX)
        self._latest: Mix | None = None
        self._made_at_ns: int | None = None

    def ended(self, now_ns: int, num_new: int, num_prompt: int, num_output: int) -> None:
        """A request has ended, of so many incremental, prompt and output tokens."""
        self._ended.append((now_ns, num_new, num_prompt, num_output))

    def look(self, now_ns: int) -> Mix | None:
        """What requests are like, at most an eighth of the window old; None is unknown."""
        if self._made_at_ns is None or now_ns - self._made_at_ns >= self._window_ns // 8:
            self._latest, self._made_at_ns = self._describe(now_ns), now_ns
        return self._latest

    def _describe(self, now_ns: int) -> Mix | None:
        ended = self._ended
        while ended and ended[0][0] < now_ns - self._window_ns:
            ended.popleft()
        if len(ended) < NUM_MIN:
            return None
        _, new, prompts, outputs = zip(*ended, strict=True)
        return Mix(new, sum(prompts) / len(ended), sum(outputs) / len(ended))
