"""Prompts that are too long are refused before all of their text is tokenised."""

from __future__ import annotations

from array import array
from typing import cast

import pytest

from prfaas.errors import RequestError
from prfaas.gateway.tokenization.known_prefixes import Beginning, Naming
from prfaas.gateway.tokenization.text_encoder import (
    CHUNK_CHARS,
    Encoder,
    FastTokenizer,
    TooLongError,
    bounds_of,
)
from tests.gateway.tokenizer_zoo import ZOO, tokenizer

NAMING = Naming("salt")


class Counting:
    """Encodes as another does, and counts the characters."""

    def __init__(self, name: str) -> None:
        self.encoder = Encoder(tokenizer(name)).settled()
        self.num_chars = 0
        assert self.encoder._fast is not None
        self._encode = self.encoder._fast
        self.encoder._fast = cast(FastTokenizer, self)

    def __call__(self, text: str, special: bool) -> array[int]:
        self.num_chars += len(text)
        return self._encode(text, special)


HAVE_UNKNOWN_WORDS = {"bert", "unigram", "unigram-first", "unsplit-first", "llama2"}


@pytest.mark.parametrize("name", sorted({*ZOO} - HAVE_UNKNOWN_WORDS))
def test_no_text_that_fits_is_refused(name: str) -> None:
    made = tokenizer(name)
    bounds = bounds_of(made)
    for text in (
        "1234567890" * 50,
        "on 2026-01-01, 1,234 of 56 cats\n" * 20,
        "0" * 400,
        "a1b2c3" * 80,
    ):
        num_tokens = len(made.encode(text, add_special_tokens=False))
        bounds.check(text, num_tokens, "prompt")


def test_digits_are_counted_before_they_are_tokenised() -> None:
    bounds = bounds_of(tokenizer("qwen"))
    bounds.check("7" * 1000, 1000, "prompt")
    with pytest.raises(RequestError, match="1001 digits; the limit of 1000 tokens"):
        bounds.check("7" * 1001, 1000, "prompt")


class Uncounted(str):
    """A text whose digits nobody counts."""

    __slots__ = ()

    def encode(self, *_: str) -> bytes:
        raise AssertionError("the digits of a known beginning are counted")


def test_digits_are_not_counted_where_known_tokens_bound_them() -> None:
    bounds, begun = bounds_of(tokenizer("qwen")), Beginning([(2000, b"")], 1, array("I", [0] * 500))
    text = "it is 7 " * 250 + "7" * 400
    bounds.check(Uncounted(text), 900, "prompt", begun)
    bounds.check(text, 899, "prompt", begun)
    with pytest.raises(RequestError, match="650 digits; the limit of 649 tokens"):
        bounds.check(text, 649, "prompt", begun)


@pytest.mark.parametrize("piece", ["word ", "<|im_end|>", "x\ny"])
def test_tokenising_stops_where_a_text_is_too_long(piece: str) -> None:
    counting = Counting("qwen")
    with pytest.raises(TooLongError) as caught:
        counting.encoder.encode(piece * 100_000, False, NAMING, tokens_max=5000)
    assert 5000 < caught.value.num_tokens < 15_000
    assert counting.num_chars < 2 * 5000 * len(piece) + CHUNK_CHARS


@pytest.mark.parametrize("letter", ["7", "一", "é", "-", " "])
def test_text_that_is_far_too_long_is_not_tokenised_whole(letter: str) -> None:
    counting = Counting("bytes")
    with pytest.raises(TooLongError):
        counting.encoder.encode(letter * 1_000_000, False, NAMING, tokens_max=5000)
    assert counting.num_chars < 50_000


def test_long_text_of_one_word_is_served_if_it_fits() -> None:
    text = "7" * 40_000
    ids, _ = Encoder(tokenizer("bytes")).encode(text, False, NAMING, tokens_max=40_000)
    assert len(ids) == 40_000
