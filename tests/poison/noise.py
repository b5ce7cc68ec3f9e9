"""Differences of blocks whose numbers were rounded otherwise, for the limits of verification.

    python -m tests.poison.noise --blocks 20000

Numbers spread over six orders of magnitude. Each is changed by a relative error of the given size,
of random sign, before it is rounded to its type. Prints the largest difference of all blocks.
"""

from __future__ import annotations

import argparse

import numpy as np

from prfaas.core.kv.blocks import Plane
from prfaas.core.kv.difference import RUN, differences
from prfaas.core.kv.difference_limits import is_altered

RUNS = 8
ERRORS = {"bfloat16": (2**-9, 2**-8, 2**-7, 2**-6), "float32": (2**-23, 2**-16, 2**-12, 2**-9)}
"""Half a unit in the last place, one, two, four; for float32 also those of a bfloat16 before it."""


def rounded(values: np.ndarray, dtype: str) -> bytes:
    """Bytes of numbers, rounded to nearest."""
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2").tobytes()


def largest(dtype: str, error: float, num_blocks: int, chance: np.random.Generator) -> float:
    """Largest difference of some blocks."""
    worst = 0.0
    for _ in range(num_blocks):
        size = RUN * RUNS
        values = chance.standard_normal(size) * 10.0 ** chance.uniform(-4, 2, size)
        other = values * (1 + error * chance.choice((-1.0, 1.0), size))
        ours, theirs = rounded(values, dtype), rounded(other, dtype)
        planes = (Plane(dtype, len(ours)),)
        worst = max(worst, differences(memoryview(theirs), memoryview(ours), planes)[dtype])
    return worst


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=20_000)
    num_blocks = parser.parse_args().blocks
    chance = np.random.default_rng(1)
    print(
        "| type | relative error of each number | largest difference | alarm |\n|---|---|---|---|"
    )
    for dtype, errors in ERRORS.items():
        for error in errors:
            worst = largest(dtype, error, num_blocks // 8, chance)
            alarm = "yes" if is_altered({dtype: worst}) else "no"
            print(f"| {dtype} | {error:.2g} | {worst:.2g} | {alarm} |")


if __name__ == "__main__":
    main()
