"""The first token from the instance that prefills, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.core.request.events import Outcome
from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.relays import SimulatedRelay
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import UNSET, Request
from prfaas.sim.system.setup import Failure, FailureKind
from prfaas.sim.workloads.requests import Synthetic
from prfaas.units import NS_PER_MS, NS_PER_S
from tests.sim.systems import EXAMPLES


def scenario(*, early: bool, bits_per_s: float, rtt_ns: int = 0) -> Scenario:
    found = load_scenario(EXAMPLES / "paper-poisson.toml").with_policy(PolicyName.REMOTE)
    setup, source = found.setup, found.workload.source
    assert isinstance(source, Synthetic)
    (cluster,) = setup.prfaas
    link = replace(cluster.link, bits_per_s=bits_per_s, rtt_ns=rtt_ns)
    routing = replace(setup.routing, early_first_token=early)
    setup = replace(setup, routing=routing, prfaas=(replace(cluster, link=link),))
    source = replace(source, rate_per_s=source.rate_per_s / 10, duration_ns=60 * NS_PER_S)
    workload = replace(found.workload, source=source)
    return replace(found, setup=setup, workload=workload, start_ns=0, end_ns=60 * NS_PER_S)


@pytest.mark.parametrize("gbits_per_s", [100, 5])
def test_the_first_token_does_not_wait_for_the_link(gbits_per_s: int) -> None:
    late, early = (
        run(scenario(early=early, bits_per_s=gbits_per_s * 1e9)) for early in (False, True)
    )
    assert early.results.outcomes == late.results.outcomes
    before = {r.index: r for r in late.simulation.requests}
    for request in early.simulation.requests:
        other = before[request.index]
        assert request.had_tokens == 1
        assert other.had_tokens == 0
        assert request.first_token_at_ns < other.first_token_at_ns
        # Decode begins when it would have begun, and has one token less to make.
        assert request.second_token_at_ns <= other.first_token_at_ns
        assert request.finished_at_ns <= other.finished_at_ns
        assert other.second_token_at_ns == UNSET
    saved = 1 - early.results.time_to_first_token["p50"] / late.results.time_to_first_token["p50"]
    print(f"{gbits_per_s} Gbit/s: TTFT P50 -{saved:.0%}")
    assert np.isclose(
        early.results.time_to_second_token["avg"],
        late.results.time_to_first_token["avg"],
        rtol=0.01,
    )


@pytest.mark.parametrize("early", [True, False])
def test_prompt_and_token_cross_the_link(*, early: bool) -> None:
    """So do the blocks, if the token waits for them."""
    rtt_ns = 80 * NS_PER_MS
    near, far = (
        run(scenario(early=early, bits_per_s=100e9, rtt_ns=rtt)).simulation.requests
        for rtt in (0, rtt_ns)
    )
    for before, request in zip(near, far, strict=True):
        assert request.offloaded
        assert request.prefill_started_at_ns - request.routed_at_ns >= rtt_ns // 2
        if before.prefill_started_at_ns == before.arrived_at_ns:
            assert request.first_token_at_ns - before.first_token_at_ns == pytest.approx(
                rtt_ns, abs=NS_PER_MS
            )


def test_an_instance_that_dies_while_a_prompt_is_on_its_way_is_left() -> None:
    found = scenario(early=True, bits_per_s=100e9, rtt_ns=NS_PER_S)
    first = run(found).simulation.requests[0]
    died_at_ns = first.arrived_at_ns + NS_PER_S // 4
    down = tuple(
        Failure(FailureKind.PRFAAS, died_at_ns, NS_PER_S, index=index)
        for index in range(found.setup.prfaas[0].num_instances)
    )
    done = run(replace(found, setup=replace(found.setup, failures=down)))
    assert done.simulation.requests[0].outcome is Outcome.FINISHED
    assert done.simulation.reactions.fallbacks["prefill/unreachable"] >= 1
    assert not done.simulation.suspects.are_there


@pytest.mark.parametrize("gbits_per_s", [100, 5])
def test_tokens_come_until_the_blocks_are_there(gbits_per_s: int) -> None:
    found = scenario(early=True, bits_per_s=gbits_per_s * 1e9)
    routing = replace(found.setup.routing, relay_decode=True)
    relays = run(replace(found, setup=replace(found.setup, routing=routing)))
    plain = run(found)
    assert relays.results.outcomes == plain.results.outcomes
    before = {r.index: r for r in plain.simulation.requests}
    step_ns = found.setup.step_ns
    relayed = [r.relayed_tokens for r in relays.simulation.requests]
    if gbits_per_s == 5:  # Nobody knows the rate of the link before the first.
        assert sum(tokens > 0 for tokens in relayed) == len(before) - 1
    else:
        assert max(relayed) <= 2
    for request in relays.simulation.requests:
        other = before[request.index]
        assert request.first_token_at_ns == other.first_token_at_ns
        assert request.second_token_at_ns < other.second_token_at_ns + step_ns(1, 0)
        assert request.finished_at_ns <= other.finished_at_ns
        if not request.relayed_tokens:
            continue
        each_ns = step_ns(1, request.num_prompt_tokens)
        assert request.second_token_at_ns - request.first_token_at_ns == round(each_ns)
        if request.had_tokens < request.num_output_tokens:
            # The relay ends when the instance that decodes has the blocks.
            waited = (request.landed_at_ns - request.first_token_at_ns) / each_ns
            assert request.relayed_tokens == pytest.approx(waited, abs=1)
    assert not relays.simulation.front.dispatcher.requests.instances.relays


@pytest.mark.parametrize(("prompt", "is_step"), [(8193, True), (8192, False)])
def test_the_rest_is_a_step_or_a_prefill(prompt: int, *, is_step: bool) -> None:
    """What decode computes beside a relay: a prompt of whole blocks lacks the last one."""
    setup, clock = scenario(early=True, bits_per_s=5e9).setup, Clock()
    relay = SimulatedRelay(clock, setup, Request(0, 0, prompt, 100), 99)
    warm: list[int] = []
    relay.begin()
    relay.warm(lambda: warm.append(clock.now_ns))
    clock.go()
    rest_ns = setup.costs.local_prefill_ns(513, 8192 - setup.blocks.tokens)
    assert warm == [round(setup.step_ns(1, prompt)) if is_step else rest_ns]
