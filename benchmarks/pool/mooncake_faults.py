"""Errors, wrong answers and delays of clients while a part of a Mooncake Store fails under load."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.pool.mooncake import settings_of
from prfaas.pool.shared.mooncake.mooncake_tier import MooncakeTier
from prfaas.wire.identity import make_authority, make_identity
from tests.engines.timing.deployment import World
from tests.engines.timing.site_of_hosts import settled, site_of
from tests.gateway.conftest import make_checkpoint
from tests.mooncake import store as stores
from tests.pool.sites import until

PROMPTS = [[(start + i) % 300 for i in range(288)] for start in range(24)]
PERIOD_S = 0.1
SEEN_S = 0.01


@dataclass
class Outcome:
    """Requests of clients around one fault.

    Attributes:
        times_s: Of each request: when it began, after the fault, and how long it took.
        num_wrong: Answers that were not those of before.
        num_errors: Requests that failed.
        closed_s: When the tier was closed, after the fault; None if it was not.
    """

    times_s: list[tuple[float, float]] = field(default_factory=list)
    num_wrong: int = 0
    num_errors: int = 0
    closed_s: float | None = None
    num_hits: float = 0
    """Blocks that engines loaded from the store before the fault."""

    def slowest_s(self, begin_s: float, end_s: float) -> float:
        """Longest time of requests that began in a part of the run."""
        return max((took for at, took in self.times_s if begin_s <= at < end_s), default=0.0)

    @property
    def num_requests(self) -> int:
        """Requests."""
        return len(self.times_s) + self.num_errors


async def one(world: World, prompt: list[int], text: str, fault_s: float, out: Outcome) -> None:
    """One request: a single token, so its time is the time to the first one."""
    began_s = time.monotonic()
    try:
        reply = await world.complete(prompt, max_tokens=1)
    except (AssertionError, OSError) as error:
        print(f"error: {error}")
        out.num_errors += 1
        return
    out.num_wrong += reply["choices"][0]["text"] != text
    out.times_s.append((began_s - fault_s, time.monotonic() - began_s))


async def under_load(part: str, number: signal.Signals, seconds: float) -> Outcome:
    """One fault, with load before it and after it."""
    out = Outcome()
    with tempfile.TemporaryDirectory() as text, stores.running_store() as store:
        place = Path(text)
        identities = place / "identities"
        make_authority(identities)
        make_identity(identities, "gateway")
        checkpoint = make_checkpoint(place / "checkpoint")
        layout = {"pool-a": {"e0": "both"}}
        shared = settings_of(store.port, place)
        async with site_of(place, checkpoint, identities, layout, shared=shared) as world:
            site = world.sites["pool-a"]
            tier = site.node.shared
            assert isinstance(tier, MooncakeTier)
            await until(lambda: tier.client.is_ready)
            texts = [(await world.complete(p, max_tokens=1))["choices"][0]["text"] for p in PROMPTS]
            await settled(world)
            await until(lambda: len(tier) == len(site.node.store))
            faults: dict[str, Callable[[], None]] = {
                "provider": lambda: store.providers[0].signal(number),
                "master": lambda: store.master.signal(number),
                "client": lambda: os.kill(tier.client.process_id or 0, number),
            }
            begin_s = time.monotonic()
            fault_s, is_done = begin_s + seconds / 4, False
            tasks: list[asyncio.Task[None]] = []
            while (now_s := time.monotonic()) < begin_s + seconds:
                if now_s >= fault_s and not is_done:
                    fault_s, is_done = now_s, True
                    out.num_hits = site.metric("pool_hits_total", tier="shared")
                    faults[part]()
                if is_done and out.closed_s is None and site.metric("pool_shared_up") == 0:
                    out.closed_s = time.monotonic() - fault_s
                if len(tasks) * PERIOD_S < now_s - begin_s:
                    which = len(tasks) % len(PROMPTS)
                    world.forget()  # Neither the engine nor memory has it, only the store.
                    site.node.store.drop(
                        n for n in site.node.store.in_memory() if n in tier or is_done
                    )
                    tasks.append(
                        asyncio.create_task(one(world, PROMPTS[which], texts[which], fault_s, out))
                    )
                await asyncio.sleep(SEEN_S)
            await asyncio.gather(*tasks)
    return out


async def faults(seconds: float) -> None:
    """Print a table of all faults."""
    print(
        "| fault | requests | blocks from the store before | wrong | errors | closed after, s | "
        "slowest before, ms | slowest in the first 2 s, ms | slowest later, ms |\n"
        f"|{'---|' * 9}"
    )
    for part in ("provider", "master", "client"):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            out = await under_load(part, number, seconds)
            closed = "not" if out.closed_s is None else f"{out.closed_s:.2f}"
            before = out.slowest_s(-seconds, -0.1) * 1e3
            first, later = out.slowest_s(-0.1, 2) * 1e3, out.slowest_s(2, seconds) * 1e3
            print(
                f"| {part} {number.name} | {out.num_requests} | {out.num_hits:.0f} | "
                f"{out.num_wrong} | {out.num_errors} | {closed} | {before:.0f} | {first:.0f} | "
                f"{later:.0f} |",
                flush=True,
            )
