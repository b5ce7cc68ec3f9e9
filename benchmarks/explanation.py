"""Data of the interactive explanation, `console/src/learn/data.json`.

Every number of the page comes from the planner or the simulator, which run here; the page only
draws them. `make console` writes the data and builds the page.

- `one`: one prompt read locally and remotely, by model, link and length.
- `many`: the same prompts at every threshold of a grid, simulated; the planner's optimum.
- `trouble`: the same prompts under two policies while something happens, simulated.
- `yours`: the planner's gain by model, fleet, link and prompt length, and the plan file.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.core.routing.policies import PolicyName
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.fit_map.point import PLANNER_ERROR
from prfaas.planner.problem import Problem
from prfaas.planner.report.what_if import CASE_STUDY
from prfaas.planner.sizing.obstacles import doubt, load_variation
from prfaas.planner.solve import designs
from prfaas.planner.solve.designs import gain_at_equal_cost
from prfaas.planner.solve.latency import best_operation
from prfaas.planner.solve.search import against_threshold
from prfaas.planner.solve.throughput import StageMode
from prfaas.planner.workload import LogNormalLengths
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.report.events import request_row, system_of
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_MS, NS_PER_S

FAMILIES = Path(__file__).parents[1] / "examples" / "plan" / "families"
BLOCK_TOKENS = 512
RTT = "30ms"
TARGET_S = 10
TICK_MS = 50
"""Unit of times of recorded requests."""

# One prompt

LENGTHS = (
    *(int(round(500 * 262.144 ** (step / 40), -2 if step > 12 else -1)) for step in range(40)),
    131_072,
)
LINKS = (1e9, 2.5e9, 5e9, 10e9)
MODELS = (
    ("hybrid", "hybrid model", CASE_STUDY),
    ("dense", "dense model", FAMILIES / "dense-gqa.toml"),
)


def one_prompt() -> dict[str, Any]:
    """Times of one prompt, ms: by model and link a row for each length.

    A row has the ends of the local chunks; those of the remote ones; start and end of the flight of
    each block; the bytes of all blocks; and when the answer begins remotely.
    """
    found = {}
    for key, name, plan in MODELS:
        by_link = {}
        for bits_per_s in LINKS:
            scenario = _idle(plan, bits_per_s)
            by_link[f"{bits_per_s / 1e9:g}"] = [_alone(scenario, tokens) for tokens in LENGTHS]
        found[key] = {"name": name, "links": by_link}
    return {"lengths": LENGTHS, "rtt_ms": 30, "models": found}


def _idle(plan: Path, bits_per_s: float) -> Scenario:
    text = f'title = "alone"\nplan = "{plan}"\n[workload]\nrate = 1\n[routing]\npolicy = "remote"\n'
    text += f'admission = false\n[link]\nbandwidth = "{bits_per_s:.0f}bps"\nrtt = "{RTT}"\n'
    return _scenario(text)


def _scenario(text: str, trace: str = "") -> Scenario:
    with tempfile.TemporaryDirectory() as folder:
        if trace:
            (Path(folder) / "trace.jsonl").write_text(trace)
        path = Path(folder) / "scenario.toml"
        path.write_text(text)
        return load_scenario(path)


def _alone(scenario: Scenario, tokens: int) -> list[Any]:
    """One prompt in an idle system, with both policies."""
    (far,) = _simulated(scenario, [Request(0, 0, tokens, 64)])
    setup = replace(
        scenario.setup, routing=replace(scenario.setup.routing, policy=PolicyName.LOCAL)
    )
    (near,) = _simulated(replace(scenario, setup=setup), [Request(0, 0, tokens, 64)])
    cluster = scenario.setup.prfaas[0]
    ends = cluster.costs.chunks(tokens)
    # One transfer is sent by one pool node, over as many connections as it opens.
    bits_per_s = min(cluster.link.bits_per_s, cluster.link.flow_bits_per_s)
    flights, free_ns, shipped = [], 0.0, 0
    for computed, end_ns in ends:
        whole = cluster.costs.shipped_bytes(computed, 0)
        ready = whole if computed == tokens else whole - cluster.costs.state_bytes
        begin_ns = max(float(end_ns), free_ns)
        free_ns = begin_ns + (ready - shipped) * 8 / bits_per_s * NS_PER_S
        flights += [round(begin_ns / NS_PER_MS), round(free_ns / NS_PER_MS)]
        shipped = ready
    arrived_ns = free_ns + cluster.link.rtt_ns / 2
    # The gateway abandons a trip that takes longer than it is worth; all others are as drawn here.
    if far.attempt == 1:
        assert abs(far.first_token_at_ns - arrived_ns) < 20 * NS_PER_MS, (tokens, far, arrived_ns)
    near_ends = [ns for _, ns in scenario.setup.costs.chunks(tokens, is_local=True)]
    assert near_ends[-1] == near.first_token_at_ns, (near_ends, near)
    return [
        [round(ns / NS_PER_MS) for ns in near_ends],
        [round(ns / NS_PER_MS) for _, ns in ends],
        flights,
        shipped,
        round(arrived_ns / NS_PER_MS),
    ]


def _simulated(scenario: Scenario, requests: list[Request]) -> list[Request]:
    simulation = Simulation(scenario.setup, requests)
    simulation.run()
    return simulation.requests


# Many prompts

LINK_BITS_PER_S = 20e9
RATE = 2.4
SPAN_S, LEAD_S = 150, 50
THRESHOLDS = (
    *(1000, 2000, 4000, 7000, 10_000, 13_000, 16_000, 19_600),
    *(23_000, 28_000, 36_000, 50_000, 80_000),
)
FOLLOW_UPS = 0.35
SEED = 4
OUTPUT_TOKENS = 1024


def trace(
    rate: float, span_s: float, burst: tuple[float, float, float] | None = None, warm: float = 0.0
) -> str:
    """Requests as JSON lines: new tokens as in the case study, some after a cached prefix.

    Args:
        burst: Start and end, s, and the factor of the rate in between.
        warm: From the start of the burst, the share of requests that repeat a prompt almost whole.
    """
    rng = np.random.default_rng(SEED)
    lengths = LogNormalLengths(9.90, 1.0, 128, 131_072)
    ratios = np.linspace(0, 1, 20_001)
    quantiles = lengths.quantiles(ratios)
    rows: list[tuple[float, int, list[int]]] = []
    at_s, next_id = 0.0, 1
    while True:
        in_burst = burst is not None and burst[0] <= at_s < burst[1]
        at_s += rng.exponential(1 / (rate * (burst[2] if burst and in_burst else 1)))
        if at_s >= span_s:
            break
        new_tokens = int(np.interp(rng.random(), ratios, quantiles))
        old = [row for row in rows if row[0] < at_s - 25 and 1024 < row[1] < 40_000]
        prefix: list[int] = []
        if in_burst and warm and rng.random() < warm:
            long = [row for row in rows if row[0] < at_s - 25 and row[1] > 20_000]
            parent = long[int(rng.integers(len(long)))]
            prefix = parent[2][: parent[1] // BLOCK_TOKENS]
            new_tokens = min(new_tokens, 2000)
        elif old and rng.random() < FOLLOW_UPS:
            parent = old[int(rng.integers(len(old)))]
            prefix = parent[2][: parent[1] // BLOCK_TOKENS]
        prompt = min(len(prefix) * BLOCK_TOKENS + new_tokens, 131_072)
        num_blocks = -(-prompt // BLOCK_TOKENS)
        own = list(range(next_id, next_id + num_blocks - len(prefix)))
        next_id += len(own)
        rows.append((at_s, prompt, prefix + own))
    return "".join(
        json.dumps(
            {
                "timestamp": round(at * 1000),
                "input_length": prompt,
                "output_length": OUTPUT_TOKENS,
                "hash_ids": ids,
            }
        )
        + "\n"
        for at, prompt, ids in rows
    )


def system(recorded: str, failure: str = "", policy: str = "paper", threshold: int = 0) -> Scenario:
    """The case study with a link of `LINK_BITS_PER_S`, and requests of a trace."""
    text = f"""
