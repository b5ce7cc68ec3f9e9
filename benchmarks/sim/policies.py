"""Goodput under SLO by scenario and policy, as a Markdown table.

python benchmarks/sim/policies.py [--seeds 1,2,3]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from prfaas.core.policies import PolicyName
from prfaas.sim.run import run
from prfaas.sim.scenario import load_scenario

EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"
SCENARIOS = (
    "paper-poisson",
    "bursty",
    "link-degraded",
    "link-cut",
    "diurnal",
    "mooncake",
    "claude-code",
    "scarce-link",
    "scarce-overload",
)


def goodput(name: str, policy: PolicyName, seeds: list[int]) -> float:
    scenario = load_scenario(EXAMPLES / f"{name}.toml").with_policy(policy)
    return sum(run(scenario.with_seed(s)).results.goodput for s in seeds) / len(seeds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    print("| scenario | " + " | ".join(PolicyName) + " | adaptive : paper |")
    print("|---|" + "---:|" * (len(PolicyName) + 1))
    for name in options.scenarios.split(","):
        found = {p: goodput(name, p, seeds) for p in PolicyName}
        gain = found[PolicyName.ADAPTIVE] / found[PolicyName.PAPER] - 1
        cells = " | ".join(f"{rate:.3f}" for rate in found.values())
        print(f"| {name} | {cells} | {gain:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
