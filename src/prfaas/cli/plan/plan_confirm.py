"""`prfaas plan --confirm`: the simulator's judgement of a planned size, with its exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas import units as w
from prfaas.cli.plan.sweeping import run_all
from prfaas.planner.answer.plan import Plan
from prfaas.planner.problem import Problem
from prfaas.planner.sizing import fleet as fleet_sizes
from prfaas.planner.sizing.fleet import FleetCandidate
from prfaas.planner.sizing.obstacles import REQUESTS
from prfaas.sim.sizing import (
    SIMULATED_WITH,
    Figures,
    Finding,
    FleetReport,
    Trial,
    in_words,
    report,
    trial_of,
    try_out,
)
from prfaas.sweeps import SweepJob, SweepPlace

_SHORT = {Finding.HOLDS: "holds", Finding.DOES_NOT_HOLD: "no", Finding.NOT_DECIDED: "open"}
NO_DEMAND_RATIO = 0.95
"""Load without a demand, as a share of Λ_max: at all of it queues have no end."""


@dataclass(frozen=True)
class Judged:
    """A fleet and the simulator's report on it."""

    candidate: FleetCandidate
    report: FleetReport


@dataclass(frozen=True)
class Confirmation:
    """The simulator's judgement of a plan."""

    demand_per_s: float
    """Simulated arrival rate, req/s."""
    num_seeds: int
    """Runs of each fleet."""
    fleets: tuple[Judged, ...]
    """The answer first, then the others."""
    sentence: str
    """The result and the next step."""
    next_one: FleetCandidate | None = None
    """A larger fleet that holds, where the answer does not; or None."""
    num_requests: int = REQUESTS

    @property
    def confirmed(self) -> bool:
        """Return True if the answer was simulated and holds."""
        return bool(self.fleets) and self.fleets[0].report.finding is Finding.HOLDS


@dataclass(frozen=True, slots=True)
class _Runs:
    """Number and size of the runs of a fleet, and the place where they are made."""

    num_seeds: int
    num_requests: int
    place: SweepPlace

    def confirmation(
        self,
        demand_per_s: float,
        fleets: tuple[Judged, ...],
        sentence: str,
        next_one: FleetCandidate | None = None,
    ) -> Confirmation:
        """The judgement by these runs."""
        return Confirmation(
            demand_per_s, self.num_seeds, fleets, sentence, next_one, self.num_requests
        )


def confirm(
    plan: Plan,
    num_seeds: int,
    place: SweepPlace | None = None,
    *,
    num_requests: int = REQUESTS,
    no_demand_ratio: float = NO_DEMAND_RATIO,
) -> Confirmation:
    """Simulate a plan's answer and its neighbours; a progress bar goes to standard error.

    Args:
        plan: With a demand, its cheapest fleet is the answer; without, the fleet of its file at
            the rate that it sustains.
        num_seeds: Runs of each fleet, with other arrivals and lengths.
        no_demand_ratio: Simulated share of the rate that a plan without demand sustains.
    """
    runs = _Runs(num_seeds, num_requests, place or SweepPlace())
    problem, demand = plan.question.problem, plan.question.arrival_per_s
    if demand is None:
        return _given_fleet(plan, runs, no_demand_ratio)
    if plan.sizing is None or plan.sizing.cheapest is None:
        nothing = "The planner has no fleet for this demand: there is nothing to simulate."
        return runs.confirmation(demand, (), nothing)
    fleet = plan.sizing.cheapest
    asked = [
        fleet_sizes.answered("cheapest", problem, fleet),
        *fleet_sizes.one_less(problem, fleet, demand),
        fleet_sizes.as_given("as in the file", problem, demand),
    ]
    judged = _judged(asked, demand, runs)
    next_one = None
    if judged[0].report.finding is not Finding.HOLDS:
        next_one = _first_that_holds(problem, demand, runs)
    fleets = judged if next_one is None else [*judged, next_one]
    sentence = _sentence(demand, judged, next_one)
    larger = None if next_one is None else next_one.candidate
    return runs.confirmation(demand, tuple(fleets), sentence, larger)


def _given_fleet(plan: Plan, runs: _Runs, no_demand_ratio: float) -> Confirmation:
    problem, found = plan.question.problem, plan.exact.prfaas.operation
    share = no_demand_ratio if problem.ttft_p90_s is None else 1.0
    rate = found.rate_per_s * share
    if rate <= 0:
        nothing = "The plan sustains nothing: there is nothing to simulate."
        return runs.confirmation(rate, (), nothing)
    price = problem.gpu_price_per_h + plan.exact.prfaas.link_price_per_h * share
    candidate = FleetCandidate("as in the file", problem, found, True, price)
    judged = _judged([candidate], rate, runs)
    return runs.confirmation(rate, tuple(judged), _sentence(rate, judged, None))


def _first_that_holds(problem: Problem, demand: float, runs: _Runs) -> Judged | None:
    for candidate in fleet_sizes.larger(problem, demand):
        judged = _judged([candidate], demand, runs)[0]
        if judged.report.finding is Finding.HOLDS:
            return judged
    return None


def _judged(candidates: Sequence[FleetCandidate], rate: float, runs: _Runs) -> list[Judged]:
    num_seeds = runs.num_seeds
    trials = [
        trial_of(each.problem, each.found, rate, runs.num_requests, seed)
        for each in candidates
        for seed in range(1, num_seeds + 1)
    ]
    found = run_all([_job(each) for each in trials], runs.place)
    return [
        Judged(each, report(each.problem, found[i * num_seeds : (i + 1) * num_seeds]))
        for i, each in enumerate(candidates)
    ]