title = "Two sites"
plan = "{CASE_STUDY}"
plan_settings = ['prfaas.0.link.bandwidth="{LINK_BITS_PER_S:.0f}bps"', 'prfaas.0.link.rtt="{RTT}"']
[workload]
arrivals = "trace"
trace = "trace.jsonl"
[routing]
policy = "{policy}"
admission = false
{f"threshold = {threshold}" if threshold else ""}
[cache]
[slo]
ttft = "{TARGET_S}s"
{failure}
"""
    return _scenario(text, recorded)


def packed(done: ScenarioRun) -> list[int | None]:
    """Requests of a run, flat: cached blocks, path, and parts of the time in ticks.

    The path is 0 local, 1 remote, 2 fell back, 3 to 5 the same without an end. The parts are lost,
    queue, prefill, and transfer with admission.
    """
    found: list[int | None] = []
    for request in done.simulation.requests:
        _, _, cached, path, *parts = request_row(done.simulation, request)
        code = "LRF".index(path[0]) + (3 if len(path) > 1 else 0)
        lost, queue, prefill, transfer, admission, _ = (
            None if ms is None else round(ms / TICK_MS) for ms in parts
        )
        wait = None if transfer is None or admission is None else transfer + admission
        found += [cached // BLOCK_TOKENS, code, lost, queue, prefill, wait]
    return found


def arrivals(done: ScenarioRun) -> list[int]:
    """Arrival, ticks after the one before, and tokens of each request."""
    found, last = [], 0
    for request in done.simulation.requests:
        at = round(request.arrived_at_ns / NS_PER_MS / TICK_MS)
        found += [at - last, request.num_prompt_tokens]
        last = at
    return found


def in_time(done: ScenarioRun, from_s: float) -> float:
    """Share of the requests from an instant on with a first token within the target."""
    came = [r for r in done.simulation.requests if r.arrived_at_ns >= from_s * NS_PER_S]
    good = [r for r in came if 0 <= r.ttft_ns <= TARGET_S * NS_PER_S and r.first_token_at_ns >= 0]
    return round(len(good) / len(came), 4)


def many_prompts() -> dict[str, Any]:
    """The grid of thresholds."""
    recorded = trace(RATE, LEAD_S + SPAN_S)
    problem = case_study()
    best = best_operation(problem, StageMode.EXACT)
    curve = against_threshold(problem, best)
    runs = []
    for threshold in THRESHOLDS:
        done = run(system(recorded, threshold=threshold))
        at = int(np.argmin(np.abs(np.asarray(curve.x) - threshold)))
        load = [
            _percent(RATE / stage[at]) for stage in (curve.pd_prefill, curve.prfaas, curve.decode)
        ]
        runs.append(
            {
                "threshold": threshold,
                "in_time": in_time(done, LEAD_S),
                "load": load,
                "requests": packed(done),
            }
        )
    return {
        "system": system_of(done.scenario.setup),
        "lead_s": LEAD_S,
        "span_s": SPAN_S,
        "target_s": TARGET_S,
        "rate_per_s": RATE,
        "link_bits_per_s": LINK_BITS_PER_S,
        "optimum": best.whole_threshold,
        "optimum_rate_per_s": round(best.rate_per_s, 2),
        "arrivals": arrivals(done),
        "runs": runs,
    }


def _percent(share: float) -> int:
    return round(100 * share) if math.isfinite(share) else 0


def case_study() -> Problem:
    """The planner's question that many prompts and trouble are about."""
    bandwidth = f'prfaas.0.link.bandwidth="{LINK_BITS_PER_S:.0f}bps"'
    return load_question(CASE_STUDY, [bandwidth, f'prfaas.0.link.rtt="{RTT}"']).problem


