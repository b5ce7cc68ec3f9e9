"""The map as JSON values."""

from __future__ import annotations

from typing import Any

from prfaas.planner.fit_map.make import FitMap, Mix, Moved
from prfaas.planner.report.json_report import without_infinity


def as_dict(found: FitMap) -> dict[str, Any]:
    """Nested dicts, lists and numbers; None is a crossover that no bandwidth reaches."""
    transport = found.transport
    values: dict[str, Any] = {
        "title": found.title,
        "congestion_control": transport.control.value,
        "pool_nodes": transport.num_nodes or None,
        "lengths": [_mix(mix) for mix in found.mixes],
        "moved": [_moved(moved) for moved in found.moved],
    }
    cleaned: dict[str, Any] = without_infinity(values)
    return cleaned


def _moved(moved: Moved) -> dict[str, Any]:
    return {
        "rtt_s": moved.path.rtt_s,
        "loss": moved.path.loss,
        "crossover_bits_per_s": moved.base.bits_per_s,
        "changes": [
            {
                "what": mover.what,
                "crossover_bits_per_s": mover.crossover.bits_per_s,
                "ratio": mover.ratio,
            }
            for mover in moved.movers
        ],
    }


def _mix(mix: Mix) -> dict[str, Any]:
    return {
        "factor": mix.factor,
        "mean_new_tokens": mix.mean_tokens,
        "points": [
            {
                "bits_per_s": point.path.bits_per_s,
                "rtt_s": point.path.rtt_s,
                "loss": point.path.loss,
                "goodput_bits_per_s": point.goodput_bits_per_s,
                "gain_at_equal_cost": point.gain,
                "fit": point.fit.value,
                "doubt": None if point.doubt is None else point.doubt.value,
                "reason": point.reason,
            }
            for point in mix.points.values()
        ],
        "crossovers": [
            {"loss": loss, "rtt_s": rtt_s, "bits_per_s": crossover.bits_per_s}
            for (loss, rtt_s), crossover in mix.crossovers.items()
        ],
    }
