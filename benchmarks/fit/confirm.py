"""Capacity of a design in the simulator, to confirm points of the map.

A design runs with the planner's threshold and split and the static policy, without admission. Its
capacity is the highest load at which both classes of requests, long and short, get first tokens as
fast as they come: by bisection between half and 1.5 times the rate that the planner gives it. Under
overload the two classes differ, so throughput there would say little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path as File

from prfaas.core.transfer.tcp_goodput import TcpEnds, TcpPath
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.fit_map.point import PathPlans, Point
from prfaas.planner.problem import Problem
from prfaas.planner.solve import designs
from prfaas.planner.solve.designs import LEAST_INSTANCES, Design, gain_at_equal_cost
from prfaas.planner.solve.throughput import StageMode
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_file import ScenarioFile
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.sim.scenario.setup_builder import make_setup
from prfaas.sim.system.request import Request
from prfaas.sim.workloads.make import make_workload
from prfaas.units import NS_PER_S

REQUESTS, WARM_UP = 6_000, 0.2
SEED = 23
LOW, HIGH, TOLERANCE = 0.5, 1.5, 0.02
SUSTAINED = 0.97
"""First tokens of a class over its arrivals, at least, in the measured window."""


@dataclass(frozen=True)
class Confirmed:
    """A point of the map, and its gain in the simulator."""

    point: Point
    planned_per_s: float
    simulated_per_s: float
    gain: float

    @property
    def agrees(self) -> bool:
        """Both gains have one sign."""
        return (self.point.gain > 0) == (self.gain > 0)


def confirm(problem: Problem, path: TcpPath, transport: TcpEnds) -> Confirmed:
    """Simulate PrfaaS-PD and the homogeneous fleet for the same money at a point."""
    plans = PathPlans(problem, transport)
    point = plans.point(path)
    on_path = plans.on(path)
    ours = designs.prfaas_pd(on_path, StageMode.EXACT)
    rate = simulated_rate(on_path, ours, on_path.prfaas[0].transfer_bits_per_s)
    other = designs.equal_cost(on_path, StageMode.EXACT, ours.price_per_h)
    gain = gain_at_equal_cost(_at(ours, rate), _at(other, _fraction(problem, ours.price_per_h)))
    return Confirmed(point, ours.operation.rate_per_s, rate, gain)


def _at(design: Design, rate_per_s: float) -> Design:
    """A design at a simulated rate; its price stays, its traffic was counted at the planned one."""
    share = rate_per_s / design.operation.rate_per_s
    operation = replace(design.operation, rate_per_s=rate_per_s)
    return replace(
        design, operation=operation, prompt_tokens_per_s=design.prompt_tokens_per_s * share
    )


def _fraction(problem: Problem, budget_per_h: float) -> float:
    """Simulated rate of the homogeneous fleet for a budget, interpolated as the planner does."""
    count = max(budget_per_h / problem.pd.price_per_instance_h, float(LEAST_INSTANCES))
    whole = int(count + 1e-9)
    low, high = homogeneous_rate(problem, whole), homogeneous_rate(problem, whole + 1)
    return low + (count - whole) * (high - low)


@cache
def homogeneous_rate(problem: Problem, num_instances: int) -> float:
    """Simulated rate of a homogeneous fleet, req/s."""
    found = designs.homogeneous(problem, StageMode.EXACT, num_instances, "homogeneous")
    pd = replace(problem.pd, num_instances=num_instances)
    return simulated_rate(replace(problem, prfaas=(), pd=pd), found, float("inf"))


def simulated_rate(problem: Problem, design: Design, flow_bits_per_s: float) -> float:
    """Capacity of a design in the simulator, req/s."""
    low, high = LOW, HIGH
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        offered = middle * design.operation.rate_per_s
        holds = sustains(problem, design, offered, flow_bits_per_s)
        low, high = (middle, high) if holds else (low, middle)
    return low * design.operation.rate_per_s


def sustains(problem: Problem, design: Design, rate_per_s: float, flow_bits_per_s: float) -> bool:
    """Return True if both classes get first tokens as fast as they come."""
    found = design.operation
    duration_s = REQUESTS / rate_per_s
    threshold = problem.workload.lengths.high
    if found.offload_threshold is not None:
        threshold = found.offload_threshold
    scenario = _scenario(problem, design, rate_per_s, duration_s, round(threshold))
    setup = scenario.setup
    clusters = tuple(
        replace(c, link=replace(c.link, flow_bits_per_s=flow_bits_per_s)) for c in setup.prfaas
    )
    scenario = replace(scenario, setup=replace(setup, prfaas=clusters))
    window = range(scenario.start_ns, scenario.end_ns or 0)
    requests = run(scenario, stop_at_ns=scenario.end_ns).simulation.requests
    return all(
        _served(
            [r for r in requests if (r.num_prompt_tokens > threshold) is long],
            window,
        )
        for long in (False, True)
    )


def _served(requests: list[Request], window: range) -> bool:
    come = sum(r.arrived_at_ns in window for r in requests)
    return sum(r.first_token_at_ns in window for r in requests) >= SUSTAINED * come


def _scenario(
    problem: Problem, design: Design, rate_per_s: float, duration_s: float, threshold: int
) -> Scenario:
    file = ScenarioFile.model_validate(
        {
            "title": problem.title,
            "plan": "",
            "seed": SEED,
            "workload": {"rate": rate_per_s, "duration": f"{duration_s:.6f}s"},
            "routing": {
                "policy": "paper" if problem.prfaas else "local",
                "threshold": threshold,
                "prefill_instances": design.operation.num_prefill,
                "admission": False,
            },
        }
    )
    question = Question(problem, None, problem.chunk_tokens)
    workload = make_workload(file.workload, File(), problem.workload, file.cache.block_tokens)
    setup, _ = make_setup(file, question, workload.num_prompt_tokens_max)
    start_ns, end_ns = (round(s * NS_PER_S) for s in (WARM_UP * duration_s, duration_s))
    return Scenario(file.title, setup, workload, SEED, start_ns, end_ns)
