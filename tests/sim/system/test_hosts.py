"""Clusters of several hosts: prefixes and requests that go from one host to another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.control.replication import CopySettings
from prfaas.core.request.events import Outcome
from prfaas.core.routing.policies import PolicyName
from prfaas.errors import ConfigError
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.resources.shared_link import Purpose
from prfaas.sim.results.invariants import check
from prfaas.sim.results.summary import digest, traffic_of
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import (
    BlockSetup,
    CacheSetup,
    Failure,
    FailureKind,
    LinkSetup,
    PlacementSetup,
    Setup,
)
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES, MS, linear_costs, short, system

S = NS_PER_S
ROOM = CacheSetup(None)
MEGABYTE_PER_S = LinkSetup(8e6)


def hosts(
    *,
    pd: int,
    prfaas: int = 1,
    policy: PolicyName = PolicyName.LOCAL,
    link: LinkSetup = MEGABYTE_PER_S,
    host_link: LinkSetup = MEGABYTE_PER_S,
    num_decode: int = 2,
) -> Setup:
    """A token takes 2 ms to prefill in the PD cluster, 1 ms in the other, and has 1,000 bytes."""
    base = system(
        policy=policy,
        threshold=2000,
        num_prefill=2,
        num_decode=num_decode,
        num_prfaas=2,
        costs=linear_costs(local_ns=2 * MS),
        link=link,
        cache=ROOM,
    )
    return replace(
        base,
        num_hosts=pd,
        host_link=host_link,
        prfaas=tuple(replace(cluster, num_hosts=prfaas) for cluster in base.prfaas),
        cache=ROOM,
        blocks=BlockSetup(100),
    )


def played(setup: Setup, requests: list[Request]) -> Simulation:
    simulation = Simulation(setup, requests)
    simulation.run()
    check(simulation)
    return simulation


def prompt(index: int, at_ns: int, num_blocks: int, extra: int = 50, family: int = 0) -> Request:
    blocks = tuple(1000 * family + n for n in range(num_blocks))
    return Request(index, at_ns, num_blocks * 100 + extra, 1, blocks)


def sent(simulation: Simulation, network: str, purpose: Purpose) -> int:
    found = {traffic.network: traffic for traffic in traffic_of(simulation)}
    return round(found[network].bytes_by_purpose[purpose])


# Inside a cluster


def test_a_hit_on_another_host_is_a_hit_after_its_transfer() -> None:
    # Instance p00000 is on pd-0 and p00001 on pd-1; so are the two that decode.
    simulation = Simulation(hosts(pd=2), [prompt(0, 0, 10)])
    simulation.front.set_ready("p00001", ready=False, now_ns=0)
    simulation.front.caches.pools["pd-1"].store(range(10))
    simulation.run()
    check(simulation)
    (request,) = simulation.requests
    assert (request.num_hit_tokens, request.num_new_tokens) == (1000, 50)
    assert sent(simulation, "hosts of pd", Purpose.PULL) == 1_000_000
    # A second to transfer the prefix instead of two to compute it; then 50 tokens.
    assert request.prefill_started_at_ns == pytest.approx(1 * S, rel=0.001)
    assert request.prefilled_at_ns == request.prefill_started_at_ns + 100 * MS
    assert simulation.front.caches.pools["pd-0"].num_held(range(10)) == 10
    assert simulation.reactions.fallbacks == {}


def test_a_prefix_that_is_computed_sooner_is_not_pulled() -> None:
    simulation = Simulation(hosts(pd=2, host_link=LinkSetup(1e6)), [prompt(0, 0, 10)])
    simulation.front.set_ready("p00001", ready=False, now_ns=0)
    simulation.front.caches.pools["pd-1"].store(range(10))
    # The link was measured: before that, the dispatcher expects a usual one.
    link = simulation.transports["pd-1", "pd-0"].link
    report = link.report(0)._replace(goodput_bits_per_s=1e6)
    simulation.front.dispatcher.links.report("pd-1", "pd-0", report)
    simulation.run()
    assert simulation.requests[0].num_hit_tokens == 0
    assert sent(simulation, "hosts of pd", Purpose.PULL) == 0


def test_one_host_prefills_and_another_one_decodes() -> None:
    simulation = Simulation(hosts(pd=2), [prompt(0, 0, 10)])
    for name in ("p00001", "d00000"):
        simulation.front.set_ready(name, ready=False, now_ns=0)
    simulation.run()
    check(simulation)
    (request,) = simulation.requests
    assert request.decision is not None
    assert not request.offloaded
    assert sent(simulation, "hosts of pd", Purpose.HANDOFF) == 1_050_000
    # The first 1,000 tokens are on the way while the last 50 are computed.
    assert request.prefilled_at_ns == 2100 * MS
    assert request.first_token_at_ns == pytest.approx(2000 * MS + 1050 * MS, rel=0.001)
    assert simulation.front.caches.pools["pd-1"].num_held(range(10)) == 10


def test_hosts_of_a_prfaas_cluster_share_what_they_hold() -> None:
    setup = hosts(pd=1, prfaas=2, policy=PolicyName.REMOTE)
    simulation = Simulation(setup, [prompt(0, 0, 10)])
    simulation.front.set_ready("r00000", ready=False, now_ns=0)
    simulation.front.caches.pools["prfaas-0"].store(range(5))
    link = simulation.transports["prfaas-0", "prfaas-1"].link
    report = link.report(0)._replace(goodput_bits_per_s=80e6)
    simulation.front.dispatcher.links.report("prfaas-0", "prfaas-1", report)
    simulation.run()
    check(simulation)
    (request,) = simulation.requests
    assert (request.num_hit_tokens, request.offloaded) == (500, True)
    assert sent(simulation, "hosts of prfaas", Purpose.PULL) == 500_000
    assert sent(simulation, "prfaas", Purpose.HANDOFF) == 1_050_000


# The link between clusters


def test_all_hosts_share_the_link_between_clusters_and_each_pair_is_counted() -> None:
    """Two hand-offs of a megabyte at once: half of the capacity each, and one report a pair."""
    setup = hosts(pd=2, prfaas=2, policy=PolicyName.REMOTE)
    requests = [prompt(0, 0, 0, extra=1000), prompt(1, 0, 0, extra=1000)]
    simulation = played(setup, requests)
    ended = [request.landed_at_ns for request in simulation.requests]
    assert ended == pytest.approx([3 * S, 3 * S], rel=0.001)
    used = {
        ends: transport.link.report(simulation.clock.now_ns)
        for ends, transport in simulation.transports.items()
        if transport.link.sent_bytes
    }
    assert [source for source, _ in used] == ["prfaas-0", "prfaas-1"]
    for report in used.values():
        assert report.goodput_bits_per_s == pytest.approx(4e6, rel=0.01)
        assert report.busy_ns == pytest.approx(2 * S, rel=0.01)


def test_a_flow_gets_the_whole_capacity_once_it_is_alone() -> None:
    setup = hosts(pd=2, prfaas=2, policy=PolicyName.REMOTE)
    requests = [prompt(0, 0, 0, extra=1000), prompt(1, S, 0, extra=1000)]
    simulation = played(setup, requests)
    # The second begins as the first is half way: a second at half the rate for both, and so on.
    ended = [request.landed_at_ns for request in simulation.requests]
    assert ended == pytest.approx([2 * S, 3 * S], rel=0.001)


# Failures


def test_a_lost_host_takes_its_own_pool_only() -> None:
    failure = Failure(FailureKind.POOL, 5 * S, 10 * S, index=1, cluster="pd")
    setup = replace(hosts(pd=2), failures=(failure,))
    simulation = Simulation(setup, [prompt(0, 6 * S, 5)])
    for name in ("pd-0", "pd-1"):
        simulation.front.caches.pools[name].store(range(5))
    simulation.run()
    check(simulation)
    held = {name: pool.num_held(range(5)) for name, pool in simulation.front.caches.pools.items()}
    assert held == {"pd-0": 5, "pd-1": 0, "prfaas": 0}
    assert simulation.requests[0].num_hit_tokens == 500


def test_a_pull_from_a_host_that_is_lost_costs_only_time() -> None:
    failure = Failure(FailureKind.POOL, S // 2, 10 * S, index=1, cluster="pd")
    simulation = Simulation(replace(hosts(pd=2), failures=(failure,)), [prompt(0, 0, 10)])
    simulation.front.set_ready("p00001", ready=False, now_ns=0)
    simulation.front.caches.pools["pd-1"].store(range(10))
    simulation.run()
    check(simulation)
    (request,) = simulation.requests
    assert request.outcome is Outcome.FINISHED
    # Half of the prefix had arrived.
    assert request.num_hit_tokens == 500
    assert simulation.reactions.fallbacks == {"pull/link_lost": 1}


# All together


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2 * S), st.integers(1, 60), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    policy=st.sampled_from(PolicyName),
    failures=st.lists(
        st.builds(
            Failure,
            kind=st.sampled_from([FailureKind.POOL, FailureKind.PRFAAS, FailureKind.DECODE]),
            at_ns=st.integers(0, 20 * S),
            for_ns=st.integers(1, 20 * S),
            index=st.integers(0, 1),
            cluster=st.just("prfaas"),
            rebuild_ns=st.integers(0, 5 * S),
        )
        | st.builds(
            Failure,
            kind=st.sampled_from([FailureKind.POOL, FailureKind.PREFILL]),
            at_ns=st.integers(0, 20 * S),
            for_ns=st.integers(1, 20 * S),
            index=st.integers(0, 1),
            cluster=st.just("pd"),
        )
        | st.builds(
            Failure,
            kind=st.just(FailureKind.LINK),
            at_ns=st.integers(0, 20 * S),
            for_ns=st.integers(1, 20 * S),
            cluster=st.just("prfaas"),
        ),
        max_size=3,
        unique_by=lambda f: (f.kind, f.cluster, f.index),
    ),
    num_pd=st.integers(2, 4),
    num_prfaas=st.integers(1, 2),
    bits_per_s=st.sampled_from([1e6, 1e8]),
    host_bits_per_s=st.sampled_from([1e7, 1e9]),
)
def test_every_run_with_hosts_passes_the_checkers_and_is_repeatable(
    rows: list[tuple[int, int, int]],
    policy: PolicyName,
    failures: list[Failure],
    num_pd: int,
    num_prfaas: int,
    bits_per_s: float,
    host_bits_per_s: float,
) -> None:
    base = hosts(
        pd=num_pd,
        prfaas=num_prfaas,
        policy=policy,
        link=LinkSetup(bits_per_s, rtt_ns=50 * MS),
        host_link=LinkSetup(host_bits_per_s, rtt_ns=MS),
    )
    cache = CacheSetup(40, 80, 1e9, 15)
    failures = [each for each in failures if each.index < num_prfaas or each.cluster == "pd"]
    setup = replace(
        base,
        cache=cache,
        prfaas=tuple(replace(cluster, cache=cache) for cluster in base.prfaas),
        failures=tuple(failures),
        placement=PlacementSetup(pulls=True, copies=CopySettings(10**6, num_uses_min=1.0)),
        signals=replace(base.signals, interval_ns=S, loop_interval_ns=2 * S),
    )
    digests = []
    for _ in range(2):
        at_ns, requests = 0, []
        for i, (gap_ns, num_blocks, kind) in enumerate(rows):
            at_ns += gap_ns
            requests.append(replace(prompt(i, at_ns, num_blocks, 1, kind), num_output_tokens=3))
        simulation = played(setup, requests)
        assert all(r.outcome is Outcome.FINISHED for r in simulation.requests)
        digests.append(digest(simulation))
    assert digests[0] == digests[1]


# Files


def test_the_example_uses_links_between_hosts_on_both_sides_and_loses_nothing() -> None:
    settings = ["workload.requests=1200", 'failure.0.at="3min"', 'failure.0.duration="20s"']
    found = run(load_scenario(EXAMPLES / "hosts.toml", settings))
    traffic = found.results.traffic
    assert traffic["hosts of H20 cluster"]["bytes"]["pull"] > 0
    assert traffic["hosts of H20 cluster"]["bytes"]["handoff"] > 0
    assert traffic["hosts of H200 cluster"]["bytes"]["pull"] > 0
    assert sum(sum(each["price"].values()) for each in traffic.values()) == pytest.approx(
        found.results.price["traffic"]
    )
    assert found.results.outcomes.keys() <= {"finished", "rejected"}
    assert found.results.outcomes["finished"] >= 1190


def test_one_host_is_what_there_is_without_the_table() -> None:
    settings = [[], ["hosts.pd=1", "hosts.prfaas=1", 'hosts.bandwidth="1Gbps"']]
    runs = [run(short(EXAMPLES / "mooncake.toml", each)) for each in settings]
    assert runs[0].results.digest == runs[1].results.digest


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("hosts.pd=9", "hosts.pd is 9 of 8 instances; each host needs one"),
        ("hosts.prfaas=5", "hosts.prfaas is 5 of 4 instances; each host needs one"),
        ("hosts.pd=0", "greater than or equal to 1"),
        (
            'failure=[{kind="pool", at="1s", duration="1s", cluster="H20 cluster", index=4}]',
            "failure of pool host 4: there are 4, counted from 0",
        ),
    ],
)
def test_hosts_that_cannot_be_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scenario(EXAMPLES / "hosts.toml", [setting])
