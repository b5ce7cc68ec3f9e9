"""All identities of two rendered sites are replaced under load, as the kubelet replaces Secrets.

python -m tests.deploy.renewing --seconds 120 --rate 5
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import click

from tests.deployments import started

from .local_pods import Cluster, LocalPod
from .rendered_sites import (
    LONG,
    SHORT,
    served,
    tokenizer,
    two_issued_sites,
    until_known,
    until_whole,
)

POLL_S = 0.1
RENEWED_WITHIN_S = 60
LINK_PORT, ADMIN_PORT = 7100, 7180


@dataclass
class Outcome:
    """Counts of a run.

    Attributes:
        paths: Requests by the path that they took.
        errors: What clients received in place of an answer.
        in_use_s: By pod, from the swap until the new identity was in use.
        transfers: Ends of transfers at all pool nodes, by state.
        around: Requests that were under way while the new identities were taken up.
    """

    paths: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    in_use_s: dict[str, float] = field(default_factory=dict)
    transfers: dict[str, int] = field(default_factory=dict)
    around: int = 0


async def renewed_under_load(folder: Path, rate_per_s: float, after_s: float) -> Outcome:
    """Run both sites, replace all identities under load, and go on for some time.

    Args:
        folder: For files of both sites; its name is short.
        rate_per_s: Requests a second.
        after_s: Time under load after the last new identity is in use, seconds.
    """
    checkpoint = folder / "models"
    checkpoint.mkdir()
    clusters = two_issued_sites(folder, await asyncio.to_thread(tokenizer, checkpoint))
    home, away = clusters
    outcome = Outcome()
    async with home.api_server(), away.api_server():
        places = home.places() | away.places()
        parts = [*home.parts(places), *away.parts(places)]
        kinds = {
            kind: [p for p in parts if p.kind == kind] for kind in ("pool", "engine", "gateway")
        }
        async with started([kinds["pool"], kinds["engine"] + kinds["gateway"]]):
            urls = [part.whole_url.removesuffix("/health") for part in kinds["gateway"]]
            await asyncio.gather(*(until_known(url, len(kinds["engine"])) for url in urls))
            await asyncio.gather(*map(until_whole, urls))
            # Pools and engines report for a moment before they all know each other.
            load = asyncio.create_task(_load(urls, rate_per_s, outcome))
            await asyncio.sleep(2)
            await _replace(clusters, outcome)
            await asyncio.sleep(after_s)
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
            await _count_transfers(clusters, outcome)
    return outcome


async def _load(urls: list[str], rate_per_s: float, outcome: Outcome) -> None:
    """Send long and short prompts in turn until cancelled; then wait for the last answers."""
    async with asyncio.TaskGroup() as group:
        with contextlib.suppress(asyncio.CancelledError):
            for number in itertools.count():
                group.create_task(_send(urls[number % len(urls)], number, outcome))
                await asyncio.sleep(1 / rate_per_s)


async def _send(url: str, number: int, outcome: Outcome) -> None:
    try:
        path, end = await served(url, number, LONG if number % 4 < 2 else SHORT)
    except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
        outcome.errors.append(repr(error)[:300])
        return
    if end != "length":
        outcome.errors.append(f"ended by {end}")
    outcome.paths[path] = outcome.paths.get(path, 0) + 1


async def _replace(clusters: tuple[Cluster, Cluster], outcome: Outcome) -> None:
    """Replace all identities and wait until every pod presents its new one."""
    watched = []
    for cluster in clusters:
        for pod in cluster.pods:
            component = pod.labels["app.kubernetes.io/component"]
            if component == "pool":
                watched.append((pod.name, await asyncio.to_thread(_shown_by_pool, pod)))
            elif component == "gateway":
                watched.append((pod.name, _renewed_by_log(cluster, pod)))
    before = sum(outcome.paths.values())
    swapped = time.monotonic()
    for cluster in clusters:
        cluster.renew_identities()

    async def follow(name: str, is_new: Callable[[], bool]) -> None:
        while not await asyncio.to_thread(is_new):  # noqa: ASYNC110 (of other processes)
            await asyncio.sleep(POLL_S)
        outcome.in_use_s[name] = time.monotonic() - swapped

    async with asyncio.timeout(RENEWED_WITHIN_S):
        await asyncio.gather(*(follow(name, is_new) for name, is_new in watched))
    outcome.around = sum(outcome.paths.values()) - before


def _shown_by_pool(pod: LocalPod) -> Callable[[], bool]:
    """A new connection gets another certificate than now."""
    place = ("127.0.0.1", pod.ports[LINK_PORT])
    old = ssl.get_server_certificate(place)
    return lambda: ssl.get_server_certificate(place) != old


def _renewed_by_log(cluster: Cluster, pod: LocalPod) -> Callable[[], bool]:
    """A gateway has no port with its identity: it logs that it loaded the new one."""
    log = cluster.home / "logs" / f"{pod.name}-gateway.log"
    return lambda: "identity_renewed" in log.read_text()


async def _count_transfers(clusters: tuple[Cluster, Cluster], outcome: Outcome) -> None:
    ends = re.compile(r'^prfaas_transfers_total\{.*state="(\w+)"\} (\S+)', re.MULTILINE)
    async with aiohttp.ClientSession() as session:
        for cluster in clusters:
            for pod in cluster.pods:
                if ADMIN_PORT in pod.ports:
                    url = f"http://127.0.0.1:{pod.ports[ADMIN_PORT]}/metrics"
                    async with session.get(url) as reply:
                        for state, count in ends.findall(await reply.text()):
                            found = outcome.transfers.get(state, 0)
                            outcome.transfers[state] = found + int(float(count))


@click.command()
@click.option("--seconds", default=60.0, help="Load after the new identities are in use.")
@click.option("--rate", default=5.0, help="Requests a second.")
def main(seconds: float, rate: float) -> None:
    """Print what clients, transfers and pods saw."""
    with tempfile.TemporaryDirectory(prefix="prfaas") as folder:
        outcome = asyncio.run(renewed_under_load(Path(folder), rate, seconds))
    click.echo(f"requests            {sum(outcome.paths.values())} {outcome.paths}")
    click.echo(f"while they changed  {outcome.around}")
    click.echo(f"errors              {len(outcome.errors)} {outcome.errors[:3]}")
    click.echo(f"transfers           {outcome.transfers}")
    for name, in_use_s in outcome.in_use_s.items():
        click.echo(f"in use after        {in_use_s:.1f} s  {name}")


if __name__ == "__main__":
    main()
