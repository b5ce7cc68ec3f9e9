"""A day of two kinds of requests: those that read much, and those that write much."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S


@dataclass(frozen=True)
class Kind:
    """Requests of one kind; lengths in tokens.

    Attributes:
        prompts: Shortest and longest prompt.
        output: Output length.
        per_s: Mean rate over the day.
        swing: How far the rate goes from its mean, as a share of it; negative swings the other way.
    """

    prompts: tuple[int, int]
    output: int
    per_s: float
    swing: float

    def rate(self, at_s: float, day_s: float) -> float:
        """Arrivals per second at a time of the day."""
        return self.per_s * (1 + self.swing * math.sin(2 * math.pi * at_s / day_s))


READ = Kind((1500, 4500), 20, 10.5, 0.75)
WRITE = Kind((200, 600), 160, 6.6, -0.65)


def requests(day_s: float, seed: int) -> list[Request]:
    """Poisson arrivals of both kinds over one day, which begins evenly and reads first."""
    rng, found = np.random.default_rng(seed), []
    for kind in (READ, WRITE):
        most = kind.per_s * (1 + abs(kind.swing))
        count = rng.poisson(most * day_s)
        for at in rng.uniform(0, day_s, count):
            if rng.uniform() * most < kind.rate(at, day_s):
                prompt = int(rng.integers(*kind.prompts))
                found.append((float(at), prompt, kind.output))
    return [
        Request(index, round(at * NS_PER_S), prompt, output)
        for index, (at, prompt, output) in enumerate(sorted(found))
    ]
