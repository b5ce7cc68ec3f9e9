"""A PrfaaS cluster that two PD sites share: the contract under overload, and what each site learns.

    python -m tests.drill.shared_service [--seconds 30] [--slower 2]

Prints a table. Site a has 0.7 of the engines, site b 0.3.

1. Both sites keep more requests waiting than the engines take; site a four times as many as b.
2. A gateway of a sends past its own rules, straight to the proxy, as fast as it is answered.
3. The same prompts at both sites: hits, and names that the gateways of each site can see.
4. The authority of a is revoked: the time until nothing of it is served, and b meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import aiohttp

from prfaas.engines.timing.api.vocabulary import Vocabulary

from .shared_site import ENGINES, PROMPT_TOKENS, SITES, SharedService, sharing
from .site import MODEL

CROWDS = {"a": 160, "b": 40}
"""Requests that clients of each site keep open."""
RAW = 300
WARM_S = 8.0
WAITING_B = re.compile(r'^prfaas_proxy_waiting\{site="b"\} (.*)$', re.MULTILINE)
WAITING = re.compile(r"^prfaas_proxy_waiting.* [1-9]", re.MULTILINE)


@dataclass
class Result:
    """What was measured.

    Attributes:
        shares: Part of the computed tokens of site a while both have requests waiting.
        waiting: Requests of b that waited meanwhile, on average: with none it wants no more.
        cheated: The same while a gateway of site a sends past its own rules.
        statuses: Answers that this gateway got, by status.
        cross_hits: Cached tokens that a site got of prompts that only the other had sent.
        own_hits: The same for prompts of its own: the check can find hits.
        foreign_names: Block names of one site that a gateway of the other could see.
        num_names: Names that were seen by each site.
        peers: Names of links and transfers that each site's gateways could see.
        revoked_s: Time until the revoked site was refused by proxy and pool node.
        failed_b: Requests of the other site that failed or were not offloaded meanwhile.
        num_b: All of these requests.
    """

    shares: float = 0.0
    waiting: float = 0.0
    cheated: float = 0.0
    statuses: dict[int, int] = field(default_factory=dict)
    cross_hits: int = 0
    own_hits: int = 0
    foreign_names: int = 0
    num_names: dict[str, int] = field(default_factory=dict)
    peers: dict[str, list[str]] = field(default_factory=dict)
    revoked_s: float = 0.0
    failed_b: int = 0
    num_b: int = 0

    def rows(self) -> list[str]:
        """A table."""
        return [
            "| what | measured | contract |",
            "|---|---|---|",
            f"| share of a, 4 times as many requests as b | {self.shares:.3f} | {SITES['a']} |",
            f"| requests of b that wait meanwhile | {self.waiting:.1f} | |",
            f"| share of a, its gateway sends straight to the proxy | {self.cheated:.3f} | "
            f"{SITES['a']} |",
            f"| answers to that gateway by status | {self.statuses} | |",
            f"| hits of a site in prompts of the other, tokens | {self.cross_hits} | 0 |",
            f"| hits of a site in its own prompts, tokens | {self.own_hits} | above 0 |",
            f"| block names of the other site seen | {self.foreign_names} of "
            f"{sum(self.num_names.values())} | 0 |",
            f"| links and transfers seen | {self.peers} | own ones |",
            f"| revoked authority refused after | {self.revoked_s:.1f} s | 60 s |",
            f"| failed requests of b meanwhile | {self.failed_b} of {self.num_b} | 0 |",
        ]


class Load:
    """Clients of one site: each sends its next prompt when it has the answer.

    Args:
        service: The deployment.
        site: The site.
        prompt: Makes prompts.
    """

    def __init__(self, service: SharedService, site: str, prompt: Callable[[], list[int]]) -> None:
        self._service, self._site, self._prompt = service, site, prompt
        self.num_sent = self.num_failed = self.num_local = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, clients: int) -> None:
        """Begin."""
        self._tasks += [asyncio.create_task(self._client(each)) for each in range(clients)]

    async def stop(self) -> None:
        """Leave all open requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _client(self, number: int) -> None:
        while True:
            status, path = await self._service.ask(self._site, number, self._prompt())
            self.num_sent += 1
            self.num_failed += status != 200
            self.num_local += path != "remote"


async def share_of(service: SharedService, seconds: float) -> tuple[float, float]:
    """Part of the tokens that engines compute for site a, from now on, and b's queue meanwhile."""
    await asyncio.sleep(WARM_S)
    before, waiting = await service.tokens(), list[float]()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        await asyncio.sleep(0.5)
        waiting += map(float, WAITING_B.findall(await service.page()))
    after = await service.tokens()
    done = {site: after[site] - before.get(site, 0.0) for site in SITES}
    return done["a"] / sum(done.values()), fmean(waiting)


