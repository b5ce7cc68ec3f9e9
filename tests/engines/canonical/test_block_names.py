"""Names of combined blocks: one chain over the tokens, whatever an engine hashes itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.engines.canonical.block_names import BlockNames

pytestmark = pytest.mark.timeout(60)
SPAN = 6
LAYOUT = Layout(b"L" * 32, SPAN, "7", (CacheGroup(0, GroupKind.FULL_ATTENTION, SPAN, 8),))


def whole_chain(tokens: list[int], salt: str | None) -> list[bytes]:
    return hash_chain(tokens, tokens_per_hash=SPAN, seed="7", cache_salt=salt)


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=SPAN, max_size=60),
    asked=st.lists(st.integers(1, 10), min_size=1, max_size=8),
    salt=st.sampled_from((None, "", "salt")),
)
def test_names_are_those_of_the_whole_chain_in_any_order(
    tokens: list[int], asked: list[int], salt: str | None
) -> None:
    names, chain = BlockNames(LAYOUT, tokens, salt), whole_chain(tokens, salt)
    for number in asked:
        if number <= len(chain):
            assert names.at(number * SPAN) == chain[number - 1]


def test_names_follow_an_answer_as_it_grows() -> None:
    tokens = list(range(20))
    names = BlockNames(LAYOUT, tokens, "salt")
    first = names.at(18)
    tokens += range(100, 120)
    assert [names.at(18), names.at(36)] == [
        first,
        whole_chain(tokens, "salt")[5],
    ]


@pytest.mark.parametrize("end_token", [0, 5, 7, 24])
def test_no_block_ends_elsewhere(end_token: int) -> None:
    with pytest.raises(ValueError, match=f"no block ends at token {end_token} of 20"):
        BlockNames(LAYOUT, list(range(20)), None).at(end_token)
