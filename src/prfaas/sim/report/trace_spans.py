"""Times of the attempts of a run, as spans on tracks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prfaas.core.routing.decision import Path
from prfaas.core.routing.predictions import Costs
from prfaas.sim.results.recorded_run import Attempt
from prfaas.sim.system.request import UNSET

PD_PREFILL, PRFAAS_PREFILL, LINK, DECODE = "PD prefill", "PrfaaS prefill", "link", "decode"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on a track.

    Attributes:
        process: Stage, or instance that does many things at once.
        thread: Instance; None takes a free slot of the process.
        parts: Names and ends of what it consists of.
    """

    process: str
    thread: str | None
    start_ns: int
    end_ns: int
    name: str
    attempt: Attempt
    parts: list[tuple[str, int]] = field(default_factory=list)


def _chunks(costs: Costs, attempt: Attempt) -> list[tuple[int, int]]:
    new = attempt.num_new_tokens
    return costs.chunks(new, attempt.request.num_prompt_tokens - new)


def spans_of(attempt: Attempt, costs: Costs, until_ns: int) -> list[Span]:
    """Prefill, transfer and decode of an attempt, as far as it came.

    Args:
        until_ns: End of the run, for what had not ended.
    """
    start, routed = attempt.started_at_ns, attempt.routed
    if start == UNSET:
        return []
    end = until_ns if attempt.ended_at_ns == UNSET else attempt.ended_at_ns
    remote = routed.decision.path is Path.REMOTE
    computed = end if attempt.prefilled_at_ns == UNSET else attempt.prefilled_at_ns
    chunks = [
        (f"to {tokens:,}", start + at_ns)
        for tokens, at_ns in (_chunks(costs, attempt) if remote else [])
        if start + at_ns <= computed
    ]
    name = f"request {attempt.request.index}" + (" (lost)" if attempt.lost else "")
    stage = PRFAAS_PREFILL if remote else PD_PREFILL
    found = [Span(stage, routed.prefill, start, computed, name, attempt, chunks)]
    if remote:
        landed = end if attempt.landed_at_ns == UNSET else attempt.landed_at_ns
        found.append(Span(LINK, None, start, landed, name, attempt))
    if attempt.admitted_at_ns != UNSET:
        process = f"{DECODE} {attempt.decode}"
        found.append(Span(process, None, attempt.admitted_at_ns, end, name, attempt))
    return found


def phases_of(attempt: Attempt, until_ns: int) -> Iterator[tuple[str, int, int]]:
    """Stages of a request in an attempt, in order: name, begin, end."""
    instants = (
        ("queue", attempt.started_at_ns),
        ("prefill", attempt.prefilled_at_ns),
        ("transfer", attempt.landed_at_ns),
        ("decode admission", attempt.admitted_at_ns),
        ("decode", attempt.ended_at_ns),
    )
    begin = attempt.routed_at_ns
    end = until_ns if attempt.ended_at_ns == UNSET else attempt.ended_at_ns
    for name, at_ns in instants:
        if at_ns == UNSET:
            yield name, begin, end
            return
        if at_ns > begin:
            yield name, begin, at_ns
        begin = at_ns


def slots(spans: Iterable[Span]) -> Iterator[tuple[Span, str]]:
    """Each span with its thread: slots of a process are filled from the lowest."""
    busy: dict[str, list[tuple[int, int]]] = {}
    free: dict[str, list[int]] = {}
    for span in sorted(spans, key=lambda s: s.start_ns):
        if span.thread is not None:
            yield span, span.thread
            continue
        ending, idle = busy.setdefault(span.process, []), free.setdefault(span.process, [])
        while ending and ending[0][0] <= span.start_ns:
            heapq.heappush(idle, heapq.heappop(ending)[1])
        index = heapq.heappop(idle) if idle else len(ending)
        heapq.heappush(ending, (span.end_ns, index))
        yield span, f"slot {index:03}"
