"""Throughput, TTFT and CPU of a deployment with each protection on and off.

    python -m benchmarks.governance [--quick] [--rounds 5] [--seconds 2]

Real gateways, pool nodes and links with timing engines at two sites, closed loop, prompts of 8,192
tokens. The engines' times are 0.002 of the profile's, so that what is left is the work of the
gateway, the pool nodes and the link. The deployment without any protection runs all the time; each
other one takes turns with it, and a ratio is of two turns that follow each other. Prints the tables
of docs/results/governance.md.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from prfaas.core.kv.blocks import Plane
from prfaas.core.kv.difference import differences

from .arms import ARMS, BASE, Arm
from .site import Burst, Site, running

QUICK = ("link: sealed records", "audit log", "all, links sealed")
WARM_UP_S = 2.0
AUDIT = {"gateway": "prfaas_gateway_audit", "pools": "prfaas_pool_audit"}


COLUMNS = (
    "on",
    "throughput",
    "TTFT p50",
    "TTFT p90",
    "CPU of a request",
    "CPU ms: gateway + pools + engines",
    "requests",
)
AUDIT_COLUMNS = ("CPU of the audit", "of the gateway", "of the pool nodes", "of both", "CPU s")
PROOF_COLUMNS = (
    "at work",
    "link MB",
    "blocks on disk",
    "audit lines of pools",
    "verified",
    "refused tickets",
)


def head(columns: tuple[str, ...]) -> None:
    """Begin a table."""
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def ratios(pairs: list[tuple[float, float]]) -> str:
    """Median and range of ratios."""
    found = [on / off for on, off in pairs if off]
    if not found:
        return "-"
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def row(site: Site, base: list[Burst]) -> str:
    """The row of an arm."""
    pairs = list(zip(site.bursts, base, strict=True))

    def of(name: str, share: float) -> str:
        return ratios([(q(a.ttft_s, share), q(b.ttft_s, share)) for a, b in pairs])

    rate = ratios([(a.rate, b.rate) for a, b in pairs])
    cpu = ratios([(a.cpu_ms(), b.cpu_ms()) for a, b in pairs])
    kinds = " + ".join(
        f"{statistics.median(a.cpu_ms(kind) for a in site.bursts):.0f}"
        for kind in ("gateway", "pools", "engines")
    )
    cells = [site.arm.name, rate, of("p50", 0.5), of("p90", 0.9), cpu, kinds]
    return f"| {' | '.join(cells)} | {sum(len(b.ttft_s) for b in site.bursts):,} |"


def q(values: list[float], share: float) -> float:
    """A percentile; 0 without values."""
    return float(np.quantile(values, share)) if values else 0.0


async def proof(site: Site) -> str:
    """Counters that show that the protection was at work."""
    names = {
        "link MB": ("prfaas_link_wire_bytes_total", "pools", 1e-6),
        "blocks on disk": ("prfaas_pool_blocks_spilled_total", "pools", 1),
        "audit lines": ("prfaas_pool_audit_last_line", "pools", 1),
        "verified": ("prfaas_verifications_total", "gateway", 1),
        "refused tickets": ("prfaas_tickets_refused_total", "pools", 1),
    }
    cells = [f"{await site.counter(n, k) * scale:,.0f}" for n, k, scale in names.values()]
    return f"| {site.arm.name} | {' | '.join(cells)} |"


async def audit_share(site: Site) -> str:
    """CPU of the audit's threads, as a share of their processes' since the start."""
    cpu = site.cpu_s()
    cells, audit = [], 0.0
    for kind, prefix in AUDIT.items():
        used = await site.counter(f"{prefix}_cpu_seconds_total", kind)
        audit += used
        cells.append(f"{used / cpu[kind]:.2%}")
    total = sum(cpu[kind] for kind in AUDIT)
    return f"| {site.arm.name} | {' | '.join(cells)} | {audit / total:.2%} | {total:.0f} |"


def compare_rate() -> str:
    """Bytes per second of one core that a comparison of unequal blocks takes."""
    values = np.random.default_rng(1).standard_normal(1 << 22).astype("<f4")
    other = (values * (1 + 1e-5)).astype("<f4").tobytes()
    ours, theirs = memoryview(values.tobytes()), memoryview(other)
    rates = []
    for _ in range(3):
        began = time.thread_time()
        differences(ours, theirs, (Plane("float32", len(ours)),))
        rates.append(len(ours) / 1e6 / (time.thread_time() - began))
    return f"{statistics.median(rates):,.0f} MB/s"


async def measure(
    arms: list[Arm], rounds: int, seconds: float, limit_s: float, progress: Progress
) -> None:
    """Measure arms one after the other, and begin none after a time."""
    began = time.monotonic()
    rows, proofs, audits, failed = [], [], [], 0
    task = progress.add_task("none", total=1 + len(arms) * (rounds + 2))
    with tempfile.TemporaryDirectory() as place:
        async with running(BASE, Path(place) / "base", 0) as base:
            await base.burst(WARM_UP_S)
            progress.advance(task)
            for number, arm in enumerate(arms):
                if time.monotonic() - began > limit_s:
                    left = ", ".join(each.name for each in arms[number:])
                    print(f"not measured, for want of time: {left}")
                    break
                progress.update(task, description=arm.name)
                against = len(base.bursts)
                async with running(arm, Path(place) / str(number), 1 + number) as site:
                    progress.advance(task)
                    await site.burst(WARM_UP_S)
                    await base.burst(WARM_UP_S / 2)
                    progress.advance(task)
                    for turn in range(rounds):
                        # Neither is always the one that follows the other.
                        for each in (site, base) if turn % 2 else (base, site):
                            each.bursts.append(await each.burst(seconds))
                        progress.advance(task)
                    mine = base.bursts[against:]
                    failed += sum(burst.failed for burst in (*site.bursts, *mine))
                    rows.append(row(site, mine))
                    proofs.append(await proof(site))
                    if "audit" in arm.options:
                        audits.append(await audit_share(site))
            off = base.bursts
            base_row = [
                f"{statistics.median(b.rate for b in off):.1f} requests/s",
                *(
                    f"{1e3 * statistics.median(q(b.ttft_s, s) for b in off):.0f} ms"
                    for s in (0.5, 0.9)
                ),
                f"{statistics.median(b.cpu_ms() for b in off):.0f} ms",
                " + ".join(
                    f"{statistics.median(b.cpu_ms(k) for b in off):.0f}"
                    for k in ("gateway", "pools", "engines")
                ),
            ]
            proofs.insert(0, await proof(base))
    print(f"\n{rounds} turns of {seconds:g} s each, {failed} requests failed; ", end="")
    print(f"load of the machine {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores\n")
    head(COLUMNS)
    print(f"| nothing | {' | '.join(base_row)} | {sum(len(b.ttft_s) for b in off):,} |")
    print("\n".join(rows))
    head(AUDIT_COLUMNS)
    print("\n".join(audits))
    head(PROOF_COLUMNS)
    print("\n".join(proofs))
    print(f"\nComparison of unequal blocks of float32: {compare_rate()} of a core.")


@click.command()
@click.option("--quick", is_flag=True, help="Three arms, two turns of a second.")
@click.option("--rounds", default=5, help="Turns of each arm.")
@click.option("--seconds", default=2.0, help="Length of a turn.")
@click.option("--limit", default=420.0, help="Seconds after which no arm begins.")
@click.option("--only", default="", help="Arms with this in their name.")
def main(*, fast: bool, rounds: int, seconds: float, limit: float, only: str) -> None:
    """Measure, and print the tables."""
    if fast:
        rounds, seconds = 2, 1.0
    arms = [arm for arm in ARMS if only in arm.name and (not fast or arm.name in QUICK)]
    with Progress(console=Console(stderr=True)) as progress:
        asyncio.run(measure(arms, rounds, seconds, limit, progress))


if __name__ == "__main__":
    main()
