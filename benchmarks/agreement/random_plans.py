"""Random plans over models, hardware, links, lengths and prices, each from a seed and a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_file import PlanFile
from prfaas.planner.answer.plan_loader import Question, question_of

_MODELS = (
    "deepseek_v3",
    "deepseek_v3_2",
    "gpt_oss_120b",
    "kimi_k2_5",
    "kimi_linear_48b_a3b",
    "llama_3_1_8b",
    "llama_3_3_70b",
    "mimo_v2_flash",
    "minimax_m2_5",
    "qwen3_235b_a22b",
    "qwen3_32b",
    "qwen3_5_397b_a17b",
    "qwen3_next_80b_a3b",
)
"""Of the catalogue; listed, so that plans stay as they are when it grows."""
_PRFAAS = {"h200": 2.6, "b200": 4.5, "h100": 2.2}
_PD = {"h20": 1.3, "h100": 2.2, "h200": 2.6, "a100": 1.2}
"""Accelerators and list-like rents of one GPU hour, $."""
_WEIGHTS = ("fp8", "fp8", "bf16", "int4")


def random_plan(seed: int, number: int) -> tuple[dict[str, Any], Question]:
    """Return the tables of a plan and its question.

    A draw that the planner refuses (a model that does not fit, a decode target that no batch
    meets) is drawn anew.
    """
    rng = np.random.default_rng((seed, number))
    while True:
        tables = draw(rng)
        try:
            return tables, question_of(PlanFile.model_validate(tables), Path())
        except ConfigError:
            continue


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """Draw the tables of a plan file."""
    model = str(rng.choice(_MODELS))
    weights = str(rng.choice(_WEIGHTS))
    tpot_ms = int(rng.integers(20, 61))
    return {
        "title": model,
        "model": {"catalogue": model, "kv_dtype": str(rng.choice(["auto", "fp8"]))},
        "workload": {
            **_lengths(rng),
            "output_tokens": _spread(rng, 50, 5_000),
            "prefix_hit_ratio": round(float(rng.choice([0, 0, rng.uniform(0.2, 0.8)])), 2),
            "arrival_cv": round(float(rng.choice([1.0, rng.uniform(1, 2)])), 2),
        },
        "prfaas": [_prfaas(rng, weights, i) for i in range(rng.choice([1, 1, 1, 2]))],
        "pd": {
            **_cluster(rng, "pd", _PD, weights),
            "instances": int(rng.integers(2, 17)),
            **({"tpot_max": f"{tpot_ms}ms"} if rng.random() < 0.7 else {}),
        },
        "search": {"step": 200},
    }


def _lengths(rng: np.random.Generator) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {
            "distribution": "lognormal",
            "mu": round(float(rng.uniform(6.5, 10.3)), 2),
            "sigma": round(float(rng.uniform(0.5, 1.6)), 2),
            "min_tokens": 64,
            "max_tokens": int(rng.choice([32_768, 65_536, 131_072])),
        }
    # Chat beside documents or agents, each a hump of its own.
    humps = [(rng.uniform(5.5, 8), rng.uniform(0.5, 1.2)), (rng.uniform(8.5, 11), 0.5)]
    share = float(rng.choice([rng.uniform(0.01, 0.05), rng.uniform(0.05, 0.5)]))
    chosen = (rng.random(2_000) < share).astype(int)
    drawn = [rng.lognormal(*humps[hump]) for hump in chosen]
    return {
        "distribution": "lengths",
        "lengths": np.clip(np.rint(drawn), 16, 131_072).tolist(),
    }


def _prfaas(rng: np.random.Generator, weights: str, index: int) -> dict[str, Any]:
    return {
        **_cluster(rng, f"prfaas {index}", _PRFAAS, weights),
        "instances": int(rng.integers(1, 9)),
        "link": {
            "bandwidth": f"{_spread(rng, 2, 200)}Gbps",
            "rtt": f"{_spread(rng, 1, 80)}ms",
            "price_per_tb": round(float(rng.uniform(0, 2)), 2),
        },
    }


def _cluster(
    rng: np.random.Generator, name: str, prices: dict[str, float], weights: str
) -> dict[str, Any]:
    accelerator = str(rng.choice(sorted(prices)))
    return {
        "name": name,
        "gpus_per_instance": int(rng.choice([4, 8])),
        "price_per_gpu_hour": round(prices[accelerator] * float(rng.uniform(0.7, 1.4)), 2),
        "roofline": {
            "accelerator": accelerator,
            "weights": weights,
            "prefill_efficiency": round(float(rng.uniform(0.15, 0.5)), 2),
            "decode_efficiency": round(float(rng.uniform(0.4, 0.7)), 2),
            "overhead": f"{int(rng.integers(10, 401))}ms",
            "source": "drawn",
        },
    }


def _spread(rng: np.random.Generator, low: float, high: float) -> int:
    """A whole number, as likely in each octave."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