async def flood(
    service: SharedService, prompt: Callable[[], list[int]], statuses: dict[int, int]
) -> None:
    """Send prompts with the identity of a gateway of site a, past the gateway."""
    async with service.session("a", "gateway-a1") as http:

        async def one(engine: str) -> None:
            while True:
                body = {"model": MODEL, "prompt": prompt(), "max_tokens": 1, "temperature": 0}
                body |= {"stream": False, "cache_salt": "a-salt-of-the-flood"}
                url = f"{service.engine_url(engine)}/v1/completions"
                try:
                    async with http.post(url, json=body) as reply:
                        await reply.read()
                        statuses[reply.status] = statuses.get(reply.status, 0) + 1
                        if reply.status == 429:
                            await asyncio.sleep(0.2)
                except aiohttp.ClientError:
                    statuses[0] = statuses.get(0, 0) + 1

        async with asyncio.TaskGroup() as group:
            for number in range(RAW):
                group.create_task(one(ENGINES[number % len(ENGINES)]))


async def cached(service: SharedService) -> dict[str, float]:
    """Tokens of each site that engines did not have to compute."""
    asked, computed = await service.tokens("asked"), await service.tokens("computed")
    return {site: asked.get(site, 0.0) - computed.get(site, 0.0) for site in SITES}


async def hits_and_names(
    service: SharedService, prompt: Callable[[], list[int]], result: Result
) -> None:
    """Send prompts of one site at the other, and compare what gateways of each can see."""
    observers = {site: await service.observer(site) for site in SITES}
    prompts = [prompt() for _ in range(4)]
    before = await cached(service)
    for text in prompts:
        await service.ask("a", 0, text)
    for number, text in enumerate(prompts):
        await service.ask("b", number, text)
    between = await cached(service)
    result.cross_hits = round(sum(between.values()) - sum(before.values()))
    # A gateway prefills a known prompt locally: only a longer one goes to the engines again.
    for text in prompts:
        await service.ask("a", 0, text + prompt())
    result.own_hits = round(sum((await cached(service)).values()) - sum(between.values()))
    async with asyncio.timeout(20):
        while not all(each.names and each.transfers for each in observers.values()):  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    a, b = observers["a"], observers["b"]
    result.foreign_names = len(a.names & b.names)
    result.num_names = {site: len(each.names) for site, each in observers.items()}
    result.peers = {
        site: sorted(each.peers | each.transfers | each.tags) for site, each in observers.items()
    }
    for each in observers.values():
        if each.ping is not None:
            each.ping.cancel()


async def revoke(service: SharedService, prompt: Callable[[], list[int]], result: Result) -> None:
    """Take the contract of site a away, while b works on."""
    watch, load = await service.observer("a"), Load(service, "b", prompt)
    load.start(2)
    await asyncio.sleep(1.0)
    began = time.monotonic()
    service.contracts("b")
    async with service.session("a", "gateway-a1") as http, asyncio.timeout(60):
        while True:
            try:
                async with http.get(f"{service.engine_url()}/health") as reply:
                    if reply.status == 403 and watch.is_lost:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    result.revoked_s = time.monotonic() - began
    await asyncio.sleep(2.0)
    await load.stop()
    result.num_b, result.failed_b = load.num_sent, load.num_failed + load.num_local
    if watch.ping is not None:
        watch.ping.cancel()


async def drill(local: Path, seconds: float, slower: float) -> Result:
    """Run all steps."""
    result, chance = Result(), random.Random(1)
    async with sharing(local, slower) as service:
        ids = Vocabulary(str(local / "model")).spoken

        def prompt() -> list[int]:
            return chance.choices(ids, k=PROMPT_TOKENS)

        loads = {site: Load(service, site, prompt) for site in SITES}
        for site, load in loads.items():
            load.start(CROWDS[site])
        result.shares, result.waiting = await share_of(service, seconds)
        await loads["a"].stop()
        cheat = asyncio.create_task(flood(service, prompt, result.statuses))
        result.cheated, _ = await share_of(service, seconds)
        cheat.cancel()
        await asyncio.gather(cheat, return_exceptions=True)
        await loads["b"].stop()
        async with asyncio.timeout(60):
            while WAITING.search(await service.page()):  # noqa: ASYNC110 - processes signal nothing
                await asyncio.sleep(0.1)
        await hits_and_names(service, prompt, result)
        await revoke(service, prompt, result)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="Time of each measurement.")
    parser.add_argument("--slower", type=float, default=2.0, help="Factor of the engines' times.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print("\n".join(asyncio.run(drill(Path(scratch), given.seconds, given.slower)).rows()))
