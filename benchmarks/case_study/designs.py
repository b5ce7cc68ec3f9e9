"""The three designs of the paper's case study, as the planner sets them up."""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.two_sites import PLAN
from prfaas.core.routing.policies import PolicyName
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.problem import Problem
from prfaas.planner.solve.designs import equal_gpus, naive_heterogeneous, prfaas_pd
from prfaas.planner.solve.throughput import StageMode
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S


@dataclass(frozen=True)
class Design:
    """A design and its settings.

    Attributes:
        key: Short name.
        name: For people.
        policy: How the gateway routes.
        threshold: Offload threshold, tokens.
        num_prfaas: PrfaaS instances.
        num_prefill: PD instances that prefill.
        num_decode: PD instances that decode.
        planned: What the planner says that it sustains, with exact expectations, req/s.
        printed: What the paper says, req/s.
        is_early: Engines that prefill give first tokens; the paper's do not.
        relays: They go on until the blocks have come.
    """

    key: str
    name: str
    policy: PolicyName
    threshold: int
    num_prfaas: int
    num_prefill: int
    num_decode: int
    planned: float
    printed: float
    is_early: bool = False
    relays: bool = False


def case_study() -> tuple[Question, list[Design]]:
    """The question, and PrfaaS-PD, homogeneous and naive, in this order."""
    question = load_question(PLAN)
    problem = question.problem
    ours, same, naive = (
        design.operation
        for design in (
            prfaas_pd(problem, StageMode.EXACT),
            equal_gpus(problem, StageMode.EXACT),
            naive_heterogeneous(problem, StageMode.EXACT),
        )
    )
    far, near = problem.prfaas[0].num_instances, problem.pd.num_instances
    threshold = round(ours.offload_threshold or 0)
    return question, [
        Design(
            "ours", "PrfaaS-PD", PolicyName.PAPER, threshold,
            far, ours.num_prefill, near - ours.num_prefill, ours.rate_per_s, 3.24,
        ),
        Design(
            "homogeneous", "homogeneous PD", PolicyName.LOCAL, threshold,
            0, same.num_prefill, far + near - same.num_prefill, same.rate_per_s, 2.11,
        ),
        Design(
            "naive", "naive heterogeneous", PolicyName.REMOTE, 0,
            far, 0, near, naive.rate_per_s, 2.45,
        ),
    ]  # fmt: skip


def problem_of(design: Design, problem: Problem) -> Problem:
    """The planner's problem with the machines of a design."""
    if design.num_prfaas:
        return problem
    pd = replace(problem.pd, num_instances=design.num_prefill + design.num_decode)
    return replace(problem, prfaas=(), pd=pd)


@dataclass(frozen=True)
class Phase:
    """A time of constant load.

    Attributes:
        load: Arrivals, as a share of what the planner says.
        seconds: Length.
    """

    load: float
    seconds: float


@dataclass(frozen=True)
class Window:
    """A phase on the clock, arrivals in [start, end); its first tokens count from `warm`."""

    load: float
    start: float
    warm: float
    end: float


def windows(phases: list[Phase], warm: float) -> list[Window]:
    """The phases one after the other; in the last, `warm` seconds pass until queues have formed."""
    found, start = [], 0.0
    for index, phase in enumerate(phases):
        end, is_last = start + phase.seconds, index == len(phases) - 1
        found.append(Window(phase.load, start, start + min(warm, phase.seconds / 2) * is_last, end))
        start = end
    return found


def requests(problem: Problem, design: Design, phases: list[Phase], seed: int) -> list[Request]:
    """Poisson arrivals; lengths are the workload's quantiles in random order, phase by phase."""
    rng, start = np.random.default_rng(seed), 0.0
    found: list[Request] = []
    outputs = round(problem.workload.output_tokens)
    for phase in phases:
        count = round(phase.load * design.planned * phase.seconds)
        # Of a Poisson process with a known count, the instants are uniform.
        instants = np.sort(rng.uniform(0, phase.seconds, count)) + start
        ratios = rng.permutation((np.arange(count) + 0.5) / count)
        lengths = problem.workload.lengths.quantiles(ratios)
        for at, length in zip(instants, lengths, strict=True):
            found.append(Request(len(found), round(at * NS_PER_S), max(round(length), 1), outputs))
        start += phase.seconds
    return found
