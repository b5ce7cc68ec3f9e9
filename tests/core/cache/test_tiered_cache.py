"""Two tiers against a plain model; limits of each; what spills and what is promoted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.cache.prefix_cache import PrefixCache, TieredCache

PROMPTS = st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["store", "touch", "lose"]), PROMPTS), max_size=40)


@given(
    steps=STEPS,
    host=st.none() | st.integers(0, 20),
    disk=st.none() | st.integers(0, 20),
    room=st.integers(0, 2),
    probe=PROMPTS,
)
def test_no_tier_exceeds_its_limit_and_no_block_lies_in_both(
    steps: list[tuple[str, list[int]]],
    host: int | None,
    disk: int | None,
    room: int,
    probe: list[int],
) -> None:
    cache = TieredCache(host, disk, room)
    for action, blocks in steps:
        if action == "store":
            cache.store(blocks)
        elif action == "touch":
            cache.touch(blocks, len(blocks))
        else:
            cache.clear(keep_disk=True)
        for used, limit in zip(cache.used_blocks, (host, disk), strict=True):
            assert limit is None or used <= limit
        cache.validate()
    hit = cache.hit(probe)
    assert 0 <= hit.num_host_blocks <= hit.num_blocks <= len(probe)
    assert hit.num_disk_blocks <= hit.num_blocks


@given(steps=STEPS, host=st.none() | st.integers(1, 20), room=st.integers(0, 2), probe=PROMPTS)
def test_without_a_disk_it_is_the_plain_cache(
    steps: list[tuple[str, list[int]]], host: int | None, room: int, probe: list[int]
) -> None:
    tiered, plain = TieredCache(host, 0, room), PrefixCache(host, room)
    for action, blocks in steps:
        if action == "store":
            tiered.store(blocks)
            plain.store(blocks)
        elif action == "touch":
            tiered.touch(blocks, len(blocks))
            plain.touch(blocks, len(blocks))
        else:
            tiered.clear(keep_disk=True)
            plain.clear()
    assert tiered.hit(probe).num_blocks == plain.usable_hit(probe)
    assert tiered.used_blocks == (plain.used_blocks, 0)


@given(prompts=st.lists(PROMPTS, min_size=1, max_size=15), probe=PROMPTS)
def test_a_large_disk_loses_nothing_of_a_model_without_state(
    prompts: list[list[int]], probe: list[int]
) -> None:
    tiered, everything = TieredCache(3, None), PrefixCache()
    for blocks in prompts:
        tiered.store(blocks)
        everything.store(blocks)
    assert tiered.hit(probe).num_blocks == everything.usable_hit(probe)


def test_what_is_used_is_promoted() -> None:
    cache = TieredCache(2, 10)
    cache.store([1, 2])
    cache.store([3, 4])
    found = cache.hit([1, 2])
    assert (found.num_blocks, found.num_host_blocks, found.num_disk_blocks) == (2, 0, 2)
    cache.touch([1, 2], 2)
    assert cache.hit([1, 2]).num_disk_blocks == 0
    assert cache.hit([3, 4]).num_disk_blocks == 2


def test_a_checkpoint_spills_and_returns_with_its_blocks() -> None:
    cache = TieredCache(4, 10, checkpoint_blocks=2)
    cache.store([1, 2])
    cache.store([3, 4])
    found = cache.hit([1, 2, 9])
    assert (found.num_blocks, found.num_disk_blocks, found.reads_checkpoint) == (2, 2, True)
    cache.touch([1, 2], 2)
    assert not cache.hit([1, 2]).reads_checkpoint


@pytest.mark.parametrize(("keep", "blocks"), [(True, 2), (False, 0)])
def test_the_disk_outlives_a_restart_if_it_is_kept(keep: bool, blocks: int) -> None:
    cache = TieredCache(2, 10)
    cache.store([1, 2])
    cache.store([3, 4])
    cache.clear(keep_disk=keep)
    assert cache.hit([1, 2]).num_blocks == blocks
    assert cache.hit([3, 4]).num_blocks == 0


def test_without_its_state_a_prefix_is_held_but_not_usable() -> None:
    cache = TieredCache(10, 0, checkpoint_blocks=1)
    cache.store([1, 2], checkpoint=False)
    assert cache.hit([1, 2]).num_blocks == 0
    assert cache.used_blocks == (2, 0)
