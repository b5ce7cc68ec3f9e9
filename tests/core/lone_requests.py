"""Requests to a dispatcher of one PD and one PrfaaS instance, and their first tokens."""

from __future__ import annotations

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
    Routed,
)
from prfaas.core.routing.policies import PolicyName


def two_instances(threshold: int) -> Dispatcher:
    """One engine in each cluster, without a plan."""
    made = Dispatcher(
        LocalCluster("pd", (ClusterMember("p0", "pd"),)),
        [RemoteCluster("far", (ClusterMember("r0", "far"),))],
        DispatchSettings(PolicyName.OBSERVED, threshold),
    )
    made.set_link("far", "pd", up=True)
    for name in ("p0", "r0"):
        made.describe(name, num_tokens_max=10**6, layout_id=b"")
        made.set_ready(name, ready=True, now_ns=0)
    return made


def arrive(made: Dispatcher, number: int, num_tokens: int, now_ns: int) -> Routed:
    for name in ("p0", "r0"):
        waiting = max(made.load(name).num_jobs(name) - 1, 0)
        made.report_load(name, now_ns, waiting)
    found = made.arrive(Arrival(number, num_tokens, 0, {}), now_ns)
    assert isinstance(found, Routed)
    return found


def serve(made: Dispatcher, number: int, num_tokens: int, now_ns: int, ttft_ns: int) -> Routed:
    """A request from its arrival to its end, alone."""
    found = arrive(made, number, num_tokens, now_ns)
    made.requests.prefilled(number, now_ns + ttft_ns)
    made.requests.prompt_ready(number, now_ns + ttft_ns)
    made.requests.begun(number, now_ns + ttft_ns, is_streamed=True)
    made.requests.end(number, now_ns + ttft_ns)
    return found
