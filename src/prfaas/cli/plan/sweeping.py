"""Options and progress of commands that run many simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import track

from prfaas.sweeps import SweepJob, SweepPlace, run_jobs

Made = TypeVar("Made")
Command = TypeVar("Command", bound=Callable[..., object])


def place_options(command: Command) -> Command:
    """Add `--jobs` and `--ray` to a command."""
    jobs = click.option(
        "--jobs",
        "num_workers",
        type=click.IntRange(1, 10_000),
        help="Simulations at a time; one per core if absent.",
    )
    ray = click.option(
        "--ray",
        "ray_address",
        metavar="ADDRESS",
        help="Simulate on this Ray cluster (HOST:PORT of its head, or auto) instead of processes "
        "of this machine.",
    )
    return jobs(ray(command))


def run_all(
    jobs: Sequence[SweepJob[Made]], place: SweepPlace, what: str = "simulating"
) -> list[Made]:
    """Run jobs with a progress bar on standard error; return their results in order.

    Raises:
        ConfigError: A job raised it, or there is no such Ray cluster.
        JobError: A job failed.
    """
    console = Console(stderr=True)
    ended = track(run_jobs(jobs, place), what, len(jobs), console=console, transient=True)
    found = dict(ended)
    return [found[index] for index in range(len(jobs))]
