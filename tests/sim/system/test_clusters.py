"""Several PrfaaS clusters: links, prices, failures, prefixes that move, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prfaas.core.control.replication import CopySettings
from prfaas.core.request.events import Outcome
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.policies import Bandwidth, PolicyName
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
    ClusterSetup,
    Failure,
    FailureKind,
    LinkSetup,
    PlacementSetup,
    RoutingSetup,
    Setup,
)
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES, MS, linear_costs, requests_at, system

S = NS_PER_S
BLOCKS = BlockSetup(tokens=100)
ROOM = CacheSetup(None)


def two_clusters(
    *, near: LinkSetup, far: LinkSetup, policy: PolicyName = PolicyName.REMOTE
) -> Setup:
    base = system(policy=policy)
    clusters = [
        ClusterSetup(name, 1, base.costs, link) for name, link in (("near", near), ("far", far))
    ]
    return replace(base, prfaas=tuple(clusters))


def played(setup: Setup, requests: list[Request]) -> Simulation:
    simulation = Simulation(setup, requests)
    simulation.run()
    check(simulation)
    return simulation


def where(simulation: Simulation) -> list[int]:
    """Bytes that went over each link."""
    return [round(t.bytes_by_purpose[Purpose.HANDOFF]) for t in traffic_of(simulation)]


def prompt(index: int, at_ns: int, num_blocks: int, extra: int = 50) -> Request:
    return Request(index, at_ns, num_blocks * 100 + extra, 1, tuple(range(num_blocks)))


# Links


def test_the_faster_link_is_taken_and_the_other_when_it_is_cut() -> None:
    cut = Failure(FailureKind.LINK, 20 * S, 20 * S, cluster="near")
    setup = two_clusters(near=LinkSetup(1e9), far=LinkSetup(1e8, rtt_ns=50 * MS))
    setup = replace(setup, failures=(cut,), signals=replace(setup.signals, interval_ns=S))
    simulation = played(setup, requests_at([2 * S, 30 * S, 50 * S], [1000] * 3))
    assert where(simulation) == [2_000_000, 1_000_000]


def test_a_busy_cluster_leaves_requests_to_the_other() -> None:
    setup = two_clusters(near=LinkSetup(1e9), far=LinkSetup(1e9))
    setup = replace(setup, signals=replace(setup.signals, interval_ns=S))
    simulation = played(setup, requests_at([2 * S] * 6, [1000] * 6))
    assert where(simulation) == [3_000_000, 3_000_000]


def test_bytes_have_a_price_in_the_choice_of_the_cluster() -> None:
    # 1 MB at 1e6 per TB costs 1; at 0.5 per second that is worth 2 s.
    setup = two_clusters(near=LinkSetup(1e9, price_per_tb=1e6), far=LinkSetup(1e9, rtt_ns=S))
    setup = replace(setup, signals=replace(setup.signals, interval_ns=S))
    assert where(played(setup, requests_at([2 * S], [1000]))) == [1_000_000, 0]
    priced = replace(setup, placement=PlacementSetup(second_price=0.5))
    assert where(played(priced, requests_at([2 * S], [1000]))) == [0, 1_000_000]


def test_traffic_is_priced_by_link_and_purpose() -> None:
    setup = two_clusters(near=LinkSetup(1e9, price_per_tb=20.0), far=LinkSetup(1e6))
    simulation = played(setup, requests_at([0], [1000]))
    near, far = traffic_of(simulation)
    assert near.price_by_purpose[Purpose.HANDOFF] == pytest.approx(1e6 / 1e12 * 20)
    assert (near.network, far.network) == ("near", "far")
    assert sum(far.price_by_purpose.values()) == 0


# Prefixes


def pulling(policy: PolicyName, bits_per_s: float, **more: object) -> Setup:
    base = system(policy=policy, threshold=100_000, bits_per_s=bits_per_s, cache=ROOM)
    routing = RoutingSetup(policy, 100_000, Bandwidth.ABUNDANT)
    signals = replace(base.signals, interval_ns=S)
    setup = replace(base, blocks=BLOCKS, cache=ROOM, routing=routing, signals=signals)
    return replace(setup, placement=PlacementSetup(pulls=True), **more)  # type: ignore[arg-type]


def with_prefix_remote(setup: Setup, requests: list[Request]) -> Simulation:
    """Ten blocks lie in the PrfaaS cluster only."""
    simulation = Simulation(setup, requests)
    simulation.front.caches.pools["prfaas"].store(range(10))
    simulation.run()
    check(simulation)
    return simulation


@pytest.mark.parametrize("policy", [PolicyName.PAPER, PolicyName.ADAPTIVE])
def test_a_prefix_is_pulled_and_prefill_does_the_rest(policy: PolicyName) -> None:
    setup = pulling(policy, 8e8)
    simulation = with_prefix_remote(setup, [prompt(0, 5 * S, 10)])
    (request,) = simulation.requests
    # 1 MB at 100 MB/s, then 50 tokens at 1 ms.
    assert request.first_token_at_ns == 5 * S + 10 * MS + 50 * MS
    assert request.num_hit_tokens == 1000
    (traffic,) = traffic_of(simulation)
    assert traffic.bytes_by_purpose[Purpose.PULL] == pytest.approx(1_000_000)
    assert traffic.bytes_by_purpose[Purpose.HANDOFF] == 0
    assert simulation.front.caches.pools["pd"].num_held(range(10)) == 10


def test_a_slow_link_makes_adaptive_recompute_and_the_abundant_rule_leave_a_late_pull() -> None:
    # 1 MB at 1 Mbit/s is 8 s; computing it is 1 s. The first look is at 1.26 times the prediction.
    adaptive, paper = (
        with_prefix_remote(pulling(policy, 1e6), [prompt(0, 5 * S, 10)]).requests[0]
        for policy in (PolicyName.ADAPTIVE, PolicyName.PAPER)
    )
    assert adaptive.ttft_ns == 1050 * MS
    # One block of 100 tokens has come by then.
    assert paper.ttft_ns == 1323 * MS + 950 * MS


def test_a_pull_that_is_late_keeps_what_arrived_and_the_rest_is_computed() -> None:
    # Half of the second that the pull takes passes; five blocks are there.
    cut = Failure(FailureKind.LINK, 5 * S + 555 * MS, 100 * S)
    setup = pulling(PolicyName.PAPER, 8e6, failures=(cut,))
    simulation = with_prefix_remote(setup, [prompt(0, 5 * S, 10)])
    (request,) = simulation.requests
    assert request.num_hit_tokens == 500
    # It is found late at 1.26 times its prediction, long before the silence is noticed.
    assert request.first_token_at_ns == 5 * S + 1323 * MS + 550 * MS


def test_a_hot_prefix_is_copied_once_to_the_pd_cluster_that_misses_it() -> None:
    # A prefill takes 10 s there, so the copy is all that the later requests can find.
    base = pulling(PolicyName.LOCAL, 8e8)
    costs = linear_costs(local_ns=10 * MS)
    base = replace(base, num_prefill=5, costs=costs, prfaas=(replace(base.prfaas[0], costs=costs),))
    signals = replace(base.signals, loop_interval_ns=S)
    copies = PlacementSetup(copies=CopySettings(2_000_000))
    setup = replace(base, placement=copies, signals=signals)
    requests = [
        Request(i, 5 * S + i * 400 * MS, 1050, 1, (*range(8), 100 + i, 200 + i)) for i in range(5)
    ]
    simulation = Simulation(setup, requests)
    simulation.front.caches.pools["prfaas"].store(range(8))
    simulation.run()
    check(simulation)
    hits = [request.num_hit_tokens for request in simulation.requests]
    assert hits == [0, 0, 0, 800, 800]
    (traffic,) = traffic_of(simulation)
    assert traffic.bytes_by_purpose[Purpose.COPY] == pytest.approx(800_000)


# Tiers


def tiered(disk_bits_per_s: float) -> Setup:
    cache = CacheSetup(10, 100, disk_bits_per_s)
    return replace(system(), blocks=BLOCKS, cache=cache)


def three_turns() -> list[Request]:
    """The same prompt before and after another one that takes all host memory."""
    other = Request(1, 5 * S, 1050, 1, tuple(range(50, 60)))
    return [prompt(0, 0, 10), other, prompt(2, 10 * S, 10)]


def test_a_hit_on_disk_costs_its_bytes_and_is_skipped_when_computing_is_faster() -> None:
    # 1 MB from disk at 8 Mbit/s is 1 s, at 80 Mbit/s 0.1 s; computing it takes 1 s.
    fast, slow = (played(tiered(rate), three_turns()).requests[2] for rate in (8e7, 8e6))
    assert fast.ttft_ns == 100 * MS + 50 * MS
    assert fast.num_hit_tokens == 1000
    assert slow.ttft_ns == 1050 * MS
    assert slow.num_hit_tokens == 0


@pytest.mark.parametrize(("keeps_disk", "hit"), [(True, 1000), (False, 0)])
def test_a_pool_that_fails_loses_its_memory_and_maybe_its_disk(keeps_disk: bool, hit: int) -> None:
    failure = Failure(FailureKind.POOL, 8 * S, S, cluster="pd", keeps_disk=keeps_disk)
    setup = replace(tiered(8e7), failures=(failure,))
    requests = [*three_turns(), Request(3, 12 * S, 1050, 1, tuple(range(50, 60)))]
    simulation = played(setup, requests)
    assert simulation.requests[2].num_hit_tokens == hit
    assert simulation.requests[3].num_hit_tokens == 0


def test_nobody_reads_an_index_that_is_being_rebuilt() -> None:
    failure = Failure(FailureKind.POOL, 8 * S, S, 0, 0.0, "pd", keeps_disk=True, rebuild_ns=5 * S)
    setup = replace(tiered(8e7), failures=(failure,))
    requests = [*three_turns(), prompt(3, 15 * S, 10)]
    simulation = played(setup, requests)
    # Until 14 s the disk's blocks are there, but the gateway does not know.
    assert [r.num_hit_tokens for r in simulation.requests[2:]] == [0, 1000]


def test_a_pool_that_fails_cuts_its_links_for_as_long() -> None:
    failure = Failure(FailureKind.POOL, 5 * S, 10 * S, cluster="prfaas")
    setup = replace(system(policy=PolicyName.REMOTE), failures=(failure,))
    simulation = played(setup, requests_at([4 * S, 8 * S, 20 * S], [3000] * 3))
    reasons = [r.decision.reason for r in simulation.requests if r.decision]
    assert reasons == [Reason.ALWAYS_REMOTE, Reason.LINK_DOWN, Reason.ALWAYS_REMOTE]
    assert simulation.reactions.fallbacks == {"transfer/link_lost": 1}


# Failure is a miss


@pytest.mark.parametrize(("state_bytes", "new"), [(0, 2050), (1000, 3050)])
def test_decode_keeps_the_attention_blocks_that_arrived(state_bytes: int, new: int) -> None:
    # A megabyte a second; the first chunk is there after 2 s, the second at 3 s is cut off.
    cut = Failure(FailureKind.LINK, 2 * S, 60 * S)
    costs = linear_costs(state_bytes=state_bytes)
    base = system(policy=PolicyName.REMOTE, bits_per_s=8e6, costs=costs)
    setup = replace(base, blocks=BLOCKS, failures=(cut,))
    simulation = played(setup, [Request(0, 0, 3050, 1)])
    (request,) = simulation.requests
    assert request.num_new_tokens == new
    assert request.first_token_at_ns == 2 * S + 5 * S + new * MS


# All together


@settings(max_examples=40)
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
            kind=st.sampled_from([FailureKind.LINK, FailureKind.POOL, FailureKind.PRFAAS]),
            at_ns=st.integers(0, 20 * S),
            for_ns=st.integers(1, 20 * S),
            cluster=st.sampled_from(["near", "far"]),
            keeps_disk=st.booleans(),
            rebuild_ns=st.integers(0, 5 * S),
        ),
        max_size=3,
        unique_by=lambda f: (f.kind, f.cluster),
    ),
    room=st.integers(0, 2),
    own=st.sampled_from([0, 15]),
    bits_per_s=st.sampled_from([1e6, 1e8]),
)
@example(
    rows=[(0, 1, 0)],
    policy=PolicyName.REMOTE,
    failures=[
        Failure(FailureKind.PRFAAS, 0, 1, cluster="near"),
        Failure(FailureKind.PRFAAS, S // 2 + 1, 1, cluster="far"),
    ],
    room=0,
    own=0,
    bits_per_s=1e6,
)
def test_every_run_with_everything_passes_the_checkers_and_is_repeatable(
    rows: list[tuple[int, int, int]],
    policy: PolicyName,
    failures: list[Failure],
    room: int,
    own: int,
    bits_per_s: float,
) -> None:
    base = system(policy=policy, threshold=2000, costs=linear_costs(local_ns=2 * MS))
    cache = CacheSetup(20, 40, 1e9, own)
    setup = replace(
        base,
        prfaas=tuple(
            ClusterSetup(name, 1, base.costs, LinkSetup(bits_per_s, rtt_ns), cache)
            for name, rtt_ns in (("near", 0), ("far", 50 * MS))
        ),
        cache=cache,
        blocks=BlockSetup(100, room),
        failures=tuple(failures),
        routing=replace(base.routing, bandwidth=Bandwidth.ABUNDANT),
        placement=PlacementSetup(pulls=True, copies=CopySettings(10**6, num_uses_min=1.0)),
        signals=replace(base.signals, interval_ns=S, loop_interval_ns=2 * S),
    )
    # A request with which the instances of both clusters died is refused for a time.
    num_deaths = sum(failure.kind is FailureKind.PRFAAS for failure in failures)
    might_be_refused = {Outcome.FAILED} if num_deaths == 2 else set()
    digests = []
    for _ in range(2):
        at_ns, requests = 0, []
        for i, (gap_ns, num_blocks, kind) in enumerate(rows):
            at_ns += gap_ns
            blocks = tuple(1000 * kind + n for n in range(num_blocks))
            requests.append(Request(i, at_ns, num_blocks * 100 + 1, 3, blocks))
        simulation = played(setup, requests)
        outcomes = {r.outcome for r in simulation.requests}
        assert outcomes <= {Outcome.FINISHED} | might_be_refused
        for pool in simulation.front.caches.pools.values():
            used = pool._cache.used_blocks
            assert used[0] <= 20
            assert used[1] <= 40
        devices = simulation.front.caches.devices
        assert devices.num_instances == (3 if own else 0)
        assert all(memory.used_blocks <= own for memory in devices._caches.values())
        digests.append(digest(simulation))
    assert digests[0] == digests[1]


# Files


def test_an_example_with_two_clusters_uses_both_links() -> None:
    scenario = load_scenario(EXAMPLES / "two-clusters.toml", ['workload.duration="10min"'])
    found = run(scenario)
    assert len(found.results.traffic) == 2
    assert all(t["bytes"]["handoff"] > 0 for t in found.results.traffic.values())
    paid = sum(sum(t["price"].values()) for t in found.results.traffic.values())
    assert paid == pytest.approx(found.results.price["traffic"])
    assert found.simulation.requests[0].decision is not None
    assert {r.decision.path for r in found.simulation.requests if r.decision} == set(Path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            'failure=[{kind="pool", at="1s", duration="1s", cluster="nowhere"}]',
            "failure of pool in cluster 'nowhere': there are 'H200 cluster', 'H20 cluster'",
        ),
        (
            'failure=[{kind="link", at="1s", duration="1s", cluster="H20 cluster"}]',
            "failure of link in cluster 'H20 cluster': there are 'H200 cluster'",
        ),
        ('placement.half_life="0s"', "greater than 0"),
        ("placement.pul=true", "nearest valid one is 'pull'"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scenario(EXAMPLES / "paper-poisson.toml", [setting])
