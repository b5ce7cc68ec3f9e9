"""A warm turn against a short prompt: 2,830 new tokens after 88,600 cached ones.

    python -m benchmarks.planner.warm_turns

Prints the tables of docs/results/warm-turns.md: T(prefix, new) by model, and what a plan for turns
of a coding agent says if their prefixes count, and if they do not. Rooflines, no measurement.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.hardware.roofline import ModelSize, Roofline, attention_tokens, prefill_profile
from prfaas.planner.model.catalogue import find_accelerator, find_model
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.problem import Problem
from prfaas.planner.solve.latency import best_operation
from prfaas.planner.solve.sensitivity import gain, with_workload
from prfaas.planner.solve.throughput import StageMode
from prfaas.planner.workload import EmpiricalLengths

PREFIX, NEW = 88_600, 2_830
MODELS = (
    "llama_3_3_70b",
    "qwen3_235b_a22b",
    "minimax_m2_5",
    "deepseek_v3",
    "deepseek_v3_2",
    "kimi_linear_48b_a3b",
    "mimo_v2_flash",
    "ring_2_5_1t",
)
PLANS = Path(__file__).parents[2] / "examples" / "plan"
TURNS = 400
SEED = 7


def of_catalogue(key: str) -> tuple[str, PrefillProfile, int]:
    """The roofline of a model on 8 H200 at half of their peak, and its `attention_tokens`."""
    model = find_model(key)
    size = ModelSize(model.parameters, model.active_parameters, model.config)
    geometry = geometry_from_config(model.config, name=model.name)
    roofline = Roofline(find_accelerator("h200"), 8, "fp8", 0.5, 0.5, 0.0, "assumed")
    profile = prefill_profile(model.name, roofline, geometry, size)
    return model.name, profile, attention_tokens(geometry, size)


def row(name: str, profile: PrefillProfile, half: int) -> str:
    """A row of the table of models."""
    short = profile.seconds_at(NEW)
    turn = float(profile.after(np.array([float(PREFIX)]), np.array([float(NEW)]))[0])
    known = f"{half:,}" if half else "-"
    return f"| {name} | {short * 1e3:.0f} ms | {turn * 1e3:.0f} ms | {turn / short:.2f} | {known} |"


def turns() -> EmpiricalLengths:
    """Turns of coding agents: first turns of 20,000 new tokens, the others with long prefixes."""
    rng = np.random.default_rng(SEED)
    new = np.clip(np.exp(rng.normal(7.5, 1.0, TURNS)), 64, 20_000).round()
    prefixes = np.clip(np.exp(rng.normal(11.2, 0.6, TURNS)), 8_000, 110_000).round()
    first = rng.random(TURNS) < 1 / 10
    new[first], prefixes[first] = 20_000, 0
    return EmpiricalLengths(tuple(new.tolist()), tuple(prefixes.tolist()))


def verdict(problem: Problem) -> str:
    """Gain, rate, threshold and split of a plan."""
    found = best_operation(problem, StageMode.EXACT)
    split = f"{found.num_prefill} : {found.num_decode}"
    return (
        f"{gain(problem, StageMode.EXACT):+.1%} | {found.rate_per_s:.2f} "
        f"| {found.whole_threshold:,} "
        f"| {split}"
    )


def main() -> None:
    """Print both tables."""
    print("| model | T(2,830) | T(88,600, 2,830) | ratio | attention is half at, tokens |")
    print("|---|---|---|---|---|")
    for key in MODELS:
        print(row(*of_catalogue(key)))
    hybrid = load_question(PLANS / "paper-case-study.toml").problem.prfaas[0].prefill
    print(row("the paper's 1T hybrid, measured", hybrid, 0))
    print("\n| plan, turns of agents | prefixes | gain | Λ, req/s | t | N_p : N_d |")
    print("|---|---|---|---|---|---|")
    lengths = turns()
    whole = float(np.mean(np.add(lengths.lengths, lengths.prefixes)))
    for name in ("paper-case-study", "llama-3.3-70b-dense"):
        problem = load_question(PLANS / f"{name}.toml").problem
        for counts in (False, True):
            seen = lengths if counts else EmpiricalLengths(lengths.lengths)
            work = replace(problem.workload, lengths=seen, mean_prompt_tokens=whole)
            asked = with_workload(replace(problem, step_tokens=200), work)
            print(f"| {name} | {'charged' if counts else 'not charged'} | {verdict(asked)} |")


if __name__ == "__main__":
    main()
