"""The first token from the instance that prefills, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sim.system.request import UNSET
from prfaas.sim.workloads.requests import Synthetic
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES


def scenario(*, early: bool, bits_per_s: float) -> Scenario:
    found = load_scenario(EXAMPLES / "paper-poisson.toml").with_policy(PolicyName.REMOTE)
    setup, source = found.setup, found.workload.source
    assert isinstance(source, Synthetic)
    (cluster,) = setup.prfaas
    link = replace(cluster.link, bits_per_s=bits_per_s)
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


@pytest.mark.parametrize("gbits_per_s", [100, 5])
def test_tokens_come_until_the_blocks_are_there(gbits_per_s: int) -> None:
    found = scenario(early=True, bits_per_s=gbits_per_s * 1e9)
    routing = replace(found.setup.routing, relay_decode=True)
    relays = run(replace(found, setup=replace(found.setup, routing=routing)))
    plain = run(found)
    assert relays.results.outcomes == plain.results.outcomes
    before = {r.index: r for r in plain.simulation.requests}
    step_ns = found.setup.step_ns
    most = max(r.relayed_tokens for r in relays.simulation.requests)
    assert (most > 2) == (gbits_per_s == 5)
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
