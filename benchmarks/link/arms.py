"""Links that differ in one setting, compared in turn in the WAN lab."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prfaas.wire.identity import make_authority, make_identity
from tests.lab.wan import Wan

from .calls import Calls, counted
from .end import MIB
from .ours import WARM_UPS, link
from .rows import Row, goals

NONE = goals(0, 0)
Run = TypeVar("Run")


@dataclass(frozen=True)
class Transfers:
    """Transfers over one link, and the counters of both ends before and after them.

    Attributes:
        num_bytes: Bytes of blocks of all.
        rates: Bits of blocks a second, of each.
        first_ms: Until the sender hears of the first block, of each.
        before: Of the sender.
        after: Of the sender.
        receiver_cpu_s: CPU seconds of the receiver.
        calls: Of the sender and of the receiver to the kernel; empty without perf.
    """

    num_bytes: int
    rates: list[float]
    first_ms: list[float]
    before: dict[str, Any]
    after: dict[str, Any]
    receiver_cpu_s: float
    calls: list[Calls]

    @property
    def sender_cpu_s(self) -> float:
        """CPU seconds of the sender."""
        return float(self.after["cpu_s"] - self.before["cpu_s"])


async def transfers(row: Row, identities: Path, budget: int, repeats: int) -> Transfers:
    """Send the bytes of a row over a link of its own, so many times.

    Args:
        row: The link.
        identities: Directory of the identities.
        budget: Of the link, bits a second; 0 for none.
        repeats: Number of transfers.
    """
    async with (
        Wan(**row.shape) as wan,
        link(wan, identities, budget, "a" if row.rate else "b") as (sender, receiver),
    ):
        for _ in range(WARM_UPS):
            await sender.ask(transfer=64 * MIB if row.rate else row.num_bytes)
        before, there = await sender.ask(telemetry=1), await receiver.ask()
        ends = [end.process.pid for end in (sender, receiver)]
        async with counted(ends, identities) as calls:
            runs = [await sender.ask(transfer=row.num_bytes) for _ in range(repeats)]
        after, here = await sender.ask(telemetry=1), await receiver.ask()
        assert {run["state"] for run in runs} == {"committed"}, runs
    return Transfers(
        repeats * row.num_bytes,
        [row.num_bytes * 8 / run["s"] for run in runs],
        [run["first_s"] * 1e3 for run in runs],
        before,
        after,
        here["cpu_s"] - there["cpu_s"],
        calls.of,
    )


async def compare(
    about: str | None,
    rows: Sequence[Row],
    arms: str,
    head: str,
    run: Callable[[Row, Path, str, int], Awaitable[Run]],
    show: Callable[[Row, dict[str, list[Run]]], None],
) -> None:
    """Run every setting on every link in turn, by the options of the command line.

    Args:
        about: Help of the command.
        rows: All links.
        arms: Settings that are compared by default, separated by commas.
        head: Head of the table.
        run: Measures a link with a setting.
        show: Prints the rows of a link.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rows", default="", help="numbers of rows, from 1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default=arms)
    given = parser.parse_args()
    chosen = [rows[int(number) - 1] for number in given.rows.split(",") if number] or rows
    with tempfile.TemporaryDirectory() as directory:
        identities = Path(directory)
        make_authority(identities)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(identities, name)
        print(head)
        print("|---" * (head.count("|") - 1) + "|")
        for row in chosen:
            found: dict[str, list[Run]] = {arm: [] for arm in given.arms.split(",")}
            for _ in range(given.rounds):
                for arm, runs in found.items():
                    print(time.strftime("%H:%M:%S"), row.name, arm, file=sys.stderr, flush=True)
                    runs.append(await run(row, identities, arm, given.repeats))
            show(row, found)
