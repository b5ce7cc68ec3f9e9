"""Relay decode: the engine that prefilled makes further tokens while its blocks are in transit.

The leg that gives the first token is asked for more, whose number a forecast bounds. It ends when
the blocks are there: the engine that decodes computes the tokens so far in one chunk, and goes on.
A leg that has made all of its tokens by then ends, and decode waits for its blocks.

Another request from an engine that has the prompt cached would cost a round trip and the bytes of
the prompt, between the first token and the second.
"""

from __future__ import annotations

from prfaas.units import NS_PER_MS

STEP_NS = 25 * NS_PER_MS
"""Time of a decode step where nobody knows it."""
STEPS_MIN = 4
"""Decode steps within which blocks come soon: changing engines takes as long."""
MARGIN = 4
"""Tokens to ask for, by those that are expected: a leg that is stopped costs no more, and one that
ends too soon makes its client wait."""


def relay_tokens(left_ns: int, step_ns: int, tokens_max: int) -> int:
    """Return how many tokens to ask for after the first one; 0 if that does not pay.

    Args:
        left_ns: Expected time until the blocks are there.
        step_ns: Time of a decode step.
        tokens_max: Most that the answer may have.
    """
    if left_ns < STEPS_MIN * step_ns:
        return 0
    return min(tokens_max, MARGIN * left_ns // step_ns)
