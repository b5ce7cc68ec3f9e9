"""Refusal of prompts that are too long, before all of their text is tokenised."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.gateway.http.json_codec import JsonObject, as_object
from prfaas.gateway.openai.validation import bad

CHUNK_CHARS = 16 * 1024
CHARS_PER_TOKEN = 4
"""Characters per token of usual text.

A prompt of up to this many times the limit is tokenised as a whole.
"""
MARGIN = 2
"""Text that is cut at any place may have other tokens than the whole, near the cuts; twice as many
as are allowed are too many in any case."""
_DIGITS = "0123456789"
_LOCAL_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
)


class TooLongError(Exception):
    """A text has more tokens than are allowed.

    Attributes:
        num_tokens: Tokens that it has at least.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens at least")
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the tokens of a text, by counting its characters.

    Attributes:
        chars_per_token: Characters of the longest token.
        digits_per_token: Digits in the token that has most of them; 0 where no bound is known.
    """

    chars_per_token: int
    digits_per_token: int

    def check(self, text: str, tokens_max: int, param: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are.

        Digits are what costs most: many models have a token for each, and a rule for words that
        looks at each by itself.

        Raises:
            RequestError: 400, with the numbers.
        """
        chars_max = tokens_max * self.chars_per_token
        if len(text) > chars_max:
            raise bad(
                f"the prompt has {len(text)} characters; the limit of {tokens_max} tokens is at "
                f"most {chars_max} characters",
                param,
            )
        digits_max = tokens_max * self.digits_per_token
        if not digits_max or len(text) <= digits_max:
            return
        num_digits = sum(map(text.count, _DIGITS))
        if num_digits > digits_max:
            raise bad(
                f"the prompt has {num_digits} digits; the limit of {tokens_max} tokens is at most "
                f"{digits_max} digits",
                param,
            )


def bounds_of(tokenizer: Any) -> Bounds:
    """Bounds for a tokenizer of `transformers`."""
    tokens = tokenizer.get_vocab()
    digits = max((sum(map(token.count, _DIGITS)) for token in tokens), default=0)
    core = getattr(tokenizer, "backend_tokenizer", None)
    known = core is not None and keeps_digits(core)
    return Bounds(max(map(len, tokens), default=1), digits if known else 0)


def keeps_digits(core: Any) -> bool:
    """Return True if every ASCII digit of a text is in one of the tokens of a `Tokenizer`."""
    if type(core.model).__name__ != "BPE":
        return False
    vocabulary = core.get_vocab(with_added_tokens=False)
    return set(_DIGITS) <= vocabulary.keys() and _spares_digits(_state(core.normalizer))


def check_length(text: str, encode: Callable[[str], Sequence[int]], tokens_max: int) -> None:
    """Refuse a text that is far too long, before it is tokenised as a whole.

    Raises:
        TooLongError: Its pieces have more than `MARGIN` times `tokens_max` tokens.
    """
    if len(text) <= max(CHARS_PER_TOKEN * tokens_max, CHUNK_CHARS):
        return
    num_tokens = 0
    for start in range(0, len(text), CHUNK_CHARS):
        num_tokens += len(encode(text[start : start + CHUNK_CHARS]))
        if num_tokens > MARGIN * tokens_max:
            raise TooLongError(num_tokens // MARGIN)


def _spares_digits(normalizer: JsonObject) -> bool:
    """Return True if a normaliser leaves ASCII digits where they are."""
    if normalizer.get("type") == "Sequence":
        return all(map(_spares_digits, normalizer["normalizers"]))
    return not normalizer or normalizer.get("type") in _LOCAL_NORMALIZERS


def _state(part: Any) -> JsonObject:
    """A part of a tokenizer as in `tokenizer.json`; empty if there is none."""
    return as_object(json.loads(part.__getstate__())) if part is not None else {}
