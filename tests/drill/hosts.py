"""Kill each part of a PD cluster of three hosts under load, and look at what clients notice.

python -m tests.drill.hosts [--per-s 20] [--keep DIRECTORY]

Host a prefills, host b does both by two engines, and host c decodes; blocks cross links between all
of them.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from .clients import Clients
from .rounds import Round, calls_from_now, ended, until_whole
from .serving import Times
from .site import DEPLOYMENT, MAX_MODEL_LEN, MODEL, Site, launched, plan_text

HOSTS = {
    "pool-a": {"prefill-a": "prefill"},
    "pool-b": {"prefill-b": "prefill", "decode-b": "decode"},
    "pool-c": {"decode-c": "decode"},
}
LINK = "link from a to b"
PARTS = (
    "prefill-a",
    "pool-a",
    "decode-c",
    "pool-c",
    "prefill-b",
    "decode-b",
    "pool-b",
    LINK,
    "gateway",
)
"""Parts that are killed; the link is cut."""
TIMES = Times(quiet_s=2.0, broken_s=6.0)
CLUSTER = """
[clusters.pd]
role = "pd"
[clusters.pd.timing]
plan = "{local}/plan.toml"
block_tokens = 64
max_model_len = {max_model_len}
"""
POOL = """
[clusters.pd.pools.{pool}]
memory = "128MiB"
"""
ENGINE = """
[clusters.pd.engines.{name}]
pool = "{pool}"
role = "{role}"
host_memory = "32MiB"
"""


@dataclass
class HostRound(Round):
    """Effects of the loss of one part.

    Attributes:
        part: The part.
        crossed: Requests whose blocks went from one host to another.
        pulled: Requests that were prefilled with a prefix of another host.
    """

    part: str = ""
    crossed: int = 0
    pulled: int = 0


def write_files(local: Path) -> Path:
    """The deployment file, and the plan that it names."""
    plan = plan_text(1).replace("instances = 2", "instances = 4")
    (local / "plan.toml").write_text(plan)
    text = DEPLOYMENT.format(local=local, model=MODEL).replace('"paper"', '"local"')
    text = text.replace(f'plan = "{local}/plan.toml"\n', "")
    text += CLUSTER.format(local=local, max_model_len=MAX_MODEL_LEN)
    for pool, engines in HOSTS.items():
        text += POOL.format(pool=pool)
        text += "".join(
            ENGINE.format(name=name, pool=pool, role=role) for name, role in engines.items()
        )
    file = local / "drill.toml"
    file.write_text(text)
    return file


@asynccontextmanager
async def running(local: Path) -> AsyncIterator[Site]:
    """Start everything with two gateways, and stop it."""
    async with launched(write_files(local), ("pool-a", "pool-b")) as site:
        yield site


async def strike(site: Site, clients: Clients, part: str, times: Times) -> HostRound:
    """Lose one part, with load before, during and after it."""
    await asyncio.sleep(times.quiet_s)
    calls = calls_from_now(clients)
    if part == LINK:
        site.cut()
        await asyncio.sleep(times.broken_s)
        site.plug_in()
    else:
        site.kill(part)
        await asyncio.sleep(times.broken_s)
        if times.restarts:
            await site.restart(part)
    if times.restarts:
        await until_whole(site)
    await asyncio.sleep(times.quiet_s)
    found = HostRound(calls(), part=part)
    records = await ended(site, found.calls)
    for call in found.calls:
        record = records.get(call.request_id, {})
        found.judge(call, record)
        ends = record.get("source_pool"), record.get("destination_pool")
        found.crossed += None not in ends and ends[0] != ends[1]
        found.pulled += bool(record.get("pulled_tokens"))
    return found


async def run(
    directory: Path,
    lost: Sequence[str] = PARTS,
    per_s: float = 20.0,
    times: Times = TIMES,
    tell: Callable[[HostRound], None] = lambda _: None,
) -> list[HostRound]:
    """Start everything, and lose one part after the other."""
    rounds = []
    async with running(directory) as site:
        clients = Clients(site.gateways, site.model)
        load = asyncio.create_task(clients.run(per_s))
        try:
            for part in lost:
                rounds.append(await strike(site, clients, part, times))
                tell(rounds[-1])
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    return rounds


HEAD = (
    "| lost | requests | errors | wrong answers | went on elsewhere | crossed hosts "
    "| prefix of another host | longest wait for a first token |\n" + "|---" * 8 + "|"
)


def line(one: HostRound) -> str:
    """Markdown."""
    cells = [one.part, len(one.calls), len(one.problems), one.num_wrong, one.moved, one.crossed]
    return "| " + " | ".join(map(str, [*cells, one.pulled, f"{one.wait_s:.1f} s"])) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-s", type=float, default=20.0)
    parser.add_argument("--keep", type=Path, help="where logs stay; a directory made for it")
    arguments = parser.parse_args()
    print(HEAD, flush=True)

    def tell(one: HostRound) -> None:
        print(line(one), flush=True)
        for problem in one.problems:
            print(f"{one.part}: {problem}", file=sys.stderr)

    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(exist_ok=True)
        rounds = asyncio.run(run(directory, per_s=arguments.per_s, tell=tell))
    print(f"{time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return any(one.problems for one in rounds)


if __name__ == "__main__":
    sys.exit(main())
