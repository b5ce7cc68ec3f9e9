"""Device memory of instances: the choice for a prompt, and the tokens left to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.resources.prefill_instance import PrefillJob
from prfaas.sim.results.invariants import check
from prfaas.sim.results.summary import traffic_of
from prfaas.sim.scenario.run import run
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import BlockSetup, CacheSetup, Failure, FailureKind, Setup
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES, MS, short, system

S = NS_PER_S
OWN = CacheSetup(host_blocks=0, device_blocks=20)
"""No pool worth the name, and instances with room for 20 blocks."""


def setup_for(policy: PolicyName, cache: CacheSetup = OWN, **more: object) -> Setup:
    """Two instances at home and two away; a block is 100 tokens, a token 1 ms."""
    base = system(policy=policy, num_prefill=2, num_prfaas=2, cache=cache)
    return replace(base, cache=cache, blocks=BlockSetup(tokens=100), **more)  # type: ignore[arg-type]


def prompt(index: int, at_ns: int, family: int, num_blocks: int = 10) -> Request:
    """Blocks of a family, and 50 tokens of its own."""
    ids = (*range(1000 * family, 1000 * family + num_blocks), 10**6 + index)
    return Request(index, at_ns, 100 * num_blocks + 50, 1, ids)


def played(setup: Setup, requests: list[Request]) -> tuple[Simulation, list[int], list[str]]:
    """A run; what each request hit, and who prefilled it."""
    simulation, takers = Simulation(setup, requests), list[str]()
    for instance in (*simulation.locals.values(), *simulation.remotes.values()):
        instance._on_start = noting(takers, instance.name, instance._on_start)
    simulation.run()
    check(simulation)
    return simulation, [request.num_hit_tokens for request in simulation.requests], takers


def noting(
    takers: list[str], name: str, then: Callable[[PrefillJob], None]
) -> Callable[[PrefillJob], None]:
    def started(job: PrefillJob) -> None:
        takers.append(name)
        then(job)

    return started


@pytest.mark.parametrize("policy", [PolicyName.LOCAL, PolicyName.REMOTE])
def test_who_computed_a_prompt_takes_what_begins_like_it(policy: PolicyName) -> None:
    # The second finds one of two busy; the others find both idle, the first name in front.
    requests = [prompt(0, S, 1), prompt(1, S + MS, 2), prompt(2, 5 * S, 2), prompt(3, 9 * S, 1)]
    simulation, hits, takers = played(setup_for(policy), requests)
    assert hits == [0, 0, 1000, 1000]
    assert takers[0] == takers[3] != takers[1] == takers[2]
    assert [r.num_new_tokens for r in simulation.requests] == [1050, 1050, 50, 50]
    if policy is PolicyName.REMOTE:
        # The pool at home has no room: everything is shipped, whatever an instance away holds.
        (traffic,) = traffic_of(simulation)
        assert sum(traffic.bytes_by_purpose.values()) == pytest.approx(4 * 1_050_000)


def test_without_it_nothing_is_found() -> None:
    requests = [prompt(0, S, 1), prompt(1, 5 * S, 1)]
    _, hits, _ = played(setup_for(PolicyName.LOCAL, CacheSetup(0)), requests)
    assert hits == [0, 0]


def test_what_was_used_least_recently_makes_room() -> None:
    # Eleven blocks each, room for 20: of the one that was used before, the last two go.
    one = replace(setup_for(PolicyName.LOCAL), num_prefill=1)
    requests = [prompt(0, S, 1), prompt(1, 5 * S, 2), prompt(2, 9 * S, 1), prompt(3, 13 * S, 2)]
    _, hits, _ = played(one, requests)
    assert hits == [0, 0, 900, 900]


def test_an_instance_that_fails_comes_back_with_an_empty_memory() -> None:
    down = Failure(FailureKind.PREFILL, 3 * S, S)
    one = replace(setup_for(PolicyName.LOCAL), num_prefill=1, failures=(down,))
    _, hits, _ = played(one, [prompt(0, S, 1), prompt(1, 5 * S, 1), prompt(2, 9 * S, 1)])
    assert hits == [0, 0, 1000]


def test_what_an_instance_holds_need_not_be_read_from_the_disk() -> None:
    # Host memory keeps one block; nine of 100 kB each come from the disk at 2 MB/s.
    pool = CacheSetup(host_blocks=1, disk_blocks=100, disk_bits_per_s=16e6)
    base = system(num_prefill=1)
    ttft = []
    for room in (0, 20):
        cache = replace(pool, device_blocks=room)
        setup = replace(base, cache=cache, blocks=BlockSetup(tokens=100))
        simulation, hits, _ = played(setup, [prompt(0, S, 1), prompt(1, 9 * S, 1)])
        assert hits == [0, 1000]
        ttft.append(simulation.requests[1].ttft_ns)
    assert ttft == [500 * MS, 50 * MS]


def test_a_scenario_says_how_large_it_is() -> None:
    small = ["cache.pd_blocks=200", "cache.prfaas_blocks=200"]
    known = ["cache.pd_device_blocks=2000", "cache.prfaas_device_blocks=2000"]
    example = EXAMPLES / "mooncake.toml"
    without, with_it = (run(short(example, more)) for more in (small, [*small, *known]))
    assert short(example, [*small, *known]).setup.prfaas[0].cache.device_blocks == 2000
    hits = [sum(r.num_hit_tokens for r in f.simulation.requests) for f in (without, with_it)]
    assert hits[1] > hits[0]
