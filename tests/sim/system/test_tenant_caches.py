"""Shares of tenants in simulated pools: a flood takes no block of another tenant's reserve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from prfaas.core.cache.prefix_cache import PrefixCache, SharedPrefixCache, TieredCache
from prfaas.core.cache.tenant_shares import Share
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import BlockSetup, CacheSetup
from prfaas.sim.workloads.requests import Trace
from prfaas.traces.reader import read_requests
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES, linear_costs, system

CONVERSATION = EXAMPLES / "traces" / "mooncake_conversation.jsonl.gz"
CAPACITY, RESERVE = 6_000, 0.5
NUM_REQUESTS, FLOOD = 600, 10
SHARES = {"quiet": Share(RESERVE)}


@pytest.fixture(scope="module")
def conversation() -> list[Request]:
    """The first requests of the trace with prompts of up to 19,000 tokens, two a second."""
    rows = Trace(read_requests(CONVERSATION).rows).requests(1)
    short = [row for row in rows if row.num_prompt_tokens < 19_000][:NUM_REQUESTS]
    return [
        replace(row, index=0, arrived_at_ns=at * NS_PER_S // 2, num_output_tokens=1, tenant="quiet")
        for at, row in enumerate(short)
    ]


def flooded(quiet: list[Request]) -> list[Request]:
    """The same requests, and ten times as many with unique prompts of the same lengths."""
    requests: list[Request] = []
    next_id = 10**9
    for request in quiet:
        requests.append(request)
        for number in range(1, FLOOD + 1):
            ids = tuple(range(next_id, next_id + len(request.block_ids)))
            next_id += len(ids)
            at = request.arrived_at_ns + number * NS_PER_S // (2 * FLOOD + 2)
            requests.append(replace(request, arrived_at_ns=at, block_ids=ids, tenant="flood"))
    return requests


def hit_ratio(
    requests: list[Request], capacity: int, shares: Mapping[str, Share] | None = None
) -> float:
    """Share of the quiet tenant's prompt tokens that a run of the simulator finds cached."""
    found = [replace(request, index=index) for index, request in enumerate(requests)]
    setup = replace(
        system(costs=linear_costs(local_ns=10, remote_ns=10)),
        cache=CacheSetup(host_blocks=capacity, shares=shares or {}),
        blocks=BlockSetup(512),
    )
    Simulation(setup, found).run()
    mine = [request for request in found if request.tenant == "quiet"]
    assert len(mine) == NUM_REQUESTS
    total = sum(request.num_prompt_tokens for request in mine)
    return sum(request.num_hit_tokens for request in mine) / total


def test_under_a_flood_a_tenant_hits_as_often_as_alone_with_its_reserve(
    conversation: list[Request],
) -> None:
    alone = hit_ratio(conversation, int(CAPACITY * RESERVE))
    both = flooded(conversation)
    shared = hit_ratio(both, CAPACITY, SHARES)
    without = hit_ratio(both, CAPACITY)
    assert shared >= alone - 0.02
    # What it would lose without a reserve.
    assert without < alone - 0.05


def test_a_flood_evicts_no_block_of_a_reserve(conversation: list[Request]) -> None:
    evicted: list[tuple[int, str]] = []
    cache = SharedPrefixCache(CAPACITY, 0, SHARES, lambda *one: evicted.append(one))
    for request in conversation[:100]:
        cache.tenant = "quiet"
        cache.store(request.block_ids)
    quiet = {key for request in conversation[:100] for key in request.block_ids}
    assert len(quiet) <= CAPACITY * RESERVE
    cache.tenant = "flood"
    for start in range(10**9, 10**9 + 10 * CAPACITY, 100):
        cache.store(range(start, start + 100))
    assert {tenant for _, tenant in evicted} == {"flood"}
    assert all(cache.holds(key) for key in quiet)
    assert cache.used_blocks == CAPACITY


def test_the_disk_keeps_a_reserve_of_what_memory_evicts() -> None:
    cache = TieredCache(10, 20, shares={"quiet": Share(0.5)})
    cache.store(range(15), tenant="quiet")
    for start in range(1000, 2000, 10):
        cache.store(range(start, start + 10), tenant="flood")
    assert cache.used_blocks == (10, 20)
    assert cache.leading_run(range(15)) == 15


def test_a_cache_with_shares_of_nobody_evicts_like_one_without(
    conversation: list[Request],
) -> None:
    plain = PrefixCache(500)
    shared = SharedPrefixCache(500, 0, {"nobody": Share(0.5)})
    for request in conversation[:300]:
        hit = plain.usable_hit(request.block_ids)
        assert shared.usable_hit(request.block_ids) == hit
        for cache in (plain, shared):
            cache.touch(request.block_ids, hit)
            cache.store(request.block_ids)
    assert plain.used_blocks == shared.used_blocks == 500


def test_a_cache_with_checkpoints_stays_within_its_capacity() -> None:
    cache = SharedPrefixCache(40, 4, {"a": Share(0.3, 0.5), "b": Share(0.2)})
    for number in range(200):
        cache.tenant = "abc"[number % 3]
        ids = range(1000 * number, 1000 * number + 5)
        cache.store(ids)
        assert cache.used_blocks <= 40
        if cache.usable_hit(ids):
            cache.touch(ids, 5)
    cache.clear()
    assert cache.used_blocks == 0
