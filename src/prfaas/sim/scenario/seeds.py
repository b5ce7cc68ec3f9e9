"""Jobs of a sweep over scenarios, policies and seeds, and intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import exp

import numpy as np
from scipy.stats import t as student_t

from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.run import Knee, find_knee, results_of
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.sweeps import SweepJob

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
    factor = float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1)) / count**0.5
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
    factor = float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1)) / count**0.5
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
