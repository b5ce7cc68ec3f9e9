"""One cell of the table: a random plan at one load, planned and simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from benchmarks.agreement.carried import carried
from benchmarks.agreement.random_plans import random_plan
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.sizing.obstacles import noted_variation
from prfaas.planner.solve.search import OperatingPoint, optimum
from prfaas.planner.solve.throughput import StageMode
from prfaas.sim.sizing import trial_of, try_out

SEED = 14
LOADS = (0.95, 1.05, 1.3)
"""Arrival rates, as shares of Λ_max."""
NUM_REQUESTS = 16_000


@dataclass(frozen=True)
class Cell:
    """A plan at a load.

    Attributes:
        number: Which random plan.
        load: Arrival rate as a share of Λ_max.
        seed: Of arrivals and lengths.
        simulated_per_s: The simulator's rate of first tokens.
        arrived_ratio: Simulated arrivals as a share of the rate that was asked for.
        refused_ratio: Share of the simulated arrivals that got no answer.
    """

    number: int
    load: float
    seed: int
    simulated_per_s: float
    arrived_ratio: float
    refused_ratio: float

    @property
    def planned_per_s(self) -> float:
        """The planner's rate of first tokens."""
        question, found = planned(self.number)
        return carried(question.problem, found, self.load * found.rate_per_s)

    @property
    def ratio(self) -> float:
        """The simulated rate as a share of the planned one."""
        return self.simulated_per_s / self.planned_per_s


@dataclass(frozen=True)
class Task:
    """A cell to measure, in so many requests."""

    number: int
    load: float
    seed: int = 1
    num_requests: int = NUM_REQUESTS


def measure(task: Task) -> Cell:
    """Plan and simulate."""
    question, found = planned(task.number)
    rate = task.load * found.rate_per_s
    trial = trial_of(question.problem, found, rate, task.num_requests, task.seed)
    figures = try_out(replace(trial, to_the_end=False))
    return Cell(
        number=task.number,
        load=task.load,
        seed=task.seed,
        simulated_per_s=figures.carried_per_s,
        arrived_ratio=figures.arrived_per_s / rate,
        refused_ratio=figures.num_unserved / figures.num_arrived,
    )


@cache
def planned(number: int) -> tuple[Question, OperatingPoint]:
    """A random plan and its best settings."""
    _, question = random_plan(SEED, number)
    return question, optimum(question.problem, StageMode.EXACT)


def wander_of(number: int) -> float:
    """Two standard errors of the load of a plan's stage near its limit; 0 where none is noted."""
    question, found = planned(number)
    return noted_variation(question.problem, found)
