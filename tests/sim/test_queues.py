"""The simulator against closed forms of queueing theory."""

from __future__ import annotations

from math import factorial, inf

import numpy as np
import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.resources.shared_link import Flow, SharedLink
from prfaas.sim.results.invariants import check
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S
from tests.sim.systems import MS, requests_at, system

pytestmark = pytest.mark.timeout(300)  # 100,000 requests take half a minute on a busy core

NUM_REQUESTS = 100_000
"""Whose mean wait is within 5 % of the exact one."""
SERVICE_TOKENS = 1000


def erlang_c(num_servers: int, load: float) -> float:
    """Probability of waiting in M/M/c; `load` is the offered traffic in Erlang."""
    last = load**num_servers / factorial(num_servers) * num_servers / (num_servers - load)
    return last / (sum(load**k / factorial(k) for k in range(num_servers)) + last)


def simulate(
    num_servers: int,
    utilisation: float,
    *,
    constant: bool,
    seed: int,
    num_requests: int = NUM_REQUESTS,
) -> Simulation:
    """A prefill stage whose mean service time is 1 s."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / (utilisation * num_servers), num_requests)
    at_ns = np.rint(np.cumsum(gaps) * NS_PER_S).astype(np.int64).tolist()
    drawn = rng.exponential(SERVICE_TOKENS, num_requests) if not constant else None
    tokens = [SERVICE_TOKENS] * num_requests
    if drawn is not None:
        tokens = np.clip(np.rint(drawn), 1, 19_999).astype(int).tolist()
    simulation = Simulation(system(num_prefill=num_servers), requests_at(at_ns, tokens))
    simulation.run()
    check(simulation)
    return simulation


def mean_wait_s(simulation: Simulation) -> float:

    waits = [r.prefill_started_at_ns - r.arrived_at_ns for r in simulation.requests]
    return float(np.mean(waits)) / NS_PER_S


@pytest.mark.parametrize(
    ("num_servers", "utilisation"),
    [
        pytest.param(1, 0.6, marks=pytest.mark.nightly),
        pytest.param(3, 0.7, marks=pytest.mark.nightly),
        (8, 0.7),
    ],
)
def test_waits_of_m_m_c(num_servers: int, utilisation: float) -> None:
    found = mean_wait_s(simulate(num_servers, utilisation, constant=False, seed=3))
    load = utilisation * num_servers
    expected = erlang_c(num_servers, load) / (num_servers - load)
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("utilisation", [0.5, pytest.param(0.8, marks=pytest.mark.nightly)])
def test_waits_of_m_d_1(utilisation: float) -> None:
    found = mean_wait_s(simulate(1, utilisation, constant=True, seed=4))
    assert found == pytest.approx(utilisation / (2 * (1 - utilisation)), rel=0.05)


def test_littles_law() -> None:
    # An identity of any run.
    simulation = simulate(2, 0.75, constant=False, seed=5, num_requests=10_000)
    events = [(r.arrived_at_ns, 1) for r in simulation.requests]
    events += [(r.finished_at_ns, -1) for r in simulation.requests]
    area, inside, before = 0, 0, 0
    for at_ns, change in sorted(events):
        area, inside, before = area + inside * (at_ns - before), inside + change, at_ns
    sojourn = sum(r.finished_at_ns - r.arrived_at_ns for r in simulation.requests)
    assert area == sojourn


def _link(
    bits_per_s: float, flow_bits_per_s: float = inf
) -> tuple[Clock, SharedLink, dict[int, int]]:
    clock = Clock()
    landed: dict[int, int] = {}

    def land(flow: Flow) -> None:
        assert flow.request is not None
        landed[flow.request.index] = clock.now_ns

    return (
        clock,
        SharedLink(clock, bits_per_s, on_landed=land, flow_bits_per_s=flow_bits_per_s),
        landed,
    )


def test_events_of_an_instant_happen_in_the_order_in_which_they_were_asked_for() -> None:
    clock, seen = Clock(), list[str]()

    def begin(name: str) -> None:
        seen.append(name)
        clock.at(5, seen.append, "meanwhile")

    clock.at(5, begin, "first")
    for at_ns, name in ((5, "second"), (3, "before"), (5, "third"), (6, "after")):
        clock.at(at_ns, seen.append, name)
    clock.go()
    assert seen == ["before", "first", "second", "third", "meanwhile", "after"]
    assert clock.num_events == len(seen)


def test_two_flows_share_a_link() -> None:
    clock, link, landed = _link(8e9)
    sizes = {0: 3_000_000_000, 1: 1_000_000_000}
    for index, size in sizes.items():
        link.add(link.open(Request(index, 0, 1, 1), size), size, last=True)
    clock.go()
    # At 1 GB/s: the small one has half the link for 2 s, then the large one has all of it.
    assert landed == {1: 2 * NS_PER_S, 0: 4 * NS_PER_S}


def test_a_flow_gets_no_more_than_loss_lets_it() -> None:
    clock, link, landed = _link(8e9, flow_bits_per_s=2e9)
    for index in range(2):
        flow = link.open(Request(index, 0, 1, 1), 10**9)
        link.add(flow, 10**9, last=True)
    clock.go()
    assert landed == {0: 4 * NS_PER_S, 1: 4 * NS_PER_S}


def test_a_cut_link_holds_its_flows_and_a_slower_one_delays_them() -> None:
    clock, link, landed = _link(8e9)
    link.add(link.open(Request(0, 0, 1, 1), 4 * 10**9), 4 * 10**9, last=True)
    clock.at(1 * NS_PER_S, lambda _: link.set_rate(0))
    clock.at(5 * NS_PER_S, lambda _: link.set_rate(4e9))
    clock.go()
    assert landed == {0: 11 * NS_PER_S}
    assert link.sent_bytes == pytest.approx(4e9)
    assert sum(link.window_bytes.values()) == pytest.approx(4e9)


def test_mean_sojourn_of_a_processor_sharing_link() -> None:
    """M/G/1-PS: a transfer takes its own time / (1 - load), whatever the sizes look like."""
    rng = np.random.default_rng(6)
    load, count = 0.7, 40_000
    sizes = np.rint(rng.lognormal(0, 1, count) * 1e8).astype(int)
    at_ns = np.cumsum(rng.exponential(sizes.mean() / 1e9 / load, count)) * NS_PER_S
    clock, link, landed = _link(8e9)

    def begin(index: int) -> None:
        size = int(sizes[index])
        link.add(link.open(Request(index, 0, 1, 1), size), size, last=True)

    for index, at in enumerate(at_ns):
        clock.at(round(at), begin, index)
    clock.go()
    assert len(landed) == count
    sojourn = np.mean([(landed[i] - at_ns[i]) / NS_PER_S for i in range(count)])
    assert sojourn == pytest.approx(sizes.mean() / 1e9 / (1 - load), rel=0.06)


def test_shipping_overlaps_with_prefill() -> None:
    """Three chunks of 1 s: two leave meanwhile, the last takes its own time."""
    setup = system(policy=PolicyName.REMOTE, bits_per_s=1000 * 1000 * 8 * 2)
    simulation = Simulation(setup, requests_at([0], [3000]))
    simulation.run()
    check(simulation)
    request = simulation.requests[0]
    assert request.prefilled_at_ns == 3 * NS_PER_S
    assert request.landed_at_ns == 3 * NS_PER_S + NS_PER_S // 2


def test_a_batch_decodes_one_token_a_step() -> None:
    setup = system(batch_max=2)
    simulation = Simulation(setup, requests_at([0, 0, 0], [1, 1, 1], output=101))
    simulation.run()
    check(simulation)
    finished = [r.finished_at_ns for r in simulation.requests]
    # Prefilled 1 ms apart; the third waits for a slot.
    assert finished == [101 * MS, 102 * MS, 201 * MS]
    assert [r.tpot_ns for r in simulation.requests] == [MS, MS, MS]