def _job(trial: Trial) -> SweepJob[Figures]:
    name = (
        f"{trial.problem.title!r} with {trial.num_prefill} prefill instances of "
        f"{trial.problem.pd.num_instances} in {trial.problem.pd.name}, threshold "
        f"{trial.offload_threshold}, {trial.rate_per_s:g} req/s and seed {trial.seed}"
    )
    return SweepJob(name, partial(try_out, trial))


def _sentence(demand: float, judged: Sequence[Judged], next_one: Judged | None) -> str:
    answer = judged[0]
    fleet = _fleet(answer.candidate)
    if answer.report.finding is Finding.HOLDS:
        sentence = f"The simulator confirms it: {fleet} carries {demand:.4g} req/s"
        return f"{sentence}{_first_tokens(answer)}{_of_neighbours(judged[1:])}."
    says = (
        "does not confirm it"
        if answer.report.finding is Finding.DOES_NOT_HOLD
        else ("does not decide it")
    )
    sentence = f"The simulator {says}: with {fleet} at {demand:.4g} req/s {answer.report.binding}"
    return f"{sentence}; {_next_step(answer, next_one)}."


def _first_tokens(judged: Judged) -> str:
    """Return the time to first token of a fleet that holds, or that it was not judged."""
    if judged.candidate.problem.ttft_p90_s is None:
        return "; the time to first token is not judged, since slo.ttft_p90 is not set"
    return f" with a TTFT P90 of {in_words(judged.report.ttft_p90_s, 1, 's')}"


def _of_neighbours(judged: Iterable[Judged]) -> str:
    parts = []
    for each in judged:
        name, found = each.candidate.name, each.report
        if not each.candidate.carries and found.finding is Finding.DOES_NOT_HOLD:
            parts.append(f"{name} is not enough ({found.binding})")
        elif not each.candidate.carries and found.finding is Finding.HOLDS:
            parts.append(f"{name} is enough too, which the planner denies")
        elif not each.candidate.carries:
            parts.append(f"{name} is not decided ({found.binding})")
    return "".join(f"; {part}" for part in parts)


def _next_step(answer: Judged, next_one: Judged | None) -> str:
    if next_one is not None:
        price = f"{next_one.candidate.price_per_h:,.4g} an hour"
        return f"{_fleet(next_one.candidate)} for {price} holds{_first_tokens(next_one)}"
    if answer.report.finding is Finding.NOT_DECIDED:
        return "more seeds decide it: --seeds 20"
    return "plan with a larger demand (workload.arrival_rate) or a looser target, and confirm again"


def _fleet(candidate: FleetCandidate) -> str:
    problem, found = candidate.problem, candidate.found
    parts = [f"{c.num_instances} in {c.name}" for c in problem.prfaas if c.num_instances]
    parts.append(f"{problem.pd.num_instances} in {problem.pd.name}")
    threshold = "nothing offloaded"
    if found.offload_fraction > 0:
        threshold = f"t = {w.tokens(found.whole_threshold)}"
    split = f"N_p : N_d = {found.num_prefill} : {found.num_decode}"
    return f"{' and '.join(parts)} ({split}, {threshold})"


def print_confirmation(found: Confirmation, console: Console) -> None:
    """Write the table of simulated fleets and the sentence."""
    if found.fleets:
        console.print()
        console.print(_table(found))
    style = "bold green" if found.confirmed else "bold red"
    console.print(found.sentence, style=style, markup=False)


def _table(found: Confirmation) -> Table:
    table = Table(
        title=f"Simulated at {found.demand_per_s:.4g} req/s, {found.num_seeds} seeds of "
        f"{found.num_requests:,} requests",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 2, 0, 0),
        caption=f"Simulated with {SIMULATED_WITH}. holds: carries the demand within the targets; "
        "open: a target lies within the 95 % interval over the seeds; about: the seeds differ too "
        "much for an interval",
        caption_justify="left",
    )
    for column in (
        "fleet",
        "PrfaaS/PD-P/PD-D",
        "an hour",
        "planner",
        "simulated",
        "TTFT P90",
        "TPOT",
    ):
        table.add_column(column, justify="left" if column == "fleet" else "right")
    for each in found.fleets:
        settings, figures = each.candidate.found, each.report
        table.add_row(
            each.candidate.name,
            f"{settings.num_prfaas}/{settings.num_prefill}/{settings.num_decode}",
            f"{each.candidate.price_per_h:,.4g}",
            "holds" if each.candidate.carries else "no",
            _SHORT[figures.finding],
            in_words(figures.ttft_p90_s, 1, "s"),
            in_words(figures.tpot_s, 1e3, "ms"),
        )
    return table


def as_dict(found: Confirmation) -> dict[str, Any]:
    """Values for JSON."""
    return {
        "confirmed": found.confirmed,
        "sentence": found.sentence,
        "demand_per_s": found.demand_per_s,
        "num_seeds": found.num_seeds,
        "num_requests": found.num_requests,
        "simulated_with": SIMULATED_WITH,
        "fleets": [_fleet_as_dict(each) for each in found.fleets],
    }


def _fleet_as_dict(each: Judged) -> dict[str, Any]:
    problem, settings = each.candidate.problem, each.candidate.found
    return {
        "name": each.candidate.name,
        "prfaas": [cluster.num_instances for cluster in problem.prfaas],
        "pd": problem.pd.num_instances,
        "num_prefill": settings.num_prefill,
        "offload_threshold": settings.whole_threshold if settings.offload_fraction > 0 else None,
        "price_per_h": each.candidate.price_per_h,
        "planner_holds": each.candidate.carries,
        **asdict(each.report),
    }
