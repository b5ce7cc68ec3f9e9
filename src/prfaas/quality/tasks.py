"""Texts whose continuation needs the prefix, as token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TaskSample:
    """A prefix, which is cached, and what follows it.

    Attributes:
        rest: Token ids that follow; the first is given, the others are predicted.
        asked: Indices in `rest` that the prefix determines, at least 1 each.
    """

    prefix: Sequence[int]
    rest: Sequence[int]
    asked: Sequence[int]


def recall(vocab: Sequence[int], num_pairs: int, num_asked: int, seed: int) -> TaskSample:
    """Return pairs of a key and a value, then some keys, each with its value to be recalled.

    Args:
        vocab: Token ids to draw from; the first half are keys.
        num_pairs: Pairs in the prefix; keys are different.

    Raises:
        ConfigError: The vocabulary has fewer keys.
    """
    half = len(vocab) // 2
    if not 1 <= num_asked <= num_pairs <= half:
        raise ConfigError(
            f"recall asks for {num_asked} of {num_pairs} pairs, and {len(vocab)} tokens have "
            f"{half} keys; use fewer"
        )
    dice = random.Random(seed)  # noqa: S311 (not secret)
    pairs = [(key, dice.choice(vocab[half:])) for key in dice.sample(vocab[:half], num_pairs)]
    rest = [token for pair in dice.sample(pairs, num_asked) for token in pair]
    return TaskSample([token for pair in pairs for token in pair], rest, range(1, len(rest), 2))


def copying(vocab: Sequence[int], num_tokens: int, seed: int) -> TaskSample:
    """Return random tokens, and the same again: all but the first are determined."""
    dice = random.Random(seed)  # noqa: S311 (not secret)
    tokens = [dice.choice(vocab) for _ in range(num_tokens)]
    return TaskSample(tokens, tokens, range(1, num_tokens))


def later_chunks(tokens: Sequence[int], prefix: int, rest: int, num: int) -> list[TaskSample]:
    """Return chunks of a text, each split into a prefix and what follows.

    Raises:
        ConfigError: The text is shorter than one chunk.
    """
    size = prefix + rest
    starts = range(0, len(tokens) - size + 1, size)[:num]
    if not starts:
        raise ConfigError(f"the text has {len(tokens)} tokens, and a chunk has {size}")
    return [
        TaskSample(tokens[at : at + prefix], tokens[at + prefix : at + size], range(1, rest))
        for at in starts
    ]
