"""Lengths of the drill's requests, the same for its clients and for the simulator."""

import random
from collections.abc import Iterator
from typing import NamedTuple

LONG_RATIO = 0.1
SHORT_TOKENS, LONG_TOKENS = (64, 800), (3000, 7000)
NUM_PREFIXES, PREFIX_TOKENS = 6, 2048
OUTPUT_TOKENS = (16, 48)


class Lengths(NamedTuple):
    """One request.

    Attributes:
        num_prompt_tokens: Of the prompt, without its prefix.
        prefix: Number of the shared prefix that it begins with; None without one.
        num_output_tokens: Of the answer.
    """

    num_prompt_tokens: int
    prefix: int | None
    num_output_tokens: int


def lengths(seed: int) -> Iterator[Lengths]:
    """Requests in order of arrival, without end: one in ten is long."""
    chance = random.Random(f"load {seed}")
    while True:
        is_long = chance.random() < LONG_RATIO
        prompt = chance.randint(*(LONG_TOKENS if is_long else SHORT_TOKENS))
        number = chance.randrange(2 * NUM_PREFIXES)
        prefix = number if is_long and number < NUM_PREFIXES else None
        yield Lengths(prompt, prefix, chance.randint(*OUTPUT_TOKENS))
