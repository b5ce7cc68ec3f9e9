"""Size and speed of the prefix index.

python benchmarks/gateway/index.py [--blocks 10000000] [--sources 25] [--prompt-blocks 2000]

Fills the index with prompts of so many blocks, every block held by one to three sources, takes
snapshots and churn as a gateway does, and prints memory per million blocks, the cost of a change,
the longest time that a batch of changes took, and how long a look at a long prompt takes for all
sources together: one that somebody holds whole, one that everybody holds, one that nobody knows.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.prefix_index import PrefixIndex, Tier
from prfaas.core.kv.source_sets import Hits

SPAN = 16
LAYOUT = Layout(b"L" * 32, SPAN, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, SPAN, 2**16),))
BATCH = 4096
NUM_LOOKS = 1000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def tails(prompt: int, num_blocks: int) -> np.ndarray:
    """Evenly spread, as the ends of real hashes are."""
    return np.random.default_rng(prompt).integers(1, 2**64 - 1, num_blocks, dtype=np.uint64)


def hashes(prompt: int, num_blocks: int) -> list[bytes]:
    return [bytes(24) + int(tail).to_bytes(8, "big") for tail in tails(prompt, num_blocks)]


def shown(name: str, durations: list[float]) -> None:
    ordered = sorted(durations)
    at = [ordered[min(int(q * len(ordered)), len(ordered) - 1)] * 1e6 for q in (0.5, 0.99, 1.0)]
    print(f"{name:34} p50 {at[0]:7.0f} us   p99 {at[1]:7.0f} us   max {at[2]:7.0f} us")


def timed(action: Callable[[], object]) -> float:
    """CPU seconds: another process on the core is nobody's delay here."""
    started = time.thread_time()
    action()
    return time.thread_time() - started


def fill(index: PrefixIndex, num_prompts: int, num_sources: int, prompt_blocks: int) -> list[float]:
    """Every prompt at one to three sources."""
    draw, pauses = random.Random(1), []
    for prompt in range(num_prompts):
        ends = tails(prompt, prompt_blocks)
        for source in draw.sample(range(num_sources), draw.randint(1, 3)):
            pauses.append(change(index, source, ends, added=True))
    return pauses


def change(index: PrefixIndex, source: int, ends: np.ndarray, *, added: bool) -> float:
    def act() -> None:
        index.change(str(source), LAYOUT.layout_id, ends, [(len(ends), added, 0)], Tier.HOST)
        index.num_blocks(str(source))  # Has it written.

    return timed(act)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--sources", type=int, default=25)
    parser.add_argument("--prompt-blocks", type=int, default=2000)
    options = parser.parse_args()
    num_prompts = options.blocks // options.prompt_blocks
    index, before = PrefixIndex(), resident_bytes()
    for source in range(options.sources):
        index.end_snapshot(str(source))
    pauses = fill(index, num_prompts, options.sources, options.prompt_blocks)
    num_held = sum(index.num_blocks(str(source)) for source in range(options.sources))
    gc.collect()
    millions = index.num_blocks_known / 1e6
    used = (resident_bytes() - before) / 1e6
    print(f"{millions:.1f} million blocks, held {num_held / 1e6:.1f} million times")
    print(f"memory per million blocks          {used / millions:.1f} MB")
    print(f"cost of a change                   {sum(pauses) / num_held * 1e6:.2f} us a block")
    shown("2,000 changes", pauses)
    draw = random.Random(2)
    churn = []
    for step in range(500):
        gone, come = draw.randrange(num_prompts), num_prompts + step
        churn.append(change(index, 0, tails(gone, options.prompt_blocks), added=False))
        churn.append(change(index, 0, tails(come, options.prompt_blocks), added=True))
    shown("2,000 changes, evicted and stored", churn)
    shared = hashes(-1 & 0xFFFF_FFFF, options.prompt_blocks)
    ends = tails(-1 & 0xFFFF_FFFF, options.prompt_blocks)
    for source in range(options.sources):
        change(index, source, ends, added=True)
    length = options.prompt_blocks * SPAN + 1
    prompts = [hashes(draw.randrange(num_prompts), options.prompt_blocks) for _ in range(200)]

    def look(names: list[bytes]) -> Hits:
        return index.hits(LAYOUT, names, length)[0]

    assert len(look(shared)) == options.sources
    assert max(look(shared).values()) == length - 1
    rounds = range(NUM_LOOKS)
    shown("look, held by some", [timed(partial(look, prompts[n % 200])) for n in rounds])
    shown("look, held by all", [timed(lambda: look(shared)) for _ in rounds])
    unknown = hashes(num_prompts + 10_000, options.prompt_blocks)
    shown("look, unknown", [timed(lambda: look(unknown)) for _ in rounds])
    lost = timed(lambda: index.begin_snapshot("0"))
    print(f"to forget a source                 {lost * 1e6:.0f} us")


if __name__ == "__main__":
    main()
