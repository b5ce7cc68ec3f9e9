"""The Chrome trace against the rules of the trace event format, and against the run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.core.request.events import Outcome
from prfaas.errors import ConfigError
from prfaas.sim.report.chrome_trace import trace_events
from prfaas.sim.results.summary import digest
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from tests.sim.systems import EXAMPLES

Event = dict[str, Any]
FAILURES = (
    'failure=[{kind="link", at="60s", duration="30s"},'
    ' {kind="decode", at="100s", duration="30s", index=0},'
    ' {kind="prfaas", at="140s", duration="20s", index=1}]'
)
SETTINGS = ["workload.duration=4min", "workload.warmup=0s", "routing.policy=adaptive", FAILURES]
NEEDED = {
    "X": {"ts", "dur", "pid", "tid", "name"},
    "b": {"ts", "pid", "tid", "id", "cat", "name"},
    "e": {"ts", "pid", "tid", "id", "cat", "name"},
    "s": {"ts", "pid", "tid", "id", "cat", "name"},
    "t": {"ts", "pid", "tid", "id", "cat", "name"},
    "f": {"ts", "pid", "tid", "id", "cat", "name", "bp"},
    "C": {"ts", "pid", "name", "args"},
    "M": {"pid", "tid", "name", "args"},
}


def recorded(num_recorded: int = 10_000) -> ScenarioRun:
    scenario = load_scenario(EXAMPLES / "link-cut.toml", SETTINGS)
    return run(scenario, num_recorded=num_recorded)


@pytest.fixture(scope="module")
def found() -> ScenarioRun:
    return recorded()


@pytest.fixture(scope="module")
def events(found: ScenarioRun) -> list[Event]:
    made = [json.loads(json.dumps(event)) for event in trace_events(found)]
    assert isinstance(made, list)
    return made


def of(events: Iterable[Event], phases: str) -> list[Event]:
    return [event for event in events if event["ph"] in phases]


def test_recording_changes_nothing(found: ScenarioRun) -> None:
    plain = run(load_scenario(EXAMPLES / "link-cut.toml", SETTINGS))
    assert digest(found.simulation) == digest(plain.simulation)


def test_every_event_has_what_its_phase_needs(events: list[Event]) -> None:
    assert {event["ph"] for event in events} == set(NEEDED)
    for event in events:
        assert NEEDED[event["ph"]] <= event.keys(), event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    for event in of(events, "C"):
        assert all(isinstance(value, int | float) for value in event["args"].values())


def test_processes_and_threads_are_named(events: list[Event]) -> None:
    named = {(e["pid"], e["tid"]) for e in of(events, "M") if e["name"] == "thread_name"}
    processes = {e["pid"] for e in of(events, "M") if e["name"] == "process_name"}
    for event in of(events, "XbestfC"):
        assert (event["pid"], event["tid"]) in named
        assert event["pid"] in processes


def test_slices_of_a_thread_nest(events: list[Event]) -> None:
    by_thread = defaultdict(list)
    for event in of(events, "X"):
        by_thread[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for slices in by_thread.values():
        open_until: list[float] = []
        for start, minus in sorted(slices):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or start - minus <= open_until[-1] + 1e-3
            open_until.append(start - minus)


def test_asynchronous_events_pair_and_nest(events: list[Event]) -> None:
    stacks: dict[int, list[str]] = defaultdict(list)
    last: dict[int, float] = defaultdict(float)
    for event in of(events, "be"):
        stack = stacks[event["id"]]
        assert event["ts"] >= last[event["id"]] - 1e-3
        last[event["id"]] = event["ts"]
        if event["ph"] == "b":
            stack.append(event["name"])
        else:
            assert stack.pop() == event["name"]
    assert not any(stacks.values())


def test_arrows_begin_inside_a_slice_and_end_once(events: list[Event]) -> None:
    slices = defaultdict(set)
    for event in of(events, "X"):
        slices[event["pid"], event["tid"]].add(event["ts"])
    steps = defaultdict(list)
    for event in of(events, "stf"):
        assert event["ts"] in slices[event["pid"], event["tid"]]
        steps[event["id"]].append((event["ts"], event["ph"]))
    for row in steps.values():
        phases = sorted(phase for _, phase in row)
        assert phases in (["f", "s"], ["f", "s", "t"])
        assert min(row, key=lambda step: (step[0], step[1] != "s"))[1] == "s"


def test_the_trace_tells_what_happened(found: ScenarioRun, events: list[Event]) -> None:
    whole = found.simulation.requests
    requests = [request for request in whole if request.outcome is not Outcome.REJECTED]
    begun = [e for e in of(events, "b") if e["name"].startswith("request ")]
    assert len(begun) == len(whole)
    refused = [e for e in begun if e["name"].endswith(", refused")]
    assert len(refused) == len(whole) - len(requests) > 0
    decoded = [e for e in of(events, "X") if e["cat"] == "stage" and "lost" not in e["name"]]
    by_request = defaultdict(list)
    for event in decoded:
        by_request[event["name"]].append(event)
    for request in requests:
        ends = [e["ts"] + e["dur"] for e in by_request[f"request {request.index}"]]
        assert max(ends) == pytest.approx(request.finished_at_ns / 1e3, abs=1e-3)
    lost = {e["name"] for e in of(events, "X") if e["name"].endswith("(lost)")}
    assert lost
    assert len(found.simulation.reactions.touched) >= len(lost)
    failures = [e["name"] for e in of(events, "X") if e["cat"] == "failure"]
    assert failures[0] == "link cut, 60 to 90 s"
    assert len(failures) == 3


def test_only_the_first_requests_are_recorded() -> None:
    events = list(trace_events(recorded(num_recorded=5)))
    begun = [e["id"] for e in of(events, "b") if e["name"].startswith("request ")]
    assert begun == [0, 1, 2, 3, 4]


def test_the_file_is_json_and_one_policy_is_enough(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    command = ["simulate", str(EXAMPLES / "link-cut.toml"), *options, "--chrome-trace", str(out)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    trace = json.loads(out.read_text(encoding="utf-8"))
    assert trace["otherData"]["scenario"].startswith("Paper's case study")
    assert len(trace["traceEvents"]) > 1000
    result = CliRunner().invoke(cli, [*command, "--policy", "paper", "--policy", "local"])
    assert isinstance(result.exception, ConfigError)
    assert "2 policies were asked for" in str(result.exception)
