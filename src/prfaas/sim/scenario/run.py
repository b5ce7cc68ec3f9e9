"""Run a scenario, check it, sum it up; find the knee; jobs and intervals over seeds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp

import numpy as np
from scipy.special import stdtrit

from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.records import without_collections
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.columns import columns_of
from prfaas.sim.results.invariants import check
from prfaas.sim.results.summary import Results, summarise
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.sweeps import SweepJob

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ScenarioRun:
    """A run that has ended and passed all checks."""

    scenario: Scenario
    simulation: Simulation
    results: Results


def run(
    scenario: Scenario,
    on_progress: Progress | None = None,
    stop_at_ns: int | None = None,
) -> ScenarioRun:
    """Simulate.

    Args:
        on_progress: Called with arrived and all requests, now and then.
        stop_at_ns: Stop there with requests unfinished; None runs until all have ended.

    Raises:
        BrokenInvariantError: The simulator contradicts itself.
    """
    with without_collections():
        requests = scenario.requests()
        total = len(requests)
        report = None if on_progress is None else (lambda n: on_progress(n, total))
        simulation = Simulation(scenario.setup, requests, report)
        simulation.run(stop_at_ns)
        columns = columns_of(simulation.requests)
        check(simulation, columns)
        last_ns = max(columns["arrived_at_ns"].tolist(), default=0) + 1
        end_ns = scenario.end_ns or last_ns
        start_ns = min(scenario.start_ns, end_ns - 1)
        results = summarise(simulation, start_ns=start_ns, end_ns=end_ns, columns=columns)
    return ScenarioRun(scenario, simulation, results)


@dataclass(frozen=True, slots=True)
class Knee:
    """The highest load that holds the targets."""

    scale: float
    """Factor on the scenario's arrival rate."""
    results: Results


def find_knee(
    scenario: Scenario, attainment_min: float = 0.9, tolerance: float = 0.02
) -> Knee | None:
    """Highest arrival rate at which a share `attainment_min` of requests meets every target;
    returns none when not even 1/64 of the rate holds.

    Args:
        scenario: Its targets and its rate, which is scaled.
        attainment_min: In (0, 1].
        tolerance: Width at which the bisection stops, as a share of the rate.
    """
    low, high, best = 0.0, 1.0, None
    while high <= 64:
        found = results_of(scenario.with_rate_scaled(high))
        if found.slo_attainment < attainment_min:
            break
        low, best, high = high, Knee(high, found), high * 2
    while high > 1 / 64 and high - low > tolerance * high:
        middle = (low + high) / 2
        found = results_of(scenario.with_rate_scaled(middle))
        if found.slo_attainment >= attainment_min:
            low, best = middle, Knee(middle, found)
        else:
            high = middle
    return best


def results_of(scenario: Scenario) -> Results:
    """Figures of a run; what is left of the one before is freed first."""
    gc.collect()
    return run(scenario).results


CONFIDENCE = 0.95
_RATIO_MIN = 1e-3  # of a percentile: shorter ones of single runs count as this


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
    factor = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) / count**0.5
    return Interval(float(found.mean()), factor * float(found.std(ddof=1)))


def percentile_interval(runs: Sequence[FloatArray], percentile: float) -> Interval:
    """Return a percentile of the values of all runs together, and its 95 % interval.

    The percentiles of single runs are lower on average than that of all, since a few runs have most
    of the longest values: their mean misses it, and so does an interval around their mean. So their
    distances to the common one count, as logarithms, for long runs are longer by a factor; the
    half-width is that of the upper side, which is the wider one.

    Args:
        runs: Values of each run; runs without any are left out.
        percentile: In (0, 100).

    References:
        Asmussen and Glynn, Stochastic Simulation, section III.5: sectioning.
    """
    filled = [run for run in runs if run.size]
    if not filled:
        return Interval(float("nan"), None)
    whole = float(np.percentile(np.concatenate(filled), percentile))
    if len(filled) < 2 or whole <= 0:
        return Interval(whole, None)
    each = np.array([np.percentile(run, percentile) for run in filled])
    distances = np.log(np.maximum(each, whole * _RATIO_MIN) / whole)
    count = len(filled)
    deviation = float(np.sqrt(np.sum(distances**2) / (count - 1)))
    factor = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) / count**0.5
    return Interval(whole, whole * (exp(factor * deviation) - 1))


def results_job(scenario: Scenario) -> SweepJob[Results]:
    """The job that runs a scenario."""
    return SweepJob(_name_of(scenario), partial(results_of, scenario))


def knee_job(scenario: Scenario, attainment_min: float) -> SweepJob[Knee | None]:
    """The job that finds the highest load of a scenario that holds the targets."""
    return SweepJob(_name_of(scenario), partial(find_knee, scenario, attainment_min))


def _name_of(scenario: Scenario) -> str:
    policy = scenario.setup.routing.policy.value
    return f"{scenario.title!r} with policy {policy} and seed {scenario.seed}"
