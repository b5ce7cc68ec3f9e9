"""Links of pools follow their engines, and an event concerns one pool only."""

from __future__ import annotations

from itertools import permutations, product

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.membership.members import PoolLinks

CLUSTERS = {"a": "pd", "b": "pd", "c": "far", "d": "far", "e": "pd-2"}
HOME = {"pd", "pd-2"}


def expected(engines: dict[str, str]) -> set[tuple[str, str]]:
    pools = set(engines.values())
    local = [pool for pool in pools if CLUSTERS[pool] in HOME]
    remote = [pool for pool in pools if CLUSTERS[pool] not in HOME]
    within = {ends for ends in permutations(pools, 2) if len({CLUSTERS[e] for e in ends}) == 1}
    return set(product(remote, local)) | within


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcde")), max_size=40))
def test_links_equal_those_of_the_engines_that_are_there(events: list[tuple[int, str]]) -> None:
    links, engines = PoolLinks([], HOME), dict[str, str]()
    for number, pool in events:
        name = f"engine-{number}"
        if name in engines:
            links.remove(name, engines.pop(name))
        else:
            before = set(links.all())
            made = links.add(name, pool, CLUSTERS[pool])
            engines[name] = pool
            assert set(made) == set(links.all()) - before
        assert set(links.all()) == expected(engines)
        assert len(links.all()) == len(set(links.all()))
        for each in CLUSTERS:
            assert set(links.of(each)) == {ends for ends in links.all() if each in ends}
            there = {name for name, its in engines.items() if its == each}
            assert set(links.engines_of(each)) == there
