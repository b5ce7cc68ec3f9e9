"""Events of runs as JSON lines: one for each run, fault and request, about 40 bytes each.

    {"kind": "prfaas-events", "title": ..., "request": [names of the fields of a request]}
    {"run": "paper", "threshold": 19400, "prefill": 3, "decode": 5, "slots": 100, "prfaas": 4}
    ["link", 60000, 60000, 0, 0.0]
    [61203, 30210, 0, "R", 0, 0, 1744, 58, 0, 25600]

A fault has its kind, its start and duration, ms, its index, and the share of the capacity of a link
that is left. A request has the fields of `FIELDS`; runs have the same requests in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from prfaas.core.request.events import Outcome
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.scenario.run import ScenarioRun
from prfaas.sim.system.request import UNSET, Request
from prfaas.sim.system.setup import Setup
from prfaas.units import NS_PER_MS

KIND = "prfaas-events"
FIELDS = (
    "arrived_ms",
    "prompt_tokens",
    "cached_tokens",
    "path",
    "lost_ms",
    "queue_ms",
    "prefill_ms",
    "transfer_ms",
    "admission_ms",
    "decode_ms",
)
"""Fields of a request: its arrival, its tokens, its path, and the parts of its time, which follow
each other. Path: R read remotely, L locally, F begun remotely and read locally after all; of a
request that did not finish it is followed by the outcome, such as "Lrejected", and parts that did
not begin or end are null."""


def events_of(title: str, runs: Mapping[str, ScenarioRun]) -> Iterator[str]:
    """Lines of the runs of one scenario, each ended by a line feed.

    Args:
        runs: By policy.
    """
    yield _line({"kind": KIND, "title": title, "request": FIELDS})
    for name, run in runs.items():
        yield _line({"run": name, **system_of(run.scenario.setup)})
        for failure in run.scenario.setup.failures:
            at_ms, for_ms = failure.at_ns // NS_PER_MS, failure.for_ns // NS_PER_MS
            yield _line([failure.kind.value, at_ms, for_ms, failure.index, failure.capacity_ratio])
        for request in run.simulation.requests:
            yield _line(request_row(run.simulation, request))


def system_of(setup: Setup) -> dict[str, int]:
    """Threshold, tokens, and instances of a run; `slots` are the requests that decode at once."""
    return {
        "threshold": setup.routing.offload_threshold,
        "prefill": setup.num_prefill,
        "decode": setup.num_decode,
        "slots": setup.num_decode * setup.decode.batch_max,
        "prfaas": sum(cluster.num_instances for cluster in setup.prfaas),
    }


def request_row(simulation: Simulation, request: Request) -> list[Any]:
    """Values of `FIELDS`."""
    path = "L"
    if request.offloaded:
        path = "F" if request.index in simulation.reactions.touched else "R"
    if request.outcome is not Outcome.FINISHED:
        path += request.outcome.value
    instants = (
        request.routed_at_ns,
        request.prefill_started_at_ns,
        request.prefilled_at_ns,
        request.landed_at_ns,
        request.first_token_at_ns,
        request.finished_at_ns,
    )
    last_ms: int | None = request.arrived_at_ns // NS_PER_MS
    row: list[Any] = [last_ms, request.num_prompt_tokens, request.num_hit_tokens, path]
    for instant in instants:
        if instant == UNSET or last_ms is None:
            row.append(None)
            last_ms = None
            continue
        # Of a request whose decode broke, the last prefill is later than its first token.
        at_ms = max(instant // NS_PER_MS, last_ms)
        row.append(at_ms - last_ms)
        last_ms = at_ms
    return row


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
