"""Token ids and block hashes of texts, exactly as the model's own tokenizer makes them."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.naming.prompt_names import prompt_hashes
from prfaas.gateway.tokenization.bounds import TooLongError, check_length
from prfaas.gateway.tokenization.fast_tokenizer import FastTokenizer
from prfaas.gateway.tokenization.word_caches import drop_word_cache, forget_words


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of a prompt's blocks.

    Attributes:
        layout: What to hash for; None for no hashes.
    """

    cache_salt: str
    layout: Layout | None = None

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hashes of all whole blocks."""
        return prompt_hashes(self.layout, token_ids, self.cache_salt) if self.layout else []


class Encoder:
    """Encodes exactly as a tokenizer does, and keeps nothing of a text. Threads may share it.

    Args:
        tokenizer: A tokenizer of `transformers`; nobody else may encode with it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._one_at_a_time = threading.Lock()
        self._fast: FastTokenizer | None = None
        if (core := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            drop_word_cache(core)
            core.no_truncation()
            core.no_padding()
            core.encode_special_tokens = bool(tokenizer.split_special_tokens)
            self._fast = FastTokenizer(core)

    def encode(
        self, text: str, special: bool, naming: Naming, tokens_max: int | None = None
    ) -> tuple[array[int], list[bytes]]:
        """Token ids and block hashes of a text.

        Args:
            text: Text to encode; role markers in it count as such.
            special: True to add the tokens that the model wants around a text.
            tokens_max: Limit on the tokens; None for none.

        Raises:
            TooLongError: It has more than `tokens_max`.
        """
        ids = partial(self._fast or self._slowly, special=special)
        if tokens_max is not None:
            check_length(text, ids, tokens_max)
        token_ids = ids(text)
        if tokens_max is not None and len(token_ids) > tokens_max:
            raise TooLongError(len(token_ids))
        return token_ids, naming.hashes(token_ids)

    def _slowly(self, text: str, special: bool) -> array[int]:
        """Tokens of a tokenizer that is written in Python."""
        with self._one_at_a_time:
            ids = array("I", self._tokenizer.encode(text, add_special_tokens=special))
            forget_words(self._tokenizer)
        return ids
