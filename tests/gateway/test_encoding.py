"""Cut texts have the tokens and hashes of whole ones, whatever the tokenizer and the text."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from prfaas.core.kv.hash_chain import hash_chain
from prfaas.gateway.tokenization.span_encoder import Encoder, Naming

from .tokenizer_zoo import INCREMENTAL, MARKERS, MARKERS_ONLY, NEVER, tokenizer

NAMING = Naming("salt", 4, "7")
PIECES = (
    *MARKERS,
    *("the", "cat", "mat", "Foo", "BAR", "it's", "1", "12345", "Ωσ", "ß", "ﬁ", "ing", "x", "İ"),
    *(" ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\u200d", "▁", "Ġ"),
    *(".", ",", "'", "!?", "<", "|", ">", "<|", "|>", "/", "(", "“", "_", "-"),
    *(
        "e\u0301",
        "\u0301",
        "\u0308",
        "é",
        "你好",
        "。",
        "東京",
        "한",
        "\u1100",
        "👩‍👧",
        "\U0001f600",
        "ा",
        "ด",
    ),
    *("<mask>", "<end>", "[UNK]", "<unk>", "the cat sat", "Foo bar"),
)
texts = st.lists(st.sampled_from(PIECES) | st.characters(codec="utf-8"), max_size=40).map("".join)
many = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def whole(name: str, text: str, special: bool) -> tuple[array[int], list[bytes]]:
    ids = array("I", tokenizer(name).encode(text, add_special_tokens=special))
    return ids, hash_chain(ids, tokens_per_hash=4, seed="7", cache_salt="salt")


@pytest.mark.parametrize("name", [*INCREMENTAL, *MARKERS_ONLY, *NEVER])
def test_parts_are_the_whole(name: str) -> None:
    encoder = Encoder(tokenizer(name), span_chars=1)

    @many
    @given(texts, texts, texts, st.booleans())
    def check(start: str, end: str, other: str, special: bool) -> None:
        for text in (start, start + end, start + other, start + end + other):
            assert encoder.encode(text, special, NAMING) == whole(name, text, special)

    check()


@pytest.mark.parametrize("name", [*INCREMENTAL, *MARKERS_ONLY, *NEVER])
def test_where_texts_are_cut(name: str) -> None:
    cutting = Encoder(tokenizer(name)).cutting
    text = "The cat sat<|im_end|>\n(and<|im_start|> so on"
    parts = list(cutting.parts(text, 1, 100)) if cutting else []
    expected = {
        "words": ["The", " cat", " sat", "<|im_end|>\n(and", "<|im_start|> so"],
        "markers": ["The cat sat", "<|im_end|>\n(and"],
        "nowhere": [],
    }
    kind = "words" if name in INCREMENTAL else "markers" if name in MARKERS_ONLY else "nowhere"
    assert parts == expected[kind]


@pytest.mark.parametrize(
    "other", ["<|im_end|>x", "|<|im_start|>", "<<|im_end|>", "im_end|><", "x<|im_start|>"]
)
def test_markers_that_overlap_others(other: str) -> None:
    """A marker inside or astride another token is no safe place; the others still are."""
    core = INCREMENTAL["bytes"]()
    core.add_special_tokens([AddedToken(t, normalized=False) for t in (*MARKERS, other)])
    mine = PreTrainedTokenizerFast(tokenizer_object=core)
    encoder = Encoder(mine, span_chars=1)
    draw = random.Random(5)
    for _ in range(300):
        text = "".join(draw.choices([*MARKERS, other, *other, "a", " b", "<", "|"], k=9))
        made, _ = encoder.encode(text, False, Naming(""))
        assert made.tolist() == mine.encode(text, add_special_tokens=False)


def turns(count: int) -> str:
    return "".join(f"<|im_start|>user\nquestion {i} of the cat<|im_end|>\n" for i in range(count))


class Counting:
    """Counts the characters that an encoder's tokenizer is given."""

    def __init__(self, encoder: Encoder) -> None:
        cutting = encoder.cutting
        assert cutting is not None
        self.chars = 0

        def encode(text: str) -> array[int]:
            self.chars += len(text)
            return cutting.encode(text)

        encoder.cutting = replace(cutting, encode=encode)


def test_a_known_beginning_is_not_tokenised_again() -> None:
    encoder = Encoder(tokenizer("qwen"), span_chars=100)
    counting = Counting(encoder)
    first, longer = turns(100), turns(110)
    encoder.encode(first, False, NAMING)
    assert counting.chars == len(first)
    counting.chars = 0
    assert encoder.encode(longer, False, NAMING) == whole("qwen", longer, False)
    assert counting.chars <= len(longer) - len(first) + 200


def test_a_tenant_learns_nothing_of_another() -> None:
    """Not even from the time that it takes."""
    encoder = Encoder(tokenizer("qwen"), span_chars=100)
    counting = Counting(encoder)
    for naming in (
        NAMING,
        Naming("other", 4, "7"),
        Naming("salt", 8, "7"),
        Naming("one"),
        Naming("two"),
    ):
        counting.chars = 0
        encoder.encode(turns(20), False, naming)
        assert counting.chars == len(turns(20))


def test_token_ids_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(tokenizer("bytes"))
    ids = [draw % 500 for draw in range(3000)]
    expected = hash_chain(ids, tokens_per_hash=4, seed="7", cache_salt="salt")
    assert encoder.hashes(ids, NAMING) == expected
    known: list[int] = []

    def spy(self: Naming, token_ids: Sequence[int], hashes: list[bytes]) -> list[bytes]:
        known.append(len(hashes))
        return original(self, token_ids, hashes)

    original = Naming.hashes
    monkeypatch.setattr(Naming, "hashes", spy)
    assert encoder.hashes([*ids, 1, 2, 3, 4], NAMING)[:750] == expected
    assert known == [2560 // 4]


def test_what_is_remembered_is_bounded() -> None:
    encoder = Encoder(tokenizer("qwen"), cache_bytes_max=20_000, span_chars=50)
    for start in range(40):
        text = f"{start} " + turns(20)
        assert encoder.encode(text, False, NAMING) == whole("qwen", text, False)
        assert 0 < encoder.cache.num_bytes <= 20_000


def test_a_gap_in_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are forgotten one by one: what comes behind a hole must not be hashed wrongly."""
    text, draw = turns(12), random.Random(3)
    expected = whole("qwen", text, False)
    encoder = Encoder(tokenizer("qwen"), span_chars=30)
    get = encoder.cache.get
    monkeypatch.setattr(encoder.cache, "get", lambda key: get(key) if draw.random() < 0.7 else None)
    for _ in range(50):
        assert encoder.encode(text, False, NAMING) == expected


def test_threads_share_an_encoder() -> None:
    encoder = Encoder(tokenizer("qwen"), cache_bytes_max=50_000, span_chars=64)
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
