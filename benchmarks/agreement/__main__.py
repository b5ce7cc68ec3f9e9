"""Planner and simulator on 30 random plans, at 0.95, 1.05 and 1.3 of capacity.

    python -m benchmarks.agreement --plans 0-9 --rows rows.jsonl     some of them; adds to the file
    python -m benchmarks.agreement --rows rows.jsonl --table         the table of all, as Markdown

A cell is 16,000 requests; some seconds each.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.agreement.measured import LOADS, Cell, Task, measure
from benchmarks.agreement.table import table
from prfaas.sim.sizing import SIMULATED_WITH
from prfaas.sweeps import SweepJob, run_jobs


def main() -> None:
    """Measure the cells that were asked for, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", help="first and last number, as in 0-9")
    parser.add_argument("--rows", type=Path, required=True, help="file of measured cells")
    parser.add_argument("--seeds", default="1", help="seeds of the runs, as in 1,2,3")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.plans:
        first, last = (int(part) for part in args.plans.split("-"))
        seeds = [int(part) for part in args.seeds.split(",")]
        _add(args.rows, range(first, last + 1), seeds)
    if args.table:
        cells = [Cell(**json.loads(line)) for line in args.rows.read_text().splitlines()]
        print(f"Simulated with {SIMULATED_WITH}.\n")
        print(table(cells))


def _add(rows: Path, numbers: range, seeds: list[int]) -> None:
    tasks = [Task(n, load, seed) for n in numbers for load in LOADS for seed in seeds]
    done = run_jobs([SweepJob(str(task), partial(measure, task)) for task in tasks])
    with rows.open("a") as file:
        for _, cell in track(done, total=len(tasks), console=Console(stderr=True)):
            file.write(json.dumps(asdict(cell)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
