"""Throughput of the link, beside that of its peers and iperf3, in the WAN lab. Needs root.

    python -m benchmarks.link --peers VENV

Runs every row of the table, ours and the peers one after the other in the same emulated link, and
prints the tables of docs/results/link.md in Markdown; standard error says what is being measured.
About a quarter of an hour with the peers, four minutes without. Keep the machine idle meanwhile:
sender, receiver and emulator share its cores. Shares are of the link's rate; payload alone can have
94 %.

To make VENV: apt-get install libibverbs1 libnuma1 librdmacm1 iperf3; python -m venv VENV;
VENV/bin/pip install --no-deps -r benchmarks/link/peers/requirements.txt
"""

import argparse
import asyncio
import platform
import sys
import tempfile
import time
from pathlib import Path

from prfaas.wire.identity import make_authority, make_identity
from tests.lab.wan import Wan

from . import ours, peers
from .peers import PeerRun
from .rows import BUDGET_SHARE, ROWS, Row

REPEATS = 3
MIB = 1 << 20
BLOCK_MS = 2 * MIB * 8 / 1e9 * 1e3
"""A block of 2 MiB at 1 Gbit/s."""


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def line(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def head(*titles: str) -> None:
    line(*titles)
    print(f"|{'---|' * len(titles)}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one run a row, and no iperf3")
    parser.add_argument("--peers", type=Path, metavar="VENV", help="where the peers are installed")
    parser.add_argument("--rows", default="", help="numbers of rows, from 1: these, and no more")
    parser.add_argument("--first-blocks", action="store_true", help="these at 100 ms, and no more")
    arguments = parser.parse_args()
    wanted = [int(number) - 1 for number in arguments.rows.split(",") if number]
    rows = [ROWS[index] for index in wanted] or ROWS
    print(
        f"{platform.machine()}, kernel {platform.release()}, Python {platform.python_version()}\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        identities = Path(directory)
        make_authority(identities)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(identities, name)
        if arguments.first_blocks:
            head("what", "goal", "measured")
            await first_blocks(identities, 100)
            return
        rates = await our_table(rows, identities, fast=arguments.quick)
        if arguments.peers is not None:
            await peers_table(rows, rates, arguments.peers)
        if not wanted:
            await rest(identities)


async def our_table(rows: list[Row], identities: Path, *, fast: bool) -> list[float]:
    """Our part; the better rate of every row, with and without a budget."""
    repeats, rates = 1 if fast else REPEATS, []
    head(
        "link (queue 20 ms)",
        "goal",
        "ours, budget 93 %",
        "ours, no budget",
        "first block ms",
        "own queue loss: budget / none",
        "CPU-s/GB: budget / none",
        "iperf3 bbr 4 / cubic 1",
    )
    for row in rows:
        note(f"ours: {row.name}")
        free = await ours.measure(row, identities, 0, repeats)
        if not row.rate:
            rates.append(free.rate)
            first, spent = f"{free.first_ms:.0f}", f"{free.cpu_s_per_gb:.2f}"
            line(row.name, row.goal_shown, "-", row.shown(free.rate), first, "-", spent, "-")
            continue
        paced = await ours.measure(row, identities, round(row.rate * BUDGET_SHARE), repeats)
        rates.append(max(free.rate, paced.rate))
        line(
            row.name,
            row.goal_shown,
            row.shown(paced.rate),
            row.shown(free.rate),
            f"{paced.first_ms:.0f}",
            f"{paced.queue_loss:.2%} / {free.queue_loss:.2%}",
            f"{paced.cpu_s_per_gb:.2f} / {free.cpu_s_per_gb:.2f}",
            "-" if fast else await limit(row),
        )
    return rates


async def limit(row: Row) -> str:
    async with Wan(**row.shape) as wan:
        best = [await ours.iperf(wan, *kind) for kind in (("bbr", 4), ("cubic", 1))]
    return " / ".join(map(row.shown, best))


async def peers_table(rows: list[Row], rates: list[float], venv: Path) -> None:
    """The best peer under both host defaults, as installed and tuned; ours is the better of its
    two columns."""
    print("\nOurs, the better of its columns, against the best peer; CPU-s/GB in brackets:\n")
    head("link", "host default", "goal", "as installed", "ours is", "best tuned", "ours is")
    for row, rate in zip(rows, rates, strict=True):
        for control, goal in row.peer_goals.items():
            cells = []
            for engines in (peers.INSTALLED, peers.TUNED):
                note(f"peers: {row.name}, {control}, {[engine.name for engine in engines]}")
                run = await peers.best(row, engines, venv, control)
                cells += [shown(run, row), ratio(run, rate)]
            line(row.name, control, f"{goal:g}x" if goal else "-", *cells)


def shown(run: PeerRun, row: Row) -> str:
    spent = "" if run.cpu_s_per_gb is None else f" ({run.cpu_s_per_gb:.1f})"
    return f"{run.name} {'< ' if run.is_bound else ''}{row.shown(run.rate)}{spent}"


def ratio(run: PeerRun, rate: float) -> str:
    return f"{'> ' if run.is_bound else ''}{rate / run.rate:.2f}x"


async def first_blocks(identities: Path, rtt_ms: float) -> None:
    """First blocks and messages on 1 Gbit/s, idle and beside bulk."""
    note("first blocks")
    budget = round(1e9 * BUDGET_SHARE)
    idle, busy, control = await ours.first_block(identities, budget, rtt_ms)
    goal = f"{1.5 * (BLOCK_MS + rtt_ms):.0f} ms"
    line("first 2 MiB block on an idle warm link", goal, f"{idle:.0f} ms")
    line("the same beside another transfer's bulk", goal, f"{busy:.0f} ms")
    line("round trip of a message beside it", f"{1.5 * rtt_ms:.0f} ms", f"{control:.0f} ms")


async def rest(identities: Path) -> None:
    """Figures other than rates of transfers, on 1 Gbit/s with 40 ms."""
    budget = round(1e9 * BUDGET_SHARE)
    print("\n1 Gbit/s, 40 ms:\n")
    head("what", "goal", "measured")
    await first_blocks(identities, 40)
    block_ms = BLOCK_MS
    note("overlap")
    last = await ours.overlap(identities, budget)
    line(
        "last chunk of 4 MiB (one every 50 ms) to the last block",
        f"{2 * block_ms + 80:.0f} ms",
        f"{last:.0f} ms",
    )
    note("changes of the rate")
    state, seen = await ours.rate_change(identities)
    line(
        "goodput shown 1 s after the path has 1 Gbit/s, 100 Mbit/s, 1 Gbit/s",
        "follows",
        f"{' / '.join(f'{rate:.0f}' for rate in seen)} Mbit/s; the transfer {state}",
    )


if __name__ == "__main__":
    asyncio.run(main())
