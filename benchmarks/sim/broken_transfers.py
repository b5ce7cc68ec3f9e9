"""Recovery of a broken transfer of the case study's model, by the spacing of checkpoints.

    python benchmarks/sim/broken_transfers.py

One request alone. The link is cut when 60 % of its prefill is done, and stays away; both ends
notice after a second. `docs/results/broken-transfers.md` has the figures.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

from prfaas.core.kv.blocks import GroupKind
from prfaas.core.kv.shipping import CheckpointRule
from prfaas.core.routing.predictions import layout_of
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.units import NS_PER_S

PLAN = Path(__file__).parents[2] / "examples" / "plan" / "paper-case-study.toml"
PROMPTS = (32_768, 131_072)
SPACINGS = (0, 4_096, 8_192, 16_384, 32_768, 65_536)
LINKS = ("100Gbps", "10Gbps")
BLOCK_TOKENS = 512
CUT_AT = 0.6
SCENARIO = """
title = "A broken transfer"
plan = "{plan}"
[workload]
arrivals = "trace"
trace = "{trace}"
[routing]
policy = "remote"
[link]
bandwidth = "{bandwidth}"
dead_after = "1s"
[cache]
block_tokens = {block}
checkpoint_blocks = 21
state_checkpoint_tokens = {spacing}
"""
FAILURE = """
[[failure]]
kind = "link"
at = "{at}s"
duration = "600s"
"""


def simulated(tokens: int, spacing: int, bandwidth: str, cut_s: float | None = None) -> ScenarioRun:
    """One prompt; its link is cut at a time, or never."""
    with tempfile.TemporaryDirectory() as local:
        trace = Path(local) / "one.jsonl"
        blocks = list(range(-(-tokens // BLOCK_TOKENS)))
        entry = {"timestamp": 0, "input_length": tokens, "output_length": 8, "hash_ids": blocks}
        trace.write_text(json.dumps(entry) + "\n")
        text = SCENARIO.format(
            plan=PLAN, trace=trace, bandwidth=bandwidth, block=BLOCK_TOKENS, spacing=spacing
        )
        file = Path(local) / "scenario.toml"
        file.write_text(text + (FAILURE.format(at=cut_s) if cut_s is not None else ""))
        return run(load_scenario(file))


def spacing_of(bandwidth: str, tokens: int, setting: int | Literal["auto"]) -> int:
    """The spacing of a gateway whose plan is the case study's, for a prompt of so many tokens."""
    setup = simulated(PROMPTS[0], 0, bandwidth).scenario.setup
    costs = setup.costs
    rule = CheckpointRule.planned(
        setting, costs.local_prefill_ns, [setup.prfaas[0].link.bits_per_s]
    )
    each = layout_of(costs, tokens)
    groups = tuple(
        replace(
            group,
            tokens_per_block=BLOCK_TOKENS,
            block_bytes=group.block_bytes
            * (BLOCK_TOKENS if group.kind is GroupKind.FULL_ATTENTION else 1),
        )
        for group in each.groups
    )
    made = rule.of(replace(each, groups=groups), have_tokens=0, final_tokens=tokens)
    return made.checkpoint_tokens


def main() -> None:
    """Print the table."""
    for bandwidth in LINKS:
        print("| prompt | link | checkpoint every | resumed | recomputed | TTFT | extra egress |")
        print("|---|---|---|---|---|---|---|")
        for tokens in PROMPTS:
            plain = simulated(tokens, 0, bandwidth)
            costs = plain.scenario.setup.costs
            cut_s = CUT_AT * costs.remote_prefill_ns(tokens) / NS_PER_S
            auto = spacing_of(bandwidth, tokens, "auto")
            least = spacing_of(bandwidth, tokens, 1)
            print(f"{tokens:,} tokens: auto is {auto:,}, the least of a number {least:,}")
            for spacing in sorted({*SPACINGS, least, auto}):
                broken = simulated(tokens, spacing, bandwidth, cut_s)
                [request] = broken.simulation.requests
                made = broken.scenario.setup.prfaas[0].costs
                whole = costs.shipped_bytes(tokens, 0)
                extra = made.shipped_bytes(tokens, 0) / whole - 1
                print(
                    f"| {tokens:,} | {bandwidth} | {_words(spacing, least, auto)} | "
                    f"{request.kept_tokens:,} | {tokens - request.kept_tokens:,} | "
                    f"{request.ttft_ns / NS_PER_S:.2f} s | {extra:.1%} |"
                )
            [request] = plain.simulation.requests
            print(
                f"| {tokens:,} | {bandwidth} | not broken | - | 0 | "
                f"{request.ttft_ns / NS_PER_S:.2f} s | - |"
            )


def _words(spacing: int, least: int, auto: int) -> str:
    words = f"{spacing:,}" if spacing else "none"
    marks = [mark for mark, at in (("auto", auto), ("least", least)) if at == spacing]
    return words + (f" ({', '.join(marks)})" if marks else "")


if __name__ == "__main__":
    main()
