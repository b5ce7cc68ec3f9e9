"""The case study's exhaustive search against a plain-Python triple loop of the same grid.

    python benchmarks/planner/bench_search.py

Both search every threshold at 100-token steps and every split N_p + N_d = 8 with the paper's
representative lengths, in the same run, and have to find the same optimum. Then what-if questions
are counted: each changes one input and answers with all designs in both modes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scipy.interpolate import PchipInterpolator

from prfaas.planner.answer.plan import compare, make_plan
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.problem import Problem
from prfaas.planner.solve.search import optimum, thresholds
from prfaas.planner.solve.sensitivity import inputs
from prfaas.planner.solve.throughput import StageMode
from prfaas.planner.workload import LogNormalLengths

CASE = Path(__file__).parents[2] / "examples" / "plan" / "paper-case-study.toml"
RATIO_MIN = 50.0
WHAT_IFS_PER_MINUTE_MIN = 1000.0


def plain_curve(profile: PrefillProfile) -> Callable[[float], float]:
    """T_prefill in plain Python: the same cubics, found by bisection."""
    knots = list(profile.lengths)
    cubics = PchipInterpolator(knots, list(profile.seconds)).c.T.tolist()
    first, last = profile.seconds[0], profile.seconds[-1]
    head = (profile.seconds[1] - first) / (knots[1] - knots[0])
    tail = (last - profile.seconds[-2]) / (knots[-1] - knots[-2])

    def at(tokens: float) -> float:
        if tokens <= knots[0]:
            return max(first + (tokens - knots[0]) * head, first / 100)
        if tokens >= knots[-1]:
            return last + (tokens - knots[-1]) * tail
        i = bisect_right(knots, tokens) - 1
        a, b, c, d = cubics[i]
        x = tokens - knots[i]
        return ((a * x + b) * x + c) * x + d

    return at


def plain_search(problem: Problem) -> tuple[float, float, int]:
    """Best (Λ, t, N_p), by three nested loops over t, N_p and N_d."""
    work = problem.workload.lengths
    assert isinstance(work, LogNormalLengths)
    cluster, pd = problem.prfaas[0], problem.pd
    remote_s, local_s = plain_curve(cluster.prefill), plain_curve(pd.prefill)
    token_bytes, state_bytes = problem.geometry.token_bytes, problem.geometry.state_bytes
    batch, step_s = pd.decode.largest_batch(problem.workload.mean_context, pd.tpot_max_s)
    grid = thresholds(problem).tolist()

    def normal(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    a, b = ((math.log(x) - work.mu) / work.sigma for x in (work.low, work.high))
    mass = normal(b) - normal(a)
    whole = math.exp(work.mu + work.sigma**2 / 2) / mass
    mean = whole * (normal(b - work.sigma) - normal(a - work.sigma))
    best = (0.0, 0.0, 0)
    for num_prefill in range(pd.num_instances):
        for num_decode in range(1, pd.num_instances + 1):
            if num_prefill + num_decode != pd.num_instances:
                continue
            for t in grid:
                z = (math.log(max(t, work.low)) - work.mu) / work.sigma
                p = (normal(b) - normal(z)) / mass
                below = whole * (normal(z - work.sigma) - normal(a - work.sigma))
                rate = num_decode * batch / (step_s * problem.workload.output_tokens)
                if p > 1e-12:
                    long = (mean - below) / p
                    size = token_bytes * long + state_bytes
                    network = cluster.link.bits_per_s / (8 * size)
                    compute = cluster.num_instances / remote_s(long)
                    rate = min(rate, min(compute, network) / p)
                if p < 1 - 1e-12:
                    rate = min(rate, num_prefill / local_s(below / (1 - p)) / (1 - p))
                if rate > best[0]:
                    best = (rate, t, num_prefill)
    return best


def seconds_of(action: Callable[[], object], repeats: int) -> float:
    """Median time of one call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def what_ifs(problem: Problem) -> list[Callable[[], object]]:
    """Questions that differ from the case study in one input."""
    factors = [0.5, 0.7, 0.9, 1.1, 1.3, 1.5]
    changed = [change(f) for (_, change), f in itertools.product(inputs(problem), factors)]
    return [partial(compare_modes, q) for q in changed]


def compare_modes(problem: Problem) -> list[object]:
    """Both rooms of the planner for one question."""
    return [compare(problem, mode) for mode in StageMode]


def main() -> int:
    question = load_question(CASE)
    problem = question.problem
    found, plain = optimum(problem, StageMode.PAPER), plain_search(problem)
    assert (found.offload_threshold, found.num_prefill) == plain[1:], (found, plain)
    assert math.isclose(found.rate_per_s, plain[0], rel_tol=1e-9)

    fast_s = seconds_of(lambda: optimum(problem, StageMode.PAPER), 50)
    exact_s = seconds_of(lambda: optimum(problem, StageMode.EXACT), 50)
    plain_s = seconds_of(lambda: plain_search(problem), 5)
    points = len(thresholds(problem)) * problem.pd.num_instances
    ratio = plain_s / fast_s
    questions = what_ifs(problem)
    start = time.perf_counter()
    for ask in questions:
        ask()
    per_minute = len(questions) / (time.perf_counter() - start) * 60
    plan_s = seconds_of(lambda: make_plan(question), 5)

    print(f"grid: {points} points ({len(thresholds(problem))} thresholds, {CASE.name})")
    print(f"plain-Python triple loop  {plain_s * 1e3:9.2f} ms")
    print(
        f"search, paper's mode      {fast_s * 1e3:9.2f} ms   {ratio:.0f}x (floor {RATIO_MIN:.0f}x)"
    )
    print(f"search, exact mode        {exact_s * 1e3:9.2f} ms")
    print(
        f"what-if scenarios         {per_minute:9.0f} per minute, 4 designs in 2 modes each "
        f"(floor {WHAT_IFS_PER_MINUTE_MIN:.0f})"
    )
    print(f"one whole plan            {plan_s * 1e3:9.2f} ms")
    return 0 if ratio >= RATIO_MIN and per_minute >= WHAT_IFS_PER_MINUTE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