# Trouble

TROUBLE_SPAN_S, BEGIN_S, END_S = 240, 60, 120
POLICIES = ("paper", "adaptive")


def _failure(kind: str, more: str = "", duration: int = END_S - BEGIN_S) -> str:
    return f'[[failure]]\nkind = "{kind}"\nat = "{BEGIN_S}s"\nduration = "{duration}s"\n{more}\n'


EVENTS = (
    ("cut", _failure("link"), None, 0.0),
    ("engine", _failure("prfaas"), None, 0.0),
    ("half", _failure("link", "capacity = 0.5"), None, 0.0),
    ("burst", "", (BEGIN_S, BEGIN_S + 30, 2.0), 0.0),
    ("warm", "", (BEGIN_S, END_S, 1.0), 0.7),
)


TROUBLE_RATE = 2.2


def trouble() -> dict[str, Any]:
    """Clips: what happens from `BEGIN_S` on, under each policy."""
    found = {}
    for key, failure, burst, warm in EVENTS:
        recorded = trace(TROUBLE_RATE, TROUBLE_SPAN_S, burst, warm)
        runs = {}
        for policy in POLICIES:
            done = run(system(recorded, failure, policy))
            outcomes = done.results.outcomes
            runs[policy] = {
                "in_time": in_time(done, 0),
                "errors": sum(n for name, n in outcomes.items() if name != "finished"),
                "requests": packed(done),
            }
        end_s = burst[1] if burst else END_S
        found[key] = {"from_s": BEGIN_S, "to_s": end_s, "arrivals": arrivals(done), "runs": runs}
    return {"span_s": TROUBLE_SPAN_S, "system": system_of(done.scenario.setup), "clips": found}


# Your numbers

