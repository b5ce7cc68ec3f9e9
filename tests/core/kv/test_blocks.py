"""Boundaries of a layout and names of blocks."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout, block_key

SPANS = st.lists(st.sampled_from([4, 8, 12, 16, 24]), min_size=1, max_size=3)


def layout_of(spans: list[int]) -> Layout:
    groups = tuple(
        CacheGroup(i, GroupKind.FULL_ATTENTION, span, 10) for i, span in enumerate(spans)
    )
    return Layout(b"L" * 32, 4, "0", groups)


@given(spans=SPANS, num_tokens=st.integers(0, 500))
def test_the_last_boundary_is_the_longest_one_below_the_prompt(
    spans: list[int], num_tokens: int
) -> None:
    layout = layout_of(spans)
    ends = [n for n in range(num_tokens) if all(n % span == 0 for span in spans)]
    assert layout.last_boundary(num_tokens) == (ends[-1] if ends else 0)


def test_a_block_is_named_by_the_hash_at_its_end() -> None:
    layout = layout_of([8])
    hashes = [bytes([number]) * 32 for number in range(4)]
    assert block_key(layout, layout.groups[0], hashes, 8) == BlockKey(0, hashes[1])
    assert block_key(layout, layout.groups[0], hashes, 16) == BlockKey(0, hashes[3])
