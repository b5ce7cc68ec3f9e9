"""Changes of a question that no fleet answers, after which one does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prfaas.planner import formatting as w
from prfaas.planner.problem import Problem
from prfaas.planner.sizing.fleet import INSTANCES_MAX, size

_FASTER = (2, 10, 100)
_LOOSER = (2, 4, 10)


def cure_of_demand(
    problem: Problem, demand_per_s: float, instances_max: int = INSTANCES_MAX
) -> str:
    """Return the changes that would carry a demand that no fleet carries, as a clause.

    One change at a time: faster links, a looser target, a threshold or split that is searched;
    the least of each that helps.

    Args:
        instances_max: Largest number of instances of a cluster that is tried.
    """
    ways = [
        words
        for words in (
            _first(_faster_links(problem), demand_per_s, instances_max),
            _first(_looser_targets(problem), demand_per_s, instances_max),
            _first(_searched(problem), demand_per_s, instances_max),
        )
        if words
    ]
    if ways:
        return f"it would take {', or '.join(ways)}"
    return "split the demand over several deployments"


def _first(changes: Iterator[tuple[str, Problem]], demand_per_s: float, instances_max: int) -> str:
    for words, changed in changes:
        if size(changed, demand_per_s, instances_max).cheapest is not None:
            return words
    return ""


def _faster_links(problem: Problem) -> Iterator[tuple[str, Problem]]:
    if not any(cluster.num_instances for cluster in problem.prfaas):
        return
    for factor in _FASTER:
        clusters = tuple(
            replace(c, link=replace(c.link, bits_per_s=c.link.bits_per_s * factor))
            for c in problem.prfaas
        )
        total = sum(c.link.bits_per_s for c in clusters)
        yield f"links of {w.bandwidth(total)} in all", replace(problem, prfaas=clusters)


def _looser_targets(problem: Problem) -> Iterator[tuple[str, Problem]]:
    if problem.ttft_p90_s is None:
        return
    for factor in _LOOSER:
        target = problem.ttft_p90_s * factor
        yield f"a TTFT P90 of {w.seconds(target)}", replace(problem, ttft_p90_s=target)


def _searched(problem: Problem) -> Iterator[tuple[str, Problem]]:
    if problem.threshold is not None:
        step = max(problem.step_tokens, round(problem.workload.lengths.high / 200))
        free = replace(problem, threshold=None, step_tokens=step)
        yield "a threshold of the planner's choice (leave search.threshold out)", free
