"""Data of a plan for sliders: initial values, figures, and two curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.planner.answer.overrides import override
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_file import PlanFile
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.model.catalogue import models
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import kv_bytes_at
from prfaas.planner.report.json_report import as_dict, without_infinity
from prfaas.planner.solve.curves import Curve, against_split, against_threshold
from prfaas.toml_tables import read_toml, validated

NUM_POINTS_MAX = 160
"""Points of a curve; a screen cannot resolve more."""


def interactive(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A plan with some settings changed.

    Args:
        overrides: As `prfaas plan --set` takes them.

    Returns:
        JSON values. `settings`: the plan file's, by dotted name, changes applied. `plan`: what
        `prfaas plan --json` prints. `threshold` and `split`: Λ and its stages, req/s, along t,
        tokens, and along N_p.

    Raises:
        ConfigError: The plan or a setting is wrong.
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


def cache_sizes(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """KV cache of the catalogue's models, bytes, at each length, tokens; the largest first."""
    found = []
    for key, model in models().items():
        geometry = geometry_from_config(model.config, name=model.name)
        sizes = kv_bytes_at(geometry, np.asarray(lengths, dtype=float))
        found.append(
            {
                "key": key,
                "name": model.name,
                "active_parameters": model.active_parameters,
                "kv_bytes": [int(size) for size in sizes],
            }
        )
    return sorted(found, key=lambda model: -model["kv_bytes"][-1])


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
