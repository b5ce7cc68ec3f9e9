"""Streams that two cores serve with one process of the gateway, and with two workers.

    python -m benchmarks.gateway.workers [--turns 3] [--count 1000] [--tokens 16]

Engines, pool nodes and the load run on the same machine, so rates are computed from CPU times: a
core gives one process at most one second of CPU a second, and two cores give all of them two.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .__main__ import Bench, Run
from .load import cpu_s
from .prompts import body, make_checkpoint
from .systems import MODEL, System, deployment

SHORT, AT_ONCE, CORES = 100, 32, 2


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of one stream, ms, by process: the decider first."""

    each_ms: list[float]

    @property
    def per_s(self) -> float:
        """Streams that two cores serve in a second."""
        return 1e3 / max(*self.each_ms, 0.0, sum(self.each_ms) / CORES)


async def measure(bench: Bench, system: System, bodies: list[bytes]) -> Cost:
    """CPU times of one run."""
    before = [cpu_s([pid]) for pid in system.pids]
    result = await bench._send(system, list(bodies), AT_ONCE)
    if result["num_errors"]:
        raise RuntimeError(f"{result['num_errors']} of {len(bodies)} failed")
    after = [cpu_s([pid]) for pid in system.pids]
    return Cost([1e3 * (b - a) / len(bodies) for a, b in zip(before, after, strict=True)])


async def run(local: Path, turns: int, count: int, num_tokens: int) -> None:
    """Measure in turns."""
    make_checkpoint(local / "model")
    places = local / "one", local / "two"
    for place in places:
        place.mkdir()
        (place / "model").symlink_to(local / "model")
    bench = Bench(local, 1.0, [])
    prompts = bench._prompts
    warm = bench._bodies(Run(SHORT, 200), 200)[1]
    found: dict[int, list[float]] = {1: [], 2: []}
    async with (
        deployment(places[0], is_pinned=False) as one,
        deployment(places[1], workers=2, is_pinned=False) as two,
    ):
        systems = {1: one.system, 2: two.system}
        for system in systems.values():
            await measure(bench, system, warm)
        for _ in range(turns):
            bodies = [body(MODEL, prompts.conversation(SHORT), num_tokens) for _ in range(count)]
            for workers, system in systems.items():
                cost = await measure(bench, system, bodies)
                found[workers].append(cost.per_s)
                each = " + ".join(f"{ms:.2f}" for ms in cost.each_ms)
                print(
                    f"{workers} workers: {each} ms of CPU a stream, {cost.per_s:.0f}/s", flush=True
                )
    ratios = [two / one for one, two in zip(found[1], found[2], strict=True)]
    print(f"two workers: {statistics.median(ratios):.2f} times the streams/s of one {ratios}")


def main() -> None:
    """Print CPU times and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--count", type=int, default=1000, help="streams in a turn")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as local:
        asyncio.run(run(Path(local), options.turns, options.count, options.tokens))


if __name__ == "__main__":
    main()
