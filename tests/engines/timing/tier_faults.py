"""Errors, wrong answers and delays of clients while a shared tier fails under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from prfaas.core.kv.blocks import BlockName
from tests.pool.sites import Site, until

from .deployment import World

PROMPTS = [[(start + i) % 300 for i in range(288)] for start in range(24)]
PERIOD_S = 0.1
SEEN_S = 0.01
HEAD = (
    "| fault | requests | blocks from the tier before | wrong | errors | closed after, s | "
    "slowest before, ms | slowest in the first 2 s, ms | slowest later, ms |\n"
    f"|{'---|' * 9}"
)


@dataclass
class Outcome:
    """Requests of clients around one fault.

    Attributes:
        times_s: Of each request: when it began, after the fault, and how long it took.
        num_wrong: Answers that were not those of before.
        errors: Of the requests that failed.
        closed_s: When the last tier was closed, after the fault; None if one was not.
        num_hits: Blocks that engines loaded from the tier before the fault.
    """

    times_s: list[tuple[float, float]] = field(default_factory=list)
    num_wrong: int = 0
    errors: list[str] = field(default_factory=list)
    closed_s: float | None = None
    num_hits: float = 0

    def slowest_s(self, begin_s: float, end_s: float) -> float:
        """Longest time of requests that began in a part of the run."""
        return max((took for at, took in self.times_s if begin_s <= at < end_s), default=0.0)

    @property
    def num_requests(self) -> int:
        """Requests."""
        return len(self.times_s) + len(self.errors)

    def row(self, name: str, seconds: float) -> str:
        """Of the table that `HEAD` begins."""
        closed = "not" if self.closed_s is None else f"{self.closed_s:.2f}"
        parts = ((-seconds, -PERIOD_S), (-PERIOD_S, 2.0), (2.0, seconds))
        slowest = (f"{self.slowest_s(*part) * 1e3:.0f}" for part in parts)
        cells = (name, self.num_requests, f"{self.num_hits:.0f}", self.num_wrong, len(self.errors))
        return f"| {' | '.join(map(str, [*cells, closed, *slowest]))} |"


async def under_load(world: World, inject: Callable[[], None], seconds: float) -> Outcome:
    """One fault of the tier that all hosts share, with load before it and after it.

    The requests have their whole prefix in the tier and nowhere else: engines and pool nodes are
    emptied before each. They ask for a single token, so their time is the time to the first one.

    Args:
        world: A site; all its engines take part.
        inject: Makes the fault.
        seconds: Of the whole run; the fault comes after a quarter.
    """
    out, sites = Outcome(), list(world.sites.values())
    texts = [(await world.complete(p, max_tokens=1))["choices"][0]["text"] for p in PROMPTS]
    await until(world.is_quiet)
    stored = {name for site in sites for name in site.node.store.in_memory()}
    await until(lambda: all(_has_all(site, stored) for site in sites))
    begin_s = time.monotonic()
    fault_s, is_done = begin_s + seconds / 4, False
    tasks: list[asyncio.Task[None]] = []
    while (now_s := time.monotonic()) < begin_s + seconds:
        if now_s >= fault_s and not is_done:
            fault_s, is_done = now_s, True
            out.num_hits = sum(site.metric("pool_hits_total", tier="shared") for site in sites)
            inject()
        if is_done and out.closed_s is None and not any(map(_is_up, sites)):
            out.closed_s = time.monotonic() - fault_s
        if len(tasks) * PERIOD_S < now_s - begin_s:
            which = len(tasks) % len(PROMPTS)
            world.forget()
            for site in sites:
                _empty(site, everything=is_done)
            tasks.append(asyncio.create_task(_one(world, which, texts[which], fault_s, out)))
        await asyncio.sleep(SEEN_S)
    await asyncio.gather(*tasks)
    return out


async def _one(world: World, which: int, text: str, fault_s: float, out: Outcome) -> None:
    began_s = time.monotonic()
    try:
        reply = await world.complete(PROMPTS[which], max_tokens=1)
    except (AssertionError, OSError) as error:
        out.errors.append(str(error))
        return
    out.num_wrong += reply["choices"][0]["text"] != text
    out.times_s.append((began_s - fault_s, time.monotonic() - began_s))


def _has_all(site: Site, names: Collection[BlockName]) -> bool:
    tier = site.node.store_room.shared
    return tier is not None and all(name in tier for name in names)


def _is_up(site: Site) -> bool:
    return site.metric("pool_shared_up") != 0


def _empty(site: Site, *, everything: bool) -> None:
    """Drop what the tier has from memory, or everything."""
    store, tier = site.node.store, site.node.store_room.shared
    assert tier is not None
    store.drop([name for name in store.in_memory() if everything or name in tier])
