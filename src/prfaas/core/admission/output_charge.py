"""Output tokens that nobody has counted: an upper bound on what an abandoned answer took. Pure."""

from __future__ import annotations

from math import ceil

from prfaas.units import NS_PER_S

TOKENS_MIN = 8
"""Minimum tokens of a sequence: shorter answers do not measure an engine's speed."""
GROWTH_MAX = 2
FADING = 0.02
"""Weight of a new answer that is slower than those before."""


class OutputRate:
    """Rate of tokens of one sequence: that of the fastest recent answers.

    One answer at most doubles it: tokens that were held up in transit come all at once.
    """

    def __init__(self) -> None:
        self._per_s: float | None = None

    def observe(self, num_tokens: int, num_sequences: int, duration_ns: int) -> None:
        """Count an answer that has ended.

        Args:
            num_sequences: At least 1.
            duration_ns: From the first token, or from when an engine was asked for it.
        """
        each = num_tokens / num_sequences
        if each < TOKENS_MIN or duration_ns <= 0:
            return
        per_s = each * NS_PER_S / duration_ns
        if self._per_s is None:
            self._per_s = per_s
        elif per_s > self._per_s:
            self._per_s = min(per_s, GROWTH_MAX * self._per_s)
        else:
            self._per_s += FADING * (per_s - self._per_s)

    def most(self, num_sequences: int, duration_ns: int) -> int | None:
        """Tokens that so many sequences have had made in a time, at most.

        Args:
            num_sequences: At least 1.
            duration_ns: Time since an engine was asked for them.

        Returns:
            None while no speed is known.
        """
        if self._per_s is None:
            return None
        return num_sequences * ceil(self._per_s * duration_ns / NS_PER_S)

    def since(self, num_sequences: int, duration_ns: int) -> int:
        """Tokens that were made and not seen in a time; 0 while no speed is known."""
        if self._per_s is None:
            return 0
        return num_sequences * int(self._per_s * duration_ns / NS_PER_S)
