"""The blocks that a transfer ships, and their bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.shipping import is_worth_sending, shipped_bytes

FULL = CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1)
STATE = CacheGroup(1, GroupKind.LINEAR_STATE, 64, 1)
WINDOW = CacheGroup(2, GroupKind.SLIDING_WINDOW, 16, 1, 40)


@pytest.mark.parametrize(
    ("group", "end_token", "have", "final", "worth"),
    [
        (FULL, 16, 0, 128, True),
        (FULL, 128, 0, 128, True),
        (FULL, 144, 0, 128, False),
        (FULL, 64, 64, 128, False),
        (FULL, 80, 64, 128, True),
        (STATE, 64, 0, 128, False),
        (STATE, 128, 0, 128, True),
        (STATE, 192, 0, 128, False),
        (STATE, 128, 128, 128, False),
        (WINDOW, 80, 0, 128, False),
        (WINDOW, 96, 0, 128, True),
        (WINDOW, 128, 0, 128, True),
        (WINDOW, 96, 112, 128, False),
        (FULL, 16, 0, 0, False),
    ],
)
def test_only_what_the_other_side_can_use_is_sent(
    group: CacheGroup, end_token: int, have: int, final: int, worth: bool
) -> None:
    sent = is_worth_sending(group, end_token, have_tokens=have, final_tokens=final)
    assert sent is worth


GROUPS = st.builds(
    CacheGroup,
    st.just(0),
    st.sampled_from(GroupKind),
    st.sampled_from([4, 8, 12, 16]),
    st.integers(1, 1000),
    st.integers(1, 60),
)


@given(
    groups=st.lists(GROUPS, min_size=1, max_size=4),
    have=st.integers(0, 200),
    final=st.integers(0, 200),
)
def test_bytes_are_those_of_the_blocks_worth_sending(
    groups: list[CacheGroup], have: int, final: int
) -> None:
    one_by_one = sum(
        group.block_bytes
        for group in groups
        for end_token in range(group.tokens_per_block, 400, group.tokens_per_block)
        if is_worth_sending(group, end_token, have_tokens=have, final_tokens=final)
    )
    layout = Layout(b"L" * 32, 4, "0", tuple(groups))
    assert shipped_bytes(layout, have_tokens=have, final_tokens=final) == one_by_one