PLANS = (
    CASE_STUDY,
    *(
        FAMILIES / f"{name}.toml"
        for name in ("hybrid-7-1", "hybrid-3-1", "sliding-window-5-1", "mla", "dense-gqa")
    ),
)
FLEETS = ((1, False), (2, False), (4, False), (4, True))
"""PrfaaS instances of 8 H200, and if the local site has H200 too, in place of H20."""
BANDWIDTHS = (1e9, 2.5e9, 5e9, 10e9, 25e9, 50e9, 100e9)
MEDIANS = (1000, 2000, 4000, 8000, 16_000, 32_000)
PAYS, DOES_NOT_PAY, DEPENDS = range(3)


def plan_text(template: str, fleet: tuple[int, bool], bits_per_s: float, median: int) -> str:
    """A plan file, as the page fills it in."""
    num_prfaas, is_same = fleet
    values = {
        "PRFAAS": str(num_prfaas),
        "BANDWIDTH": f"{bits_per_s / 1e9:g}Gbps",
        "MU": f"{math.log(median):.3f}",
    }
    text = template
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    if is_same:
        far, near = text.split("[pd]\n")
        prefill = far.split("[prfaas.prefill]\n")[1].strip()
        head, rest = near.split("[pd.prefill]\n")
        decode = rest.split("[pd.decode]\n")[1]
        price = far.split("price_per_gpu_hour = ")[1].split("\n")[0]
        own = head.split("price_per_gpu_hour = ")[1].split("\n")[0]
        head = head.replace("H20 cluster", "local H200 cluster").replace(
            f"= {own}\n", f"= {price}\n"
        )
        text = f"{far}[pd]\n{head}[pd.prefill]\n{prefill}\n[pd.decode]\n{decode}"
    return text


def template_of(plan: Path) -> str:
    """A plan file with places for the values."""
    lines = [line for line in plan.read_text().splitlines() if line]
    text = "\n".join(line for line in lines if not line.startswith("#")) + "\n"
    for old, new in (
        ("mu = 9.90", "mu = {MU}"),
        ("instances = 4", "instances = {PRFAAS}"),
        ('bandwidth = "100Gbps"', 'bandwidth = "{BANDWIDTH}"\nrtt = "' + RTT + '"'),
    ):
        assert old in text, (plan, old)
        text = text.replace(old, new)
    return text


def question_of(text: str) -> Question:
    """The planner's reading of a plan file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(text)
        return load_question(path, ())


def answer(text: str) -> list[int]:
    """The planner's answer to a plan file: verdict, gain in percent, threshold, share offloaded in
    percent, and requests a minute with and without offloading at equal cost."""
    problem = question_of(text).problem
    ours = designs.prfaas_pd(problem, StageMode.EXACT)
    other = designs.equal_cost(problem, StageMode.EXACT, ours.price_per_h)
    found, gain = ours.operation, gain_at_equal_cost(ours, other)
    margin = max(PLANNER_ERROR, load_variation(problem, found))
    is_clear = abs(gain) > margin and not (gain > 0 and doubt(problem, ours, other))
    return [
        (PAYS if gain > 0 else DOES_NOT_PAY) if is_clear else DEPENDS,
        round(100 * gain),
        found.whole_threshold or 0,
        round(100 * found.offload_fraction),
        round(60 * found.rate_per_s),
        round(60 * other.operation.rate_per_s),
    ]


def grid() -> Iterator[tuple[int, int, int, int]]:
    """Places in the table, in the order of its rows."""
    for family in range(len(PLANS)):
        for fleet in range(len(FLEETS)):
            for link in range(len(BANDWIDTHS)):
                for median in range(len(MEDIANS)):
                    yield family, fleet, link, median


def your_numbers() -> dict[str, Any]:
    """The table, flat, six numbers a place."""
    templates = [template_of(plan) for plan in PLANS]
    answers: list[int] = []
    for family, fleet, link, median in grid():
        text = plan_text(templates[family], FLEETS[fleet], BANDWIDTHS[link], MEDIANS[median])
        answers += answer(text)
    return {
        "models": [_title(each) for each in templates],
        "fleets": [list(fleet) for fleet in FLEETS],
        "bits_per_s": BANDWIDTHS,
        "medians": MEDIANS,
        "templates": templates,
        "answers": answers,
    }


def _title(template: str) -> str:
    return template.split('title = "')[1].split('"', maxsplit=1)[0]


def made() -> dict[str, Any]:
    """All data of the page."""
    return {
        "one": one_prompt(),
        "many": many_prompts(),
        "trouble": trouble(),
        "yours": your_numbers(),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description="Write the data of the interactive explanation.")
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args(words).file
    file.write_text(json.dumps(made(), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
