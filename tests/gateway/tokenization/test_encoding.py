"""Texts have the tokens and hashes that the tokenizer gives, whatever it is."""

from __future__ import annotations

import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from prfaas.core.kv.blocks import CacheGroup, GroupKind, HashScheme, Layout
from prfaas.core.kv.hashes import Hashes
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.naming.page_chain import page_chain
from prfaas.gateway.tokenization.known_prefixes import Naming
from prfaas.gateway.tokenization.text_encoder import Encoder, FastTokenizer
from tests.gateway.tokenizer_zoo import MARKERS, PIECES, ZOO, tokenizer

LAYOUT = Layout(b"L" * 32, 4, "7", (CacheGroup(0, GroupKind.FULL_ATTENTION, 4, 64),))
NAMING = Naming("salt", LAYOUT)
texts = st.lists(st.sampled_from(PIECES) | st.characters(codec="utf-8"), max_size=40).map("".join)
many = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def whole(name: str, text: str, special: bool) -> tuple[array[int], Hashes]:
    ids = array("I", tokenizer(name).encode(text, add_special_tokens=special))
    names = hash_chain(ids, tokens_per_hash=4, seed="7", cache_salt="salt")
    return ids, Hashes(b"".join(names))


def test_a_prompt_is_named_by_the_scheme_of_its_engines() -> None:
    pages = replace(LAYOUT, hash_scheme=HashScheme.SGLANG_PAGES)
    ids, found = Encoder(tokenizer("qwen")).encode("the cat sat " * 9, False, Naming("a", pages))
    assert list(found) == page_chain(ids, tokens_per_page=4, cache_salt="a")


@pytest.mark.parametrize("name", ZOO)
def test_tokens_and_hashes_are_the_tokenizers(name: str) -> None:
    encoder = Encoder(tokenizer(name)).settled()

    @many
    @given(texts, st.booleans())
    def check(text: str, special: bool) -> None:
        assert encoder.encode(text, special, NAMING) == whole(name, text, special)

    check()


@pytest.mark.parametrize(
    "other", ["<|im_end|>x", "|<|im_start|>", "<<|im_end|>", "im_end|><", "x<|im_start|>"]
)
def test_markers_that_overlap_others(other: str) -> None:
    core = ZOO["bytes"]()
    core.add_special_tokens([AddedToken(t, normalized=False) for t in (*MARKERS, other)])
    mine = PreTrainedTokenizerFast(tokenizer_object=core)
    encoder = Encoder(mine).settled()
    draw = random.Random(5)
    for _ in range(300):
        text = "".join(draw.choices([*MARKERS, other, *other, "a", " b", "<", "|"], k=9))
        made, _ = encoder.encode(text, False, Naming(""))
        assert made.tolist() == mine.encode(text, add_special_tokens=False)


def turns(count: int) -> str:
    return "".join(f"<|im_start|>user\nquestion {i} of the cat<|im_end|>\n" for i in range(count))


def test_an_encoder_keeps_nothing_of_a_text() -> None:
    """A tenant could measure what another one has sent."""
    encoder = Encoder(tokenizer("qwen")).settled()
    given_to_tokenizer: list[str] = []
    fast = encoder._fast
    assert fast is not None

    def counting(text: str, special: bool) -> array[int]:
        given_to_tokenizer.append(text)
        return fast(text, special)

    encoder._fast = cast(FastTokenizer, counting)
    for salt in ("one", "other"):
        for text in (turns(20), turns(22)):
            encoder.encode(text, False, Naming(salt, LAYOUT))
    assert given_to_tokenizer == 2 * [turns(20), turns(22)]


def test_threads_share_an_encoder() -> None:
    encoder = Encoder(tokenizer("qwen")).settled()
    texts = [f"{i % 5} " + turns(30 + i) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda text: encoder.encode(text, True, NAMING), texts))
    assert made == [whole("qwen", text, True) for text in texts]


def test_a_tokenizer_without_a_fast_core() -> None:
    class Slow:
        def encode(self, text: str, add_special_tokens: bool) -> list[Any]:
            return [ord(letter) for letter in text] + [0] * add_special_tokens

    encoder = Encoder(Slow())
    assert encoder.encode("abcd", True, NAMING)[0].tolist() == [97, 98, 99, 100, 0]
    assert len(encoder.encode("abcd", True, NAMING)[1]) == 1
