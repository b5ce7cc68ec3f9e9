"""A run in the trace event format, for Perfetto and chrome://tracing.

One process a stage, in it one thread an instance; the link and every decode instance have as many
threads as they needed slots at once. An arrow follows each request from stage to stage, and the
process `requests` has a track for each. Counters show queues, link and threshold.

References:
    "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from prfaas.sim.engine.failures import in_words
from prfaas.sim.engine.time_series import SeriesSample
from prfaas.sim.report.trace_spans import (
    LINK,
    PD_PREFILL,
    PRFAAS_PREFILL,
    Span,
    phases_of,
    slots,
    spans_of,
)
from prfaas.sim.results.recorded_run import Attempt, RecordedSimulation
from prfaas.sim.scenario.run import ScenarioRun
from prfaas.sim.system.request import UNSET, Request
from prfaas.sim.system.setup import Failure

Event = dict[str, Any]

_FAILURES, _COUNTERS, _REQUESTS = "failures", "queues and link", "requests"
_NS_PER_US = 1e3


def write_chrome_trace(run: ScenarioRun, path: Path, origin: Mapping[str, str]) -> None:
    """Write the trace of a run.

    Args:
        run: Made with `num_recorded`; it has ended.
        origin: Command and version, for the file's description of itself.

    Raises:
        OSError: The file cannot be written.
    """
    about = {**origin, "scenario": run.scenario.title, "digest": run.results.digest}
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n')
        for index, event in enumerate(trace_events(run)):
            file.write((",\n" if index else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def trace_events(run: ScenarioRun) -> Iterator[Event]:
    """Events of the recorded requests, and of the whole run's counters and failures."""
    sim = run.simulation
    attempts = sim.attempts if isinstance(sim, RecordedSimulation) else []
    until_ns, tracks = sim.clock.now_ns, _Tracks()
    for failure in sim.setup.failures:
        yield _failure(failure, tracks)
    for sample in sim.series.samples:
        yield from _counters(sample, tracks)
    yield from _request_events(attempts, tracks, until_ns)
    if isinstance(sim, RecordedSimulation):
        yield from _refused_events(sim.refused, tracks)
    costs_of = {cluster.name: cluster.costs for cluster in sim.setup.prfaas}
    stages = [
        spans_of(attempt, costs_of.get(attempt.routed.cluster, sim.setup.costs), until_ns)
        for attempt in attempts
    ]
    step = {id(span): (i, len(row)) for row in stages for i, span in enumerate(row)}
    for span, thread in slots(span for row in stages for span in row):
        at = tracks.place(span.process, thread)
        yield from _span_events(span, at, *step[id(span)])
    yield from tracks.names()


class _Tracks:
    """Numbers of processes and threads by their names."""

    def __init__(self) -> None:
        order = (_FAILURES, _COUNTERS, _REQUESTS, PD_PREFILL, PRFAAS_PREFILL, LINK)
        self._pids = {name: pid for pid, name in enumerate(order, 1)}
        self._tids: dict[tuple[int, str], int] = {}

    def place(self, process: str, thread: str) -> dict[str, int]:
        """Process and thread, as events name them."""
        pid = self._pids.setdefault(process, len(self._pids) + 1)
        return {"pid": pid, "tid": self._tids.setdefault((pid, thread), len(self._tids) + 1)}

    def names(self) -> Iterator[Event]:
        """Metadata that names and orders them."""
        for name, pid in self._pids.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            order = {"sort_index": pid}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": order}
        for (pid, name), tid in self._tids.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _span_events(span: Span, at: Mapping[str, int], step: int, num_steps: int) -> Iterator[Event]:
    attempt = span.attempt
    yield {
        "ph": "X",
        "cat": "stage",
        "name": span.name,
        "ts": span.start_ns / _NS_PER_US,
        "dur": (span.end_ns - span.start_ns) / _NS_PER_US,
        **at,
        "args": _about(attempt),
    }
    begin_ns = span.start_ns
    for name, end_ns in span.parts:
        chunk = {"ts": begin_ns / _NS_PER_US, "dur": (end_ns - begin_ns) / _NS_PER_US}
        yield {"ph": "X", "cat": "chunk", "name": name, **chunk, **at}
        begin_ns = end_ns
    if num_steps > 1:
        phase = "s" if step == 0 else "f" if step == num_steps - 1 else "t"
        yield {
            "ph": phase,
            "cat": "way",
            "name": "way",
            "id": f"{attempt.request.index}.{attempt.number}",
            "ts": span.start_ns / _NS_PER_US,
            **at,
            **({"bp": "e"} if phase == "f" else {}),
        }


def _request_events(attempts: Sequence[Attempt], tracks: _Tracks, until_ns: int) -> Iterator[Event]:
    """One track for each request, from its arrival to its end, over all its attempts."""
    at = tracks.place(_REQUESTS, "all")
    ordered = sorted(attempts, key=lambda a: (a.request.index, a.number))
    for index, group in groupby(ordered, key=lambda a: a.request.index):
        row = list(group)
        request = row[0].request
        common = {"cat": "request", "id": index, **at}
        end_ns = until_ns if request.finished_at_ns == UNSET else request.finished_at_ns
        about = {"prompt": request.num_prompt_tokens, "output": request.num_output_tokens}
        yield _async("b", f"request {index}", request.arrived_at_ns, common, about)
        for attempt in row:
            for name, start, end in phases_of(attempt, until_ns):
                yield _async("b", name, start, common, _about(attempt))
                yield _async("e", name, end, common)
        yield _async("e", f"request {index}", end_ns, common)


def _refused_events(refused: Iterable[Request], tracks: _Tracks) -> Iterator[Event]:
    """Requests that got a 429: an instant beside the others."""
    at = tracks.place(_REQUESTS, "all")
    for request in refused:
        common = {"cat": "request", "id": request.index, **at}
        name, about = f"request {request.index}, refused", {"prompt": request.num_prompt_tokens}
        yield _async("b", name, request.arrived_at_ns, common, about)
        yield _async("e", name, request.arrived_at_ns, common)


def _async(
    phase: str,
    name: str,
    at_ns: int,
    common: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> Event:
    event = {"ph": phase, "name": name, "ts": at_ns / _NS_PER_US, **common}
    return event if about is None else {**event, "args": dict(about)}


def _about(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "reason": attempt.routed.decision.reason.value,
        "new_tokens": attempt.num_new_tokens,
        "lost": attempt.lost,
    }


def _counters(sample: SeriesSample, tracks: _Tracks) -> Iterator[Event]:
    values = {
        "work before prefill, s": {
            "PD-P": sample.local_wait_ns / 1e9,
            "PrfaaS": sample.remote_wait_ns / 1e9,
        },
        "link backlog, MB": {"backlog": sample.link_backlog_bytes / 1e6},
        "transfers": {"open": sample.num_flows},
        "decode, requests": {
            "running": sample.num_decode_running,
            "waiting": sample.num_decode_waiting,
        },
        "threshold, tokens": {"t": sample.offload_threshold},
    }
    at = tracks.place(_COUNTERS, "all")
    for name, series in values.items():
        yield {"ph": "C", "name": name, "ts": sample.at_ns / _NS_PER_US, **at, "args": series}


def _failure(failure: Failure, tracks: _Tracks) -> Event:
    return {
        "ph": "X",
        "cat": "failure",
        "name": in_words(failure),
        "ts": failure.at_ns / _NS_PER_US,
        "dur": failure.for_ns / _NS_PER_US,
        **tracks.place(_FAILURES, f"{failure.kind} {failure.index}"),
    }
