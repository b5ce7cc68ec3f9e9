"""The list of blocks of a transfer is what both ends work out, whatever cache groups there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout, block_key
from prfaas.core.kv.shipping import (
    DIGEST_BYTES,
    NamedBlocks,
    is_worth_sending,
    manifest_digest,
    manifest_of,
    manifest_of_keys,
    shipped_bytes,
)

LAYOUT = Layout(
    b"L" * 32,
    16,
    "0",
    (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 100),
        CacheGroup(1, GroupKind.SLIDING_WINDOW, 32, 10, window_tokens=96),
        CacheGroup(2, GroupKind.LINEAR_STATE, 64, 1),
    ),
)
HASHES = [number.to_bytes(32, "big") for number in range(1, 65)]


def wanted(have: int, final: int) -> list[BlockKey]:
    """The same, block by block, as engines decide it."""
    return [
        block_key(LAYOUT, group, HASHES, end)
        for group in LAYOUT.groups
        for end in range(group.tokens_per_block, 1024 + 1, group.tokens_per_block)
        if is_worth_sending(group, end, have_tokens=have, final_tokens=final)
    ]


@given(st.integers(0, 16), st.integers(0, 16))
def test_the_list_names_exactly_the_blocks_that_are_worth_sending(have: int, final: int) -> None:
    have, final = have * 64, final * 64
    manifest = manifest_of(LAYOUT, HASHES, have_tokens=have, final_tokens=final)
    keys = wanted(have, final)
    assert manifest == manifest_of_keys(keys)
    sizes = {group.index: group.block_bytes for group in LAYOUT.groups}
    assert shipped_bytes(LAYOUT, have_tokens=have, final_tokens=final) == sum(
        sizes[key.group] for key in keys
    )
    named = NamedBlocks(manifest)
    assert all(key in named for key in keys)
    assert BlockKey(0, b"x" * 32) not in named
    assert BlockKey(9, HASHES[0]) not in named
    if keys:
        assert BlockKey(keys[0].group + 1, keys[0].block_hash) not in named or len(keys) > 1


def test_a_digest_has_one_size_and_tells_every_change() -> None:
    whole = manifest_of(LAYOUT, HASHES, have_tokens=0, final_tokens=1024)
    digest = manifest_digest(whole)
    assert len(digest) == DIGEST_BYTES
    swapped = {0: whole[1], 1: whole[0], 2: whole[2]}
    reordered = whole | {0: whole[0][32:] + whole[0][:32]}
    shorter = whole | {0: whole[0][:-32]}
    for other in (swapped, reordered, shorter, {}, {0: whole[0]}):
        assert manifest_digest(other) != digest
    assert manifest_digest(whole | {7: b""}) == digest


def test_a_chain_that_is_too_short_names_nothing() -> None:
    with pytest.raises(ValueError, match="cache group 0 has 64 blocks"):
        manifest_of(LAYOUT, HASHES[:60], have_tokens=0, final_tokens=1024)
