"""SGLang's hash chain: vectors of its own function, and laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import CacheGroup, GroupKind, HashScheme, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.naming.page_chain import page_chain
from prfaas.core.kv.naming.prompt_names import prompt_hashes
from prfaas.wire.messages.layouts import LayoutSpec, layout_spec

SGLANG_0_5_23 = [
    (
        list(range(12)),
        4,
        None,
        None,
        [
            "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
            "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
            "fd5bd05ab69776768cb177e87c5ef6f8f8dec410a03a3c238a58a89c01ba803c",
        ],
    ),
    (
        [0, 2**32 - 1, 70000, 5] * 3,
        4,
        "tenant",
        None,
        [
            "a0eec357eab0695163157e47bf004c360554403e0e1239c57a81f73d864a52b6",
            "081026a81b01ad785eed4e971d69ac23887fb8d2f0cf6f4e65b996c6073d9490",
            "b63cf5f82b430936fea05c087ab3262de54c73d5d3142b08ed9379bf80be52eb",
        ],
    ),
    (
        [7, 8, 9],
        1,
        None,
        "lora",
        [
            "ad04ca3a35298e5c1854ad20378405a93ca919ddcd349c94e4d1ce0d116ec336",
            "8ecfd6c8eeb3a21d9719ce4426729ddd4d1d7af7830617913d1ae05692f4b611",
            "f322cdd763b18494157079d8f8b1f213f252cebed5aad130b58ca1b16c37c8d8",
        ],
    ),
    (
        [7, 8, 9],
        1,
        "",
        "x",
        [
            "dfc6bf706ac2c9d8b0035dbc5e327d2013a6d46c369a0c83701f85ecfc971af0",
            "1fb278b0a5444ae89950bdde8bea3a456eb5bb6e4e696980e1252c43a4355a80",
            "b4e487719823358189362810067051600412c5519068762d7e666236e75d958f",
        ],
    ),
]
"""Recorded from `get_storage_hash_str` and its native extension."""
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
SPANS = st.integers(1, 8)
SALTS = st.none() | st.text(max_size=8)


@pytest.mark.parametrize(("tokens", "page", "salt", "extra", "expected"), SGLANG_0_5_23)
def test_the_chain_of_pages_is_sglangs(
    tokens: list[int], page: int, salt: str | None, extra: str | None, expected: list[str]
) -> None:
    found = page_chain(tokens, tokens_per_page=page, cache_salt=salt, extra_key=extra)
    assert [each.hex() for each in found] == expected


@given(TOKENS, TOKENS, SPANS, SALTS)
def test_a_longer_prompt_keeps_the_pages_of_its_beginning(
    tokens: list[int], more: list[int], span: int, salt: str | None
) -> None:
    short = page_chain(tokens, tokens_per_page=span, cache_salt=salt)
    long = page_chain(tokens + more, tokens_per_page=span, cache_salt=salt)
    assert len(short) == len(tokens) // span
    assert long[: len(short)] == short


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40), SPANS)
def test_salts_extra_keys_and_schemes_share_no_names(tokens: list[int], span: int) -> None:
    namespaces = [(None, None), ("", None), ("a", None), (None, "a"), ("a", "b"), ("ab", "")]
    found = [
        page_chain(tokens, tokens_per_page=span, cache_salt=salt, extra_key=extra)
        for salt, extra in namespaces
    ]
    found += [hash_chain(tokens, tokens_per_hash=span, seed="0", cache_salt=s) for s in (None, "a")]
    assert len({name for names in found for name in names}) == sum(map(len, found))


GROUPS = (CacheGroup(0, GroupKind.FULL_ATTENTION, 4, 64),)
VLLM = Layout(b"L" * 32, 4, "7", GROUPS)
SGLANG = Layout(b"S" * 32, 4, "", GROUPS, HashScheme.SGLANG_PAGES)


@given(TOKENS, st.text(max_size=8))
def test_prompts_are_named_by_the_scheme_of_the_layout(tokens: list[int], salt: str) -> None:
    pages = page_chain(tokens, tokens_per_page=4, cache_salt=salt or None)
    assert list(prompt_hashes(SGLANG, tokens, salt)) == pages
    chain = hash_chain(tokens, tokens_per_hash=4, seed="7", cache_salt=salt)
    assert list(prompt_hashes(VLLM, tokens, salt)) == chain


@pytest.mark.parametrize("layout", [VLLM, SGLANG])
def test_an_announced_layout_keeps_its_scheme(layout: Layout) -> None:
    assert layout_spec(layout).layout() == layout


def test_an_engine_that_names_no_scheme_hashes_as_vllm_does() -> None:
    spec = layout_spec(VLLM)
    older = LayoutSpec(
        layout_id=spec.layout_id,
        tokens_per_hash=spec.tokens_per_hash,
        hash_seed=spec.hash_seed,
        groups=spec.groups,
    )
    assert older.layout().hash_scheme is HashScheme.SHA256_CBOR
