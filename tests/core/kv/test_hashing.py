"""The hash chain, against vLLM's own functions and against its laws."""

import os
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.naming import hash_chain as module
from prfaas.core.kv.naming.hash_chain import PIECE_IDS, hash_chain

EDGES = st.sampled_from([edge + step for edge in (24, 2**8, 2**16) for step in (-1, 0, 1)])
TOKENS = st.lists(EDGES | st.integers(0, 2**31 - 1), max_size=40)
SALTS = st.one_of(st.none(), st.text(min_size=1, max_size=20))
SPANS = st.integers(1, 8)
SEED = "0"


@pytest.fixture(scope="module")
def vllm_chain() -> Any:
    """The chain as vLLM's own block hasher makes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed here")
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core import kv_cache_utils

    with mock.patch.dict(os.environ, {"PYTHONHASHSEED": SEED}):
        kv_cache_utils.init_none_hash(sha256_cbor)

    def chain(tokens: list[int], span: int, salt: str | None) -> list[bytes]:
        request = SimpleNamespace(
            block_hashes=[],
            num_tokens=len(tokens),
            all_token_ids=tokens,
            mm_features=[],
            lora_request=None,
            cache_salt=salt,
            prompt_embeds=None,
        )
        hasher = kv_cache_utils.get_request_block_hasher(span, sha256_cbor)
        return [bytes(block_hash) for block_hash in hasher(request)]

    return chain


@pytest.mark.timeout(120)
@given(tokens=TOKENS, span=SPANS, salt=st.one_of(SALTS, st.just("")))
def test_the_chain_is_vllms(
    vllm_chain: Any, tokens: list[int], span: int, salt: str | None
) -> None:
    ours = hash_chain(tokens, tokens_per_hash=span, seed=SEED, cache_salt=salt)
    assert ours == vllm_chain(tokens, span, salt)


def test_the_first_links_of_a_known_prompt() -> None:
    """Hashes of vLLM 0.32 (`sha256_cbor`, PYTHONHASHSEED=0), for machines without vLLM."""
    chain = hash_chain(range(10), tokens_per_hash=4, seed="0", cache_salt="tenant")
    assert [link.hex()[:16] for link in chain] == ["2cec1bf6cf636289", "83181949a65e4d71"]


@given(tokens=TOKENS, more=TOKENS, span=SPANS, salt=SALTS)
def test_the_chain_of_a_prefix_is_a_prefix_of_the_chain(
    tokens: list[int], more: list[int], span: int, salt: str | None
) -> None:
    short = hash_chain(tokens, tokens_per_hash=span, seed=SEED, cache_salt=salt)
    long = hash_chain(tokens + more, tokens_per_hash=span, seed=SEED, cache_salt=salt)
    assert len(short) == len(tokens) // span
    assert long[: len(short)] == short


@pytest.mark.parametrize("span", [16, 100, PIECE_IDS + 1])
def test_a_long_prompt_is_encoded_in_pieces(span: int) -> None:
    tokens, parent, links = range(3 * PIECE_IDS), b"", []
    for start in range(0, len(tokens) // span * span, span):
        link = tokens[start : start + span]
        links += hash_chain(link, tokens_per_hash=span, seed="", cache_salt="s", parent=parent)
        parent = links[-1]
    with mock.patch.object(module, "_written", wraps=module._written) as written:
        assert hash_chain(tokens, tokens_per_hash=span, seed="", cache_salt="s") == links
    assert max(len(call.args[0]) for call in written.call_args_list) <= max(span, PIECE_IDS)


@given(tokens=TOKENS, span=SPANS, salts=st.lists(SALTS, min_size=2, max_size=2, unique=True))
def test_two_salts_share_no_hash(tokens: list[int], span: int, salts: list[str | None]) -> None:
    one, other = (
        set(hash_chain(tokens, tokens_per_hash=span, seed=SEED, cache_salt=salt)) for salt in salts
    )
    assert not one & other


@given(tokens=TOKENS, span=SPANS, place=st.integers(0, 39))
def test_a_changed_token_changes_every_hash_from_its_block_on(
    tokens: list[int], span: int, place: int
) -> None:
    if place >= len(tokens):
        return
    changed = [*tokens]
    changed[place] += 1
    before = hash_chain(tokens, tokens_per_hash=span, seed=SEED, cache_salt=None)
    after = hash_chain(changed, tokens_per_hash=span, seed=SEED, cache_salt=None)
    same = [x == y for x, y in zip(before, after, strict=True)]
    assert same == [number < place // span for number in range(len(before))]


def test_two_seeds_share_no_hash() -> None:
    one = hash_chain(range(64), tokens_per_hash=8, seed="0", cache_salt=None)
    other = hash_chain(range(64), tokens_per_hash=8, seed="1", cache_salt=None)
    assert not set(one) & set(other)
