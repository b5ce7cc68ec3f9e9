"""Blame: the pool that altered a block, not one that shipped it later or computed from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.integrity.suspicion import AlteredBlock, blamed

BLOCKS = st.lists(
    st.builds(
        AlteredBlock,
        st.integers(0, 5),
        st.sampled_from(["", "hostile", "honest", "third"]),
        st.booleans(),
    )
)


def test_the_sender_of_an_altered_block_is_to_blame() -> None:
    altered = [AlteredBlock(3, "hostile"), AlteredBlock(4, "hostile", is_inherited=True)]
    assert blamed(altered, is_complete=True) == {"hostile"}


def test_who_computed_from_an_altered_prefix_is_not() -> None:
    altered = [AlteredBlock(0, "hostile"), AlteredBlock(7, "honest", is_inherited=True)]
    assert blamed(altered, is_complete=True) == {"hostile"}


def test_who_passes_on_altered_blocks_behind_a_right_prefix_is() -> None:
    """Or a source would escape by marking its blocks as inherited."""
    altered = [AlteredBlock(7, "hostile", is_inherited=True)]
    assert blamed(altered, is_complete=True) == {"hostile"}
    assert blamed(altered, is_complete=False) == frozenset()


def test_own_blocks_are_no_ones_fault_behind_an_altered_prefix() -> None:
    altered = [AlteredBlock(0, "hostile"), AlteredBlock(3, "third")]
    assert blamed(altered, is_complete=True) == {"hostile", "third"}


def test_a_block_of_no_known_sender_blames_nobody() -> None:
    altered = [AlteredBlock(0, ""), AlteredBlock(1, "honest", is_inherited=True)]
    assert blamed(altered, is_complete=True) == frozenset()


@given(BLOCKS)
def test_the_first_sender_is_blamed_and_nobody_without_an_altered_block(
    altered: list[AlteredBlock],
) -> None:
    found = blamed(altered, is_complete=True)
    assert found <= {block.sender for block in altered} - {""}
    first = min((block.position for block in altered), default=0)
    at_first = {block.sender for block in altered if block.position == first}
    if len(at_first) == 1:
        assert at_first - {""} <= found
    assert blamed(altered, is_complete=False) <= found
