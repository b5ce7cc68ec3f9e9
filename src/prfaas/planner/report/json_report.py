"""The plan as JSON values, with curves for sliders.

Deployment settings of a plan: what `prfaas up` takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.planner.answer.plan import Comparison, Plan, make_plan, no_offload
from prfaas.planner.answer.plan_file import PlanFile
from prfaas.planner.answer.plan_loader import load_question, override
from prfaas.planner.problem import Problem
from prfaas.planner.sizing import fleet as fleet_sizes
from prfaas.planner.sizing.fleet import FleetCandidate
from prfaas.planner.solve.designs import Design
from prfaas.planner.solve.latency import Latency
from prfaas.planner.solve.search import Curve, against_split, against_threshold
from prfaas.toml_tables import read_toml, validated


def as_dict(plan: Plan) -> dict[str, Any]:
    """Nested dicts, lists and numbers; infinity, which JSON lacks, becomes None."""
    verdict, times = plan.verdict, plan.latencies
    found: dict[str, Any] = {
        "title": plan.question.problem.title,
        "verdict": asdict(verdict),
        "exact": _comparison(plan.exact),
        "paper": _comparison(plan.paper),
        "latency": {
            "service": _latencies(times.service),
            "overlapped": _latencies(times.overlapped),
            "early": _latencies(times.early),
            "queued": {name: _queued(found) for name, found in times.queued.items()},
            "queued_arrival_per_s": times.arrival_per_s,
            "overloaded": {name: stage.value for name, stage in times.overloaded.items()},
        },
        "shadow_values": [asdict(value) for value in plan.shadow],
        "tornado": [asdict(swing) for swing in plan.tornado],
        "break_even_bits_per_s": plan.break_even_bits_per_s,
        "recompute_bits_per_s": plan.recompute_bits_per_s,
        "break_even_price_per_tb": plan.break_even_price.per_tb,
        "break_even_price_reason": plan.break_even_price.reason,
        "sizing": None if plan.sizing is None else asdict(plan.sizing),
        "coding": None if plan.coding is None else asdict(plan.coding),
        "classes": {name: asdict(side) for name, side in plan.classes.items()},
        "left_out": None if plan.left_out is None else asdict(plan.left_out),
        "notes": plan.notes,
    }
    cleaned: dict[str, Any] = without_infinity(found)
    return cleaned


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "gain_at_equal_cost": comparison.gain,
        "designs": [_design(design) for design in comparison.all],
    }


def _design(design: Design) -> dict[str, Any]:
    found = design.operation
    return {
        "name": design.name,
        "num_gpus": design.num_gpus,
        "price_per_h": design.price_per_h,
        "price_per_mtoken": design.price_per_mtoken,
        **asdict(found),
        "capacity_per_s": {stage.value: rate for stage, rate in found.capacity_per_s.items()},
        "binding": found.binding.value,
        "slack": {stage.value: found.slack(stage) for stage in found.capacity_per_s},
    }


def _latencies(times: dict[str, Latency]) -> dict[str, Any]:
    return {name: asdict(latency) for name, latency in times.items()}


def _queued(found: Latency) -> dict[str, float]:
    low, high = found.p99_range
    return {**asdict(found), "p99_low": low, "p99_high": high}


def without_infinity(value: Any) -> Any:
    """Nested values with None in place of numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: without_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


NUM_POINTS_MAX = 160
"""Points of a curve; a screen cannot resolve more."""


def interactive(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A plan with some settings changed; ConfigError if the plan or a setting is wrong.

    Args:
        overrides: As `prfaas plan --set` takes them.

    Returns:
        JSON values. `settings`: the plan file's, by dotted name, changes applied. `plan`: what
        `prfaas plan --json` prints. `threshold` and `split`: Λ and its stages, req/s, along t,
        tokens, and along N_p.
    """
    plan = make_plan(load_question(path, overrides))
    problem, found = plan.question.problem, plan.exact.prfaas.operation
    curves = {
        "threshold": _curve(against_threshold(problem, found)),
        "split": _curve(against_split(problem, found)),
    }
    settings = {"settings": _settings(path, overrides), "num_pd": problem.pd.num_instances}
    whole: dict[str, Any] = without_infinity(settings | {"plan": as_dict(plan)} | curves)
    return whole


def _settings(path: Path, overrides: Sequence[str]) -> dict[str, float | None]:
    tables = read_toml(path)
    for setting in overrides:
        override(tables, setting)
    file = validated(PlanFile, tables, path)
    found: dict[str, float | None] = {
        "pd.instances": file.pd.instances,
        "pd.price_per_gpu_hour": file.pd.price_per_gpu_hour,
        "workload.mu": file.workload.mu,
        "workload.sigma": file.workload.sigma,
        "workload.output_tokens": file.workload.output_tokens,
        "workload.prefix_hit_ratio": file.workload.prefix_hit_ratio,
        "search.threshold": file.search.threshold,
    }
    if file.prfaas:
        first = file.prfaas[0]
        found |= {
            "prfaas.0.instances": first.instances,
            "prfaas.0.price_per_gpu_hour": first.price_per_gpu_hour,
            "prfaas.0.link.bandwidth": first.link.bandwidth,
            "prfaas.0.link.rtt": first.link.rtt,
            "prfaas.0.link.price_per_tb": first.link.price_per_tb,
        }
    return found


def _curve(curve: Curve) -> dict[str, list[float | None]]:
    step = -(-len(curve.x) // NUM_POINTS_MAX)
    kept = slice(None, None, step)
    columns = {
        "x": curve.x,
        "prfaas": curve.prfaas,
        "pd_prefill": curve.pd_prefill,
        "decode": curve.decode,
        "rate": curve.rate,
    }
    return {
        name: [float(v) if np.isfinite(v) else None for v in values[kept]]
        for name, values in columns.items()
    }


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
