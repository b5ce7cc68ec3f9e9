"""Deployment settings of a plan: what `prfaas up` takes."""

from __future__ import annotations

from math import ceil

from prfaas.planner.answer.plan import Plan, no_offload
from prfaas.planner.problem import Problem
from prfaas.planner.sizing import fleet as fleet_sizes
from prfaas.planner.sizing.fleet import FleetCandidate

AS_GIVEN = "as in the plan file"


def recommended(plan: Plan) -> FleetCandidate:
    """Return the fleet that the answer recommends.

    With a demand it is the cheapest fleet that carries it. It is the fleet of the file without a
    demand, and where no fleet carries the demand.
    """
    problem, found, sizing = plan.question.problem, plan.exact.prfaas.operation, plan.sizing
    if sizing is None:
        return FleetCandidate(AS_GIVEN, problem, found, True, plan.exact.prfaas.price_per_h)
    demand = f"{sizing.demand_per_s:,.10g} req/s"
    if sizing.cheapest is None:
        name = f"{AS_GIVEN}, since no fleet carries {demand}"
        return FleetCandidate(name, problem, found, False, plan.exact.prfaas.price_per_h)
    name = f"the cheapest that carries {demand}"
    return fleet_sizes.answered(name, problem, sizing.cheapest)


def is_of_the_file(plan: Plan, fleet: FleetCandidate) -> bool:
    """Return True if a fleet has as many instances as the plan file."""
    return _instances(fleet.problem) == _instances(plan.question.problem)


def deployment_settings(plan: Plan, fleet: FleetCandidate) -> str:
    """A TOML fragment with the threshold, and the roles of all instances as comments.

    The threshold is the one of the exact mode. A fleet that offloads nothing has a threshold that
    no prompt of the workload exceeds.
    """
    problem, found = fleet.problem, fleet.found
    threshold = found.whole_threshold
    if threshold is None:
        threshold = 0 if found.offload_fraction > 0 else ceil(problem.workload.lengths.high)
    lines = [
        f"# {problem.title}",
        f"# {plan.verdict.sentence}",
        "#",
        f"# Fleet: {fleet.name}{_difference(plan, fleet)}.",
        "# cluster                         role      instances",
    ]
    lines += [f"# {c.name:<31} prefill   {c.num_instances:>9}" for c in problem.prfaas]
    lines += [
        f"# {problem.pd.name:<31} prefill   {found.num_prefill:>9}",
        f"# {problem.pd.name:<31} decode    {found.num_decode:>9}",
    ]
    if no_offload(found):
        lines.append("# Nothing is offloaded: no prompt is longer than the threshold.")
    lines += ["", "[routing]", f"offload_threshold = {threshold}", ""]
    return "\n".join(lines)


def _difference(plan: Plan, fleet: FleetCandidate) -> str:
    if is_of_the_file(plan, fleet):
        return "" if fleet.name.startswith(AS_GIVEN) else ", as many instances as in the plan file"
    given = " and ".join(f"{count} in {name}" for name, count in _instances(plan.question.problem))
    return f"; the plan file has {given}"


def _instances(problem: Problem) -> list[tuple[str, int]]:
    prfaas = [(cluster.name, cluster.num_instances) for cluster in problem.prfaas]
    return [*prfaas, (problem.pd.name, problem.pd.num_instances)]
