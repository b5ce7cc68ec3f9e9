"""The plan as JSON values."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from prfaas.planner.answer.plan import Comparison, Plan
from prfaas.planner.solve.designs import Design
from prfaas.planner.solve.latency import Latency


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
