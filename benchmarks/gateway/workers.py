"""Streams that two cores serve with one process of the gateway, and with two workers.

    python -m benchmarks.gateway.workers [--turns 3] [--count 1000] [--tokens 16] [--remote]
                                         [--core 0.2]

Engines, pool nodes and the load run on the same machine, so rates are computed from CPU times: a
core gives one process at most one second of CPU a second, and two cores give all of them two. With
`--core`, rates are those of the clock. The gateway's cores are this share of a real one then, by
quotas of Linux, and the rest is left to the others: each of its processes gets one of these cores
at most, and all of them two. It needs root, and the CPU controller of version 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .__main__ import Bench, Run
from .load import cpu_s
from .prompts import body, make_checkpoint
from .systems import HERE, MODEL, System, deployment

SHORT, AT_ONCE, CORES = 100, 32, 2
CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000


@contextmanager
def small_cores(pids: list[int], share: float) -> Iterator[None]:
    """Give each of these processes a share of a core at most, and all of them two such shares."""
    top = CPU / f"gateway-{os.getpid()}-{pids[0]}"
    groups = {top: CORES * share} | {top / str(pid): share for pid in pids}
    try:
        for group, cores in groups.items():
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US)))
        for pid in pids:
            (top / str(pid) / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in pids:
            (CPU / "cgroup.procs").write_text(str(pid))
        for group in reversed(groups):
            group.rmdir()


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of one stream, ms, by process: the decider first; and streams/s by the clock."""

    each_ms: list[float]
    by_clock: float

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
    each_ms = [1e3 * (b - a) / len(bodies) for a, b in zip(before, after, strict=True)]
    return Cost(each_ms, len(bodies) / result["wall_s"])


async def run(
    local: Path, turns: int, count: int, num_tokens: int, core: float, threshold: int
) -> None:
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
        deployment(places[0], threshold=threshold, is_pinned=False) as one,
        deployment(places[1], workers=2, threshold=threshold, is_pinned=False) as two,
        AsyncExitStack() as limits,
    ):
        systems = {1: one.system, 2: two.system}
        for system in systems.values():
            await measure(bench, system, warm)
            if core:
                limits.enter_context(small_cores(system.pids, core))
        for _ in range(turns):
            bodies = [body(MODEL, prompts.conversation(SHORT), num_tokens) for _ in range(count)]
            for workers, system in systems.items():
                cost = await measure(bench, system, bodies)
                rate = cost.by_clock if core else cost.per_s
                found[workers].append(rate)
                each = " + ".join(f"{ms:.2f}" for ms in cost.each_ms)
                print(f"{workers} workers: {each} ms of CPU a stream, {rate:.0f}/s", flush=True)
    ratios = [two / one for one, two in zip(found[1], found[2], strict=True)]
    print(f"two workers: {statistics.median(ratios):.2f} times the streams/s of one {ratios}")


def main() -> None:
    """Print CPU times and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--count", type=int, default=1000, help="streams in a turn")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--core", type=float, default=0.0, help="share of a core, 0 to 1")
    parser.add_argument("--remote", action="store_true", help="prefill remotely")
    options = parser.parse_args()
    threshold = SHORT // 4 if options.remote else HERE
    with tempfile.TemporaryDirectory() as local:
        asyncio.run(
            run(
                Path(local),
                options.turns,
                options.count,
                options.tokens,
                options.core,
                threshold,
            )
        )


if __name__ == "__main__":
    main()
