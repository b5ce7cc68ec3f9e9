"""Run a scenario, check it, sum it up; compare policies; find the knee."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.columns import columns_of
from prfaas.sim.results.invariants import check
from prfaas.sim.results.recorded_run import RecordedSimulation
from prfaas.sim.results.summary import Results, summarise
from prfaas.sim.scenario.scenario_loader import Scenario

Progress = Callable[[int, int], None]
_ALLOCATIONS_PER_COLLECTION = 1_000_000


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
    num_recorded: int = 0,
) -> ScenarioRun:
    """Simulate.

    Args:
        on_progress: Called with arrived and all requests, now and then.
        stop_at_ns: Stop there with requests unfinished; None runs until all have ended.
        num_recorded: First requests whose every attempt is recorded, for a Chrome trace.

    Raises:
        BrokenInvariantError: The simulator contradicts itself.
    """
    with _seldom_collecting():
        requests = scenario.requests()
        total = len(requests)
        report = None if on_progress is None else (lambda n: on_progress(n, total))
        simulation = (
            RecordedSimulation(scenario.setup, requests, report, num_recorded)
            if num_recorded
            else Simulation(scenario.setup, requests, report)
        )
        simulation.run(stop_at_ns)
        columns = columns_of(simulation.requests)
        check(simulation, columns)
        last_ns = max(columns["arrived_at_ns"].tolist(), default=0) + 1
        end_ns = scenario.end_ns or last_ns
        start_ns = min(scenario.start_ns, end_ns - 1)
        results = summarise(simulation, start_ns=start_ns, end_ns=end_ns, columns=columns)
    return ScenarioRun(scenario, simulation, results)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Requests stay to the end of a run; to search them for cycles is in vain, then too.

    Objects of the run count as old afterwards: the next full collection covers them.
    """
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.set_threshold(*before)


def compare(
    scenario: Scenario, policies: Sequence[PolicyName], on_progress: Progress | None = None
) -> dict[PolicyName, ScenarioRun]:
    """The same requests under several policies."""
    return {p: run(scenario.with_policy(p), on_progress) for p in policies}


@dataclass(frozen=True, slots=True)
class Knee:
    """The highest load that holds the targets.

    Attributes:
        scale: Factor on the scenario's arrival rate.
    """

    scale: float
    results: Results


def find_knee(
    scenario: Scenario, attainment_min: float = 0.9, tolerance: float = 0.02
) -> Knee | None:
    """Highest arrival rate at which a share `attainment_min` of requests meets every target.

    Args:
        scenario: Its targets and its rate, which is scaled.
        attainment_min: In (0, 1].
        tolerance: Width at which the bisection stops, as a share of the rate.

    Returns:
        None when not even 1/64 of the rate holds.
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
