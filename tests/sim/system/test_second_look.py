"""Prefixes are looked up again when prefill starts: what was computed or lost while it waited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import check
from prfaas.sim.results.summary import summarise, traffic_of
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import BlockSetup, CacheSetup, Setup, SignalSetup
from prfaas.units import NS_PER_S
from tests.sim.systems import MS, system

S = NS_PER_S


def setup_for(policy: PolicyName, cache: CacheSetup) -> Setup:
    """One instance on either side; a block is 100 tokens, a token takes 1 ms."""
    base = system(policy=policy, cache=cache)
    return replace(base, cache=cache, blocks=BlockSetup(tokens=100))


def prompt(index: int, at_ns: int, family: int = 0) -> Request:
    """Ten blocks of a family, and 50 tokens of its own."""
    ids = (*range(100 * family, 100 * family + 10), 10**6 + index)
    return Request(index, at_ns, 1050, 1, ids)


def played(setup: Setup, requests: list[Request]) -> Simulation:
    simulation = Simulation(setup, requests)
    simulation.run()
    check(simulation)
    return simulation


@pytest.mark.parametrize("cache", [CacheSetup(None), CacheSetup(0, device_blocks=None)])
@pytest.mark.parametrize("policy", [PolicyName.LOCAL, PolicyName.REMOTE])
def test_a_prefix_that_was_computed_while_a_request_waited_is_not_computed_again(
    policy: PolicyName, cache: CacheSetup
) -> None:
    simulation = played(setup_for(policy, cache), [prompt(i, i * MS) for i in range(3)])
    requests = simulation.requests
    assert [r.num_new_tokens for r in requests] == [1050, 50, 50]
    assert [r.prefilled_at_ns for r in requests] == [1050 * MS, 1100 * MS, 1150 * MS]
    results = summarise(simulation, start_ns=0, end_ns=S)
    assert results.prefix_hit_ratio == pytest.approx(2000 / 3150)
    if policy is PolicyName.REMOTE:
        # The transfer was sized on arrival, as a ticket is: it carries the prefix too.
        (traffic,) = traffic_of(simulation)
        assert sum(traffic.bytes_by_purpose.values()) == pytest.approx(3 * 1_050_000)


def test_a_prefix_that_was_evicted_while_a_request_waited_is_computed() -> None:
    # There is room for one prompt: the second one's takes the place of the third one's prefix.
    requests = [prompt(0, 0), prompt(1, 2 * S, family=1), prompt(2, 2 * S + MS)]
    simulation = played(setup_for(PolicyName.LOCAL, CacheSetup(11)), requests)
    decision = simulation.requests[2].decision
    assert decision is not None
    assert decision.num_new_tokens == 50
    assert simulation.requests[2].num_new_tokens == 1050


@pytest.mark.parametrize("policy", [PolicyName.LOCAL, PolicyName.REMOTE])
def test_predictions_follow_what_was_computed_while_others_waited(policy: PolicyName) -> None:
    # Twenty prompts share a prefix that nobody holds; one of another kind comes while ten wait.
    requests = [prompt(i, i * MS) for i in range(20)] + [prompt(20, 1600 * MS, family=1)]
    setup = replace(setup_for(policy, CacheSetup(None)), signals=SignalSetup())
    simulation = played(setup, requests)
    last = simulation.requests[-1]
    assert last.decision is not None
    assert last.decision.predicted_ns == pytest.approx(last.ttft_ns, rel=0.1)
    assert last.offloaded == (policy is PolicyName.REMOTE)
    assert last.ttft_ns > 1.4 * S
