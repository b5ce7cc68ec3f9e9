"""The instance that is selected for a prefill is the one that a scan of all instances finds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.hosts import FetchTo
from prfaas.core.dispatch.instances import Instance, PrefillInstances
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.scoring import (
    MIXED_WEIGHTS,
    PREFILL_WEIGHTS,
    Best,
    Candidate,
    Weights,
    pick,
    score,
)
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
)
from prfaas.core.kv.source_sets import PrefixHits
from prfaas.core.routing.decision import Reason
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S
from tests.core.dispatching import MS, costs
from tests.instructions import counted

NOW = 10 * NS_PER_S
NAMES = [f"i{number:02}" for number in range(12)]
INSTANCES = st.lists(
    st.tuples(
        st.sampled_from("xyz"),  # pool
        st.sampled_from([b"a", b"b", None]),  # layout
        st.sampled_from([500, 2000]),  # longest prompt
        st.integers(0, 5),  # requests that it decodes
        st.integers(0, 3),  # seconds of work
        st.booleans(),  # whether its load is known
        st.booleans(),  # whether it has no cores of its own
    ),
    max_size=12,
)


@given(
    rows=INSTANCES,
    hits=st.dictionaries(st.sampled_from(["x", "y", "z", *NAMES]), st.integers(0, 1000)),
    avoid=st.sampled_from(["", "i00", "i03"]),
    weights=st.sampled_from([Weights(), PREFILL_WEIGHTS, MIXED_WEIGHTS]),
)
def test_the_choice_is_that_of_a_scan_of_all_instances(
    rows: list[tuple[str, bytes | None, int, int, int, bool, bool]],
    hits: dict[str, int],
    avoid: str,
    weights: Weights,
) -> None:
    names = NAMES[: len(rows)]
    device = {name: hits.get(name, 0) for name in names}
    members = [
        ClusterMember(name, row[0], frozenset({"p0"} if row[6] else ()))
        for name, row in zip(names, rows, strict=True)
    ]
    stage = PrefillInstances(members, NS_PER_S, weights)
    for name, (_, layout, longest, num_open, work_s, known, _) in zip(names, rows, strict=True):
        instance = stage.instances[name]
        instance.layout_id, instance.num_tokens_max = layout, longest
        for _ in range(num_open):
            stage.enter(name)
        stage.book.report(name, NOW if known else 1, 0)
        if work_s:
            stage.book.dispatch(name, 1, NOW, work_s * NS_PER_S)
    everybody = [
        Candidate(
            name,
            name != avoid,
            wait_ns,
            max(hits.get(stage.instances[name].pool, 0), device[name]),
            0,
            rows[int(name[1:])][3],
            stage.instances[name].num_tokens_max,
            stage.instances[name].layout_id == b"a",
            device_tokens=device[name],
            adds_cores=not rows[int(name[1:])][6],
        )
        for name, wait_ns in stage.book.in_order(NOW)
    ]
    most = max(hits.values(), default=0)
    wanted = pick(
        everybody,
        1000,
        hit_tokens_max=most,
        weights=weights,
        device_tokens_max=max(device.values(), default=0),
    )
    arrival = Arrival(1, 1000, 1000, hits, avoid=avoid)
    found = stage.pick(arrival, NOW, lambda i: (i.layout_id == b"a", None, not i.within))
    assert (found.candidate, found.obstacle) == (wanted.candidate, wanted.obstacle)


POOLS = "abcdef"
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["dispatch", "done", "enter", "leave", "ready", "report", "describe", "move"]
        ),
        st.integers(0, 23),
        st.integers(0, 4),
    ),
    max_size=120,
)
PREFIXES = st.dictionaries(
    st.sampled_from([*POOLS, *(f"i{number:02}" for number in range(24))]),
    st.sampled_from([0, 100, 100, 500, 900]),
)


def after(events: list[tuple[str, int, int]], weights: Weights, tried_max: int) -> PrefillInstances:
    """24 instances in pools of four after some history."""
    pools = {f"i{number:02}": POOLS[number % len(POOLS)] for number in range(24)}
    members = [ClusterMember(*each) for each in pools.items()]
    stage = PrefillInstances(members, 2 * NS_PER_S, weights, tried_max=tried_max)
    num_open = dict.fromkeys(pools, 0)
    for job, (event, number, value) in enumerate(events):
        name, now_ns = f"i{number:02}", NOW - NS_PER_S + job * NS_PER_S // 200
        if event == "dispatch":
            stage.book.dispatch(name, job, now_ns, value * NS_PER_S // 10)
        elif event == "done" and stage.book.num_jobs(name):
            stage.book.done(name, next(iter(stage.book.waiting(name, 99)), -1), now_ns)
        elif event == "enter":
            stage.enter(name)
            num_open[name] += 1
        elif event == "leave" and num_open[name]:
            stage.leave(name)
            num_open[name] -= 1
        elif event == "ready":
            stage.book.set_ready(name, ready=value > 0, now_ns=now_ns)
        elif event == "report":
            stage.book.report(name, now_ns if value else now_ns - 2 * NS_PER_S, value)
        elif event == "describe":
            stage.instances[name].num_tokens_max = 500 if value == 0 else 2000
            stage.instances[name].layout_id = (b"a", b"a", b"b", None, b"a")[value]
        elif event == "move" and not stage.book.num_jobs(name) and not num_open[name]:
            stage.remove(name, now_ns)
            stage.add(ClusterMember(name, POOLS[value]))
            stage.instances[name].num_tokens_max = 2000
            stage.book.set_ready(name, ready=True, now_ns=now_ns)
    return stage


def fetched(
    arrival: Arrival, *, plan: bool, cut: set[str], bits_per_s: float = 1e7, spread: bool = False
) -> FetchTo | None:
    """Prefixes that hosts fetch from each other; no link leads to the pools that are cut off.

    Rates differ by source, with `spread` by destination as well.
    """
    members = tuple(ClusterMember(f"p{pool}", pool) for pool in POOLS)
    local = LocalCluster("pd", members, costs=costs() if plan else None)
    made = Dispatcher(local, [], DispatchSettings(PolicyName.LOCAL, 1000))
    for rate, source in enumerate(POOLS, 1):
        for factor, destination in enumerate(POOLS, 1):
            made.set_link(source, destination, up=destination not in cut)
            speed = bits_per_s * rate * (factor if spread else 1)
            report = LinkReport(NOW - MS, speed, 0, 0, rate * MS)
            made.links.report(source, destination, report)
    return made._routes.hosts.fetch(arrival, NOW)


@given(
    events=EVENTS,
    hits=PREFIXES,
    hints=PREFIXES,
    pulls=st.sampled_from(["no", "by plan", "without plan"]),
    cut=st.sets(st.sampled_from(POOLS)),
    bits_per_s=st.sampled_from([1e7, 1e6, 1e5]),
    spread=st.booleans(),
    weights=st.sampled_from([Weights(), PREFILL_WEIGHTS, MIXED_WEIGHTS]),
    tried_max=st.integers(0, 4),
    together=st.booleans(),
)
def test_a_search_of_many_instances_chooses_as_a_scan_does(
    events: list[tuple[str, int, int]],
    hits: dict[str, int],
    hints: dict[str, int],
    pulls: str,
    cut: set[str],
    bits_per_s: float,
    spread: bool,
    weights: Weights,
    tried_max: int,
    together: bool,
) -> None:
    stage = after(events, weights, tried_max)
    arrival = Arrival(1, 1000, 1000, hits, hints=hints, avoid="i03", shippable_tokens=999)
    fetch = None
    if pulls != "no":
        plan = pulls == "by plan"
        fetch = fetched(arrival, plan=plan, cut=cut, bits_per_s=bits_per_s, spread=spread)

    def reach_of(instance: Instance) -> tuple[bool, Reason | None, bool]:
        cause = Reason.LINK_DOWN if instance.pool in cut else None
        return instance.layout_id != b"b", cause, True

    reach = None if fetch else reach_of
    wanted = stage.pick(arrival, NOW, reach, fetch)
    if together:
        arrival = arrival._replace(hits=grouped(hits))
    found = stage.search(arrival, NOW, reach, fetch, lambda: cut.issuperset(stage.pools))
    assert (found.candidate, found.obstacle) == (wanted.candidate, wanted.obstacle)


def grouped(hits: Mapping[str, int]) -> PrefixHits:
    """Prefixes as the index of prefixes has them: their holders together."""
    numbers = {name: number for number, name in enumerate(hits)}
    by_length: dict[int, int] = {}
    for name, num_tokens in hits.items():
        by_length[num_tokens] = by_length.get(num_tokens, 0) | 1 << numbers[name]
    by_length.pop(0, None)
    return PrefixHits(sorted(by_length.items(), reverse=True), numbers)


def mixed(num_instances: int, draw: Random, *, are_idle: bool) -> PrefillInstances:
    """Instances that prefill and decode, eight to a pool: all are busy, or just the one that
    decodes least."""
    members = [ClusterMember(f"i{n:04}", f"p{n // 8:03}") for n in range(num_instances)]
    stage = PrefillInstances(members, NS_PER_S, MIXED_WEIGHTS)
    for name in stage.instances:
        stage.book.report(name, NOW, 0)
        is_busy = not are_idle or name == "i0001"
        work_ns = draw.randrange(NS_PER_S, 3 * NS_PER_S) if is_busy else draw.randrange(NS_PER_S)
        stage.book.dispatch(name, 1, NOW - NS_PER_S, work_ns)
        for _ in range(0 if are_idle and is_busy else draw.randrange(2, 9)):
            stage.enter(name)
    return stage


@pytest.mark.parametrize("are_idle", [False, True])
@pytest.mark.parametrize("longest", [[], [900], [900, 500, 500, 300, 300, 100]])
def test_of_many_instances_that_decode_the_best_one_is_found_without_a_walk(
    longest: list[int], are_idle: bool
) -> None:
    draw, steps = Random(1), list[int]()
    for num_instances in (64, 1024) * 12:
        stage = mixed(num_instances, draw, are_idle=are_idle)
        names = draw.sample([*stage.instances, *stage.by_pool], len(longest))
        arrival = Arrival(1, 1000, 1000, dict(zip(names, longest, strict=True)))

        def rated(
            place: tuple[int, str], stage: PrefillInstances = stage, arrival: Arrival = arrival
        ) -> tuple[float, tuple[int, str]]:
            name = place[1]
            each = stage.candidate(arrival, name, stage.book.wait_ns(name, NOW), None, None)
            return -score(each, 1000, MIXED_WEIGHTS), place

        found, num_steps = counted(partial(stage.pick, arrival, NOW))
        assert found.candidate is not None
        assert found.candidate.name == min(stage.book.order, key=rated)[1]
        steps.append(num_steps)
    few, many = sum(steps[::2]), sum(steps[1::2])
    assert many < 2 * few, (few, many)


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize(
    ("bits_per_s", "spread", "cut"),
    [(1e7, False, ""), (1e7, True, ""), (1e5, False, ""), (1e7, False, POOLS), (1e7, True, "cde")],
)
def test_a_search_looks_at_few_pools_where_the_holder_of_the_prefix_is_busy(
    plan: bool, bits_per_s: float, spread: bool, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = {f"i{number:02}": POOLS[number % len(POOLS)] for number in range(60)}
    members = [ClusterMember(*each) for each in pools.items()]
    stage = PrefillInstances(members, 2 * NS_PER_S, scanned_max=len(pools))
    for name, pool in pools.items():
        stage.book.report(name, NOW, 0)
        if pool == "f":
            stage.book.dispatch(name, 1, NOW, 3 * NS_PER_S)
    arrival = Arrival(1, 1000, 1000, {"f": 900}, shippable_tokens=999)
    fetch = fetched(arrival, plan=plan, cut={*cut}, bits_per_s=bits_per_s, spread=spread)
    looked_at, look = list[Candidate](), Best.look

    def counted(best: Best, candidate: Candidate, place: tuple[int, str]) -> None:
        looked_at.append(candidate)
        look(best, candidate, place)

    monkeypatch.setattr(Best, "look", counted)
    found = stage.search(arrival, NOW, None, fetch)
    assert found.candidate == stage.pick(arrival, NOW, None, fetch).candidate
    assert len({pools[candidate.name] for candidate in looked_at}) <= 3


@pytest.mark.parametrize("plan", [True, False])
def test_a_search_chooses_as_a_scan_does_where_prefixes_are_fetched_over_unequal_links(
    plan: bool,
) -> None:
    draw = Random(1)
    for _ in range(400):
        held = draw.sample(POOLS, draw.randint(1, 3))
        hits = {pool: draw.choice([100, 100, 500, 900]) for pool in held}
        stage = PrefillInstances(
            [ClusterMember(f"i{n:02}", POOLS[n % 6]) for n in range(24)], NS_PER_S
        )
        for number, (name, instance) in enumerate(stage.instances.items()):
            stage.book.report(name, NOW if draw.random() < 0.9 else 1, 0)
            wait_ns = draw.choice([0, 0, MS, 50 * MS, 200 * MS, NS_PER_S])
            wait_ns = 3 * NS_PER_S if instance.pool in hits and draw.random() < 0.8 else wait_ns
            if wait_ns:
                stage.book.dispatch(name, number, NOW, wait_ns)
        arrival = Arrival(1, 1000, 1000, hits, shippable_tokens=999)
        cut = {*draw.sample(POOLS, draw.randint(0, 4))}
        bits_per_s = draw.choice([1e8, 1e7, 3e6, 1e6, 1e5])
        spread = draw.random() < 0.5
        fetch = fetched(arrival, plan=plan, cut=cut, bits_per_s=bits_per_s, spread=spread)
        wanted = stage.pick(arrival, NOW, None, fetch)
        assert stage.search(arrival, NOW, None, fetch).candidate == wanted.candidate
