"""A prefix that thousands of engines hold: decisions are those of named holders, and cost as much
as if few held it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.hosts import HOLDERS_MAX, RATED_MAX, Hosts
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
)
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.prefix_index import PrefixIndex, Tier
from prfaas.core.kv.source_sets import PrefixHits, SourceSet, longest_first, without
from prfaas.core.routing.decision import Reason
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S
from tests.instructions import counted

from .dispatching import costs, sent

NAMES = [f"s{number:03}" for number in range(90)]
HELD = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([16, 32, 96]))
SOME = st.sets(st.sampled_from([*NAMES, "unknown"]))
ENGINES_PER_POOL = 8
SPAN, NUM_SHARED, NUM_OWN = 512, 8, 4
LAYOUT = Layout(b"L" * 32, SPAN, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, SPAN, 2**16),))
PROMPT = SPAN * (NUM_SHARED + NUM_OWN) + 1
NOW = NS_PER_S


def grouped(held: Mapping[str, int]) -> PrefixHits:
    """The same prefixes, with the sources of each kept together."""
    numbers = {name: number for number, name in enumerate(reversed(NAMES))}
    by_length: dict[int, int] = {}
    for name, num_tokens in held.items():
        by_length[num_tokens] = by_length.get(num_tokens, 0) | 1 << numbers[name]
    return PrefixHits(sorted(by_length.items(), reverse=True), numbers)


@given(held=HELD, wanted=SOME)
def test_prefixes_that_are_kept_together_are_those_of_named_holders(
    held: dict[str, int], wanted: set[str]
) -> None:
    hits, sources = grouped(held), SourceSet(wanted)
    assert hits == held
    assert len(hits) == len(held)
    assert [hits.get(name, 0) for name in NAMES] == [held.get(name, 0) for name in NAMES]
    assert "unknown" not in hits
    assert list(longest_first(hits, sources)) == list(longest_first(held, sources))
    assert without(hits, sources) == without(held, sources)


@given(held=HELD, changes=st.lists(st.tuples(st.booleans(), st.sampled_from(NAMES))))
def test_sources_that_come_and_go_are_found(
    held: dict[str, int], changes: list[tuple[bool, str]]
) -> None:
    hits, sources = grouped(held), SourceSet(NAMES[::2])
    for comes, name in changes:
        (sources.add if comes else sources.discard)(name)
        assert list(longest_first(hits, sources)) == list(longest_first(held, sources))


def test_an_answer_outlives_the_sources_of_the_index() -> None:
    index = PrefixIndex()
    for name in NAMES:
        index.end_snapshot(name)
        index.add(name, LAYOUT.layout_id, keys(1))
    found, _ = index.hits(LAYOUT, hashes(1), PROMPT)
    assert isinstance(found, PrefixHits)
    index.forget(NAMES[0])
    index.end_snapshot("another one with its number")
    assert found == dict.fromkeys(NAMES, SPAN)
    assert "another one with its number" not in found


def site(
    num_hosts: int,
    *,
    num_holders: int | None = None,
    decoders: bool = False,
    links: bool = True,
    is_longer: bool = True,
) -> tuple[Dispatcher, PrefixIndex]:
    """Two clusters of so many hosts. Some or all of them hold the first blocks of every prompt, in
    their pools and engines, and unless told otherwise one of each a whole prompt."""
    index = PrefixIndex()
    clusters: list[list[ClusterMember]] = []
    for cluster in ("pd", "prfaas"):
        pools = [f"{cluster}-{number:03}" for number in range(num_hosts)]
        names = [(f"{pool}-e{n}", pool) for pool in pools for n in range(ENGINES_PER_POOL)]
        clusters.append([ClusterMember(*each) for each in names])
        holders = [*pools[-(num_holders or num_hosts) :]]
        holders += [name for name, pool in names if pool in holders]
        for name in (*pools, *(name for name, _ in names)):
            index.end_snapshot(name)
        for name in holders:
            tier = Tier.HOST if name in pools else Tier.DEVICE
            index.add(name, LAYOUT.layout_id, keys(NUM_SHARED), tier)
        if is_longer:
            index.add(pools[-1], LAYOUT.layout_id, keys(NUM_SHARED + NUM_OWN))
    local, remote = clusters
    decode = tuple(local[1::2]) if decoders else None
    made = Dispatcher(
        LocalCluster("pd", tuple(local[::2]) if decoders else tuple(local), decode, costs()),
        [RemoteCluster("prfaas", tuple(remote), costs(), link_bits_per_s=1e10)],
        DispatchSettings(PolicyName.ADAPTIVE, 1000),
    )
    for source in {member.pool for member in remote} if links else ():
        for pool in {member.pool for member in local}:
            made.set_link(source, pool, up=True)
    for members in clusters:
        for pool in {member.pool for member in members}:
            made.set_link(members[-1].pool, pool, up=True)
    return made, index


def keys(num_blocks: int) -> list[BlockKey]:
    return [BlockKey(0, each) for each in hashes(num_blocks)]


def hashes(num_blocks: int, family: int = 0) -> list[bytes]:
    """The first blocks are those of every family."""
    return [b"%030d-%d" % (n, family * (n >= NUM_SHARED)) for n in range(num_blocks)]


def arrival(index: PrefixIndex, family: int = 0) -> Arrival:
    prompt = hashes(NUM_SHARED + NUM_OWN, family)
    hits, _ = index.hits(LAYOUT, prompt, PROMPT)
    return Arrival(1, PROMPT, PROMPT, hits, shippable_tokens=PROMPT - 1, layout=LAYOUT)


def decide(made: Dispatcher, index: PrefixIndex, family: int) -> None:
    made.consider(arrival(index, family), NOW)


@pytest.mark.parametrize("decoders", [False, True])
@pytest.mark.parametrize("family", [0])
def test_a_decision_takes_no_more_steps_the_more_engines_hold_the_prefix(
    decoders: bool, family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    for num_holders in (9, 125):
        made, index = site(125, num_holders=num_holders, decoders=decoders)
        decide(made, index, family)
        with monkeypatch.context() as patch:
            # Nothing goes over all holders, in C either.
            patch.delattr(PrefixHits, "__iter__")
            _, num_steps = counted(partial(decide, made, index, family))
        steps.append(num_steps)
    few, many = steps
    assert many < 1.1 * few, steps


@pytest.mark.parametrize("num_holders", [1, 9, 40, 80, 125])
def test_a_decision_finds_the_few_hosts_that_hold_a_prefix_behind_all_others(
    num_holders: int,
) -> None:
    """None holds a longer one, and all holders come last among instances with equal wait."""
    made, index = site(125, num_holders=num_holders, is_longer=False)
    found = made.foresee(arrival(index), NOW)
    assert sent(found).prefill_pool >= f"pd-{125 - num_holders:03}"
    _, num_steps = counted(partial(decide, made, index, 0))
    assert num_steps < 60 * 1000, f"{num_steps} for 1,000 engines: a look at each takes 670,000"


@pytest.mark.parametrize("is_longer", [False, True])
def test_instances_without_a_link_to_decode_are_not_all_considered(is_longer: bool) -> None:
    made, index = site(125, num_holders=9, links=False, is_longer=is_longer)
    [option] = made.consider(arrival(index), NOW).options
    assert option.remote is None
    if not is_longer:  # That one is not worth a prefill elsewhere.
        assert option.facts.obstacle is Reason.LINK_DOWN
    _, num_steps = counted(partial(decide, made, index, 0))
    assert num_steps < 90 * 1000, f"{num_steps} for 1,000 engines: a look at each takes 470,000"


def test_the_choice_is_that_of_named_holders() -> None:
    for family in (0, 1):
        made, index = site(40)
        together = arrival(index, family)
        assert isinstance(together.hits, PrefixHits)
        named = together._replace(hits=dict(together.hits))
        assert sent(made.foresee(together, NOW)) == sent(made.foresee(named, NOW))


def test_of_many_hosts_few_are_considered_for_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    made, index = site(125, decoders=True)
    asked: list[str] = []
    hand_off_ns = Hosts.hand_off_ns

    def counted_one(hosts: Hosts, request: Arrival, source: str, pool: str, now: int) -> int | None:
        asked.append(pool)
        return hand_off_ns(hosts, request, source, pool, now)

    monkeypatch.setattr(Hosts, "hand_off_ns", counted_one)
    found = sent(made.foresee(arrival(index), NOW))
    holders = islice(longest_first(arrival(index).hits, made._routes.hosts.pools), HOLDERS_MAX)
    assert len(asked) <= RATED_MAX + HOLDERS_MAX + 1
    assert {found.prefill_pool, *(pool for _, pool in holders)} <= {*asked}
