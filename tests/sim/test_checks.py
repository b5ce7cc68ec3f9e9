"""Every checker can fail: a run is broken on purpose, and the checker says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.request.events import Outcome
from prfaas.core.routing.decision import Reason
from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.dispatch_driver import News
from prfaas.sim.engine.signals import Telemetry
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.resources.transport import Transport
from prfaas.sim.results.invariants import BrokenInvariantError, check
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import Failure, FailureKind, SignalSetup
from prfaas.units import NS_PER_S
from tests.sim.reachable import simulator_types_held_by
from tests.sim.systems import linear_costs, requests_at, system

PROMPT = SignalSetup()
LINK = FailureKind.LINK


def done(*failures: Failure, policy: PolicyName = PolicyName.REMOTE) -> Simulation:
    setup = replace(system(policy=policy, signals=PROMPT), failures=failures)
    simulation = Simulation(setup, requests_at([0, 40 * NS_PER_S], [3000] * 2, output=3))
    simulation.run()
    return simulation


def lose_a_request(sim: Simulation) -> None:
    sim.requests[0].outcome = Outcome.RUNNING


def invent_a_hit(sim: Simulation) -> None:
    sim.requests[0].num_hit_tokens += 1


def lose_bytes(sim: Simulation) -> None:
    sim.links[0].landed_bytes -= 1


def send_twice(sim: Simulation) -> None:
    sim.links[0]._served_bytes *= 2


def exceed_the_link(sim: Simulation) -> None:
    sim.links[0].window_bytes[0] = 1e12


def exceed_the_batch(sim: Simulation) -> None:
    next(iter(sim.decoders.values())).num_running_most = 10**9


def land_before_prefill(sim: Simulation) -> None:
    sim.requests[1].landed_at_ns = 0


def forget_an_instant(sim: Simulation) -> None:
    sim.requests[1].prefill_started_at_ns = -1


def keep_kv_blocks(sim: Simulation) -> None:
    next(iter(sim.decoders.values())).kv_used_bytes += 1


def keep_a_transfer_open(sim: Simulation) -> None:
    sim.links[0].open(sim.requests[0], 5)


def keep_a_promise(sim: Simulation) -> None:
    next(iter(sim.front.dispatcher.links)).book.promise(7, 0)


def keep_a_request_at_the_gateway(sim: Simulation) -> None:
    sim.front.route(sim.requests[0], sim.clock.now_ns)


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        (lose_a_request, "2 requests came and 1 ended"),
        (invent_a_hit, "do not add up to its prompt"),
        (lose_bytes, "are accounted for"),
        (send_twice, "a link sent"),
        (exceed_the_link, "in second 0"),
        (exceed_the_batch, "ran 1000000000 of"),
        (land_before_prefill, "request 1: its instants do not follow"),
        (forget_an_instant, "request 1: its instants do not follow"),
        (keep_kv_blocks, "1 KV bytes held by decode"),
        (keep_a_transfer_open, "1 open transfers"),
        (keep_a_promise, "7 bytes promised"),
        (keep_a_request_at_the_gateway, "1 requests open at the gateway"),
    ],
)
def test_a_broken_run_is_noticed(mutation: Callable[[Simulation], None], message: str) -> None:
    simulation = done()
    check(simulation)
    mutation(simulation)
    with pytest.raises(BrokenInvariantError, match=message):
        check(simulation)


CUTS = [
    Failure(kind, at_ns=NS_PER_S, for_ns=20 * NS_PER_S)
    for kind in (FailureKind.LINK, FailureKind.POOL)
]


@pytest.mark.parametrize("policy", PolicyName)
def test_the_dispatcher_holds_no_reference_into_the_simulation(policy: PolicyName) -> None:
    simulation = done(*CUTS, policy=policy)
    dispatcher = simulation.front.dispatcher
    assert simulator_types_held_by(dispatcher) == set()
    setattr(dispatcher, "peek", lambda: simulation.requests[0].num_output_tokens)  # noqa: B010
    assert {"Request", "Simulation"} <= simulator_types_held_by(dispatcher)


def deliver_at_once(telemetry: Telemetry, _argument: None) -> None:
    if telemetry._sim.busy:
        telemetry._deliver(telemetry._look())
        telemetry._sim.clock.after(NS_PER_S, telemetry._observe)


def test_reports_that_arrive_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check(done())
    monkeypatch.setattr(Telemetry, "_observe", deliver_at_once)
    simulation = done()
    with pytest.raises(BrokenInvariantError, match=r"heard of a report .* after 0 ns"):
        check(simulation)


@pytest.mark.parametrize(
    ("name", "news"), [("dead_after_ns", News.LINK_DEAD), ("_told_after_ns", News.LINK_ALIVE)]
)
def test_a_link_whose_state_is_known_too_early_is_noticed(
    name: str, news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Failure(LINK, at_ns=NS_PER_S, for_ns=20 * NS_PER_S)
    check(done(cut))
    init = Transport.__init__

    def hasty(self: Transport, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        if name == "_told_after_ns":
            self._told_after_ns = 0
        else:
            self.setup = replace(self.setup, dead_after_ns=0)

    monkeypatch.setattr(Transport, "__init__", hasty)
    simulation = done(cut)
    with pytest.raises(BrokenInvariantError, match=f"heard of a {news} after 0 ns"):
        check(simulation)


def test_instants_in_whole_nanoseconds_are_allowed_for_on_a_fast_link() -> None:
    """A nanosecond carries 1,250 bytes here, about as much as a request has."""
    costs = linear_costs(token_bytes=1)
    setup = system(policy=PolicyName.REMOTE, num_prfaas=200, bits_per_s=1e13, costs=costs)
    simulation = Simulation(setup, requests_at([0] * 200, list(range(1000, 1200))))
    simulation.run()
    check(simulation)
    link = simulation.links[0]
    assert abs(link.added_bytes - link._served_bytes) > 1000
    link._served_bytes += 3 * link.rounded_bytes + 10_000
    with pytest.raises(BrokenInvariantError, match="a link sent"):
        check(simulation)


def test_a_flapping_link_is_dead_only_after_a_silence_without_a_break() -> None:
    """Dead after 5 s: four cuts of 3 s, 1 s apart, are borne; the fifth lasts."""
    cuts = [Failure(LINK, at_ns=i * 4 * NS_PER_S, for_ns=3 * NS_PER_S) for i in range(4)]
    last = Failure(LINK, at_ns=16 * NS_PER_S, for_ns=8 * NS_PER_S)
    simulation = done(*cuts)
    check(simulation)
    assert News.LINK_DEAD not in simulation.front.heard.least_ns
    simulation = done(*cuts, last)
    check(simulation)
    assert simulation.front.heard.least_ns[News.LINK_DEAD] == 5 * NS_PER_S
    assert simulation.front.heard.least_ns[News.LINK_ALIVE] == PROMPT.delay_ns


def test_a_slower_link_is_known_only_when_bytes_have_crossed_it_and_the_report_arrives() -> None:
    """That an idle link became slow decides nothing; later requests stay local."""
    at_ns = 10 * NS_PER_S
    slow = Failure(LINK, at_ns=at_ns, for_ns=600 * NS_PER_S, capacity_ratio=1e-4)
    base = system(policy=PolicyName.ADAPTIVE, costs=linear_costs(remote_ns=100_000), signals=PROMPT)
    first_ns = at_ns + 5 * NS_PER_S
    sent_ns = first_ns + 3000 * 100_000
    reported_ns = sent_ns + 2 * PROMPT.interval_ns + PROMPT.delay_ns
    reasons = []
    for second_ns in (sent_ns - 1, reported_ns):
        requests = requests_at([first_ns, second_ns], [3000, 3000])
        simulation = Simulation(replace(base, failures=(slow,)), requests)
        simulation.run()
        decisions = [request.decision for request in simulation.requests]
        reasons.append([decision.reason for decision in decisions if decision is not None])
    assert reasons == [
        [Reason.ABOVE_THRESHOLD, Reason.ABOVE_THRESHOLD],
        [Reason.ABOVE_THRESHOLD, Reason.LINK_FULL],
    ]


ROWS = st.lists(
    st.tuples(st.integers(0, 2 * NS_PER_S), st.integers(1, 8000), st.integers(1, 300)),
    min_size=2,
    max_size=25,
)


def decisions(rows: list[tuple[int, int, int]], policy: PolicyName) -> list[object]:
    at_ns, requests = 0, []
    for i, (gap, prompt, output) in enumerate(rows):
        at_ns += gap
        requests.append(Request(i, at_ns, prompt, output, tuple(range(prompt // 512))))
    costs = linear_costs(remote_ns=300_000)
    setup = system(policy=policy, num_prfaas=2, num_prefill=2, costs=costs, signals=PROMPT)
    simulation = Simulation(setup, requests)
    simulation.run()
    check(simulation)
    return [request.decision for request in requests]


@settings(max_examples=40)
@given(rows=ROWS, policy=st.sampled_from(PolicyName), cut=st.integers(1, 24))
def test_no_decision_depends_on_what_comes_later_or_on_lengths_of_outputs(
    rows: list[tuple[int, int, int]], policy: PolicyName, cut: int
) -> None:
    """Decode never binds here, so that outputs have no honest way to show."""
    whole = decisions(rows, policy)
    assert decisions(rows[:cut], policy) == whole[:cut]
    assert decisions([(gap, prompt, 1) for gap, prompt, _ in rows], policy) == whole
