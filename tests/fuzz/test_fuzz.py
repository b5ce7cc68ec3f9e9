"""A small fuzz in every run of the tests; `python -m tests.fuzz` is the large one."""

import random
import tracemalloc
from pathlib import Path

from .port import attack
from .streams import feed, mutated


def test_the_codec_takes_nothing_but_frames_and_keeps_nothing() -> None:
    chance = random.Random(1)
    feed(mutated(chance), chance)
    tracemalloc.start()
    try:
        for _ in range(2000):
            feed(mutated(chance), chance)
        for _ in range(50):
            assert not feed(chance.randbytes(20_000), chance)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


async def test_a_node_takes_nothing_but_frames_and_serves_on(tmp_path: Path) -> None:
    figures = await attack(tmp_path, num_random_bytes=400_000, num_mutated=100, seed=1)
    assert figures.num_refused > 20
