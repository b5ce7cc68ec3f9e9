"""Runs of a scenario over several seeds, in parallel processes, and intervals over them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from scipy.stats import t as student_t

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario

CONFIDENCE = 0.95
Task = TypeVar("Task")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One run: a scenario file with settings, a policy and a seed."""

    file: Path
    settings: tuple[str, ...]
    policy: str
    seed: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over seeds, and the half-width of its 95 % confidence interval by Student's t.

    The half-width is None with a single seed.
    """

    mean: float
    half_width: float | None


def interval(values: Sequence[float]) -> Interval:
    """Return the interval of some values, of which there is at least one."""
    found, count = np.asarray(values, dtype=np.float64), len(values)
    if count < 2:
        return Interval(float(found.mean()), None)
    factor = float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1)) / count**0.5
    return Interval(float(found.mean()), factor * float(found.std(ddof=1)))


def run_seeds(runs: Sequence[SeedRun]) -> Iterator[tuple[SeedRun, Results]]:
    """Run all, as many at a time as there are cores, and yield each as it ends.

    Raises:
        ConfigError: The scenario is wrong.
    """
    yield from in_parallel(_results, runs)


def in_parallel(work: Callable[[Task], Made], tasks: Sequence[Task]) -> Iterator[tuple[Task, Made]]:
    """Run all tasks in processes, one per core, and yield each as it ends.

    Args:
        work: A function of a module, with a result that can be pickled.
        tasks: At least one; can be pickled.
    """
    workers = min(len(tasks), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = {pool.submit(work, each): each for each in tasks}
        for done in as_completed(jobs):
            yield jobs[done], done.result()


def _results(each: SeedRun) -> Results:
    scenario = load_scenario(each.file, each.settings)
    return run(scenario.with_policy(PolicyName(each.policy)).with_seed(each.seed)).results
