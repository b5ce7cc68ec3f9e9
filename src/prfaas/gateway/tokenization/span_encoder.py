"""Text to token ids and block hashes; what begins like an earlier text costs only its end."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from blake3 import blake3

from prfaas.core.kv.hash_chain import hash_chain
from prfaas.gateway.tokenization.bounds import TooLongError, check_tail
from prfaas.gateway.tokenization.span_cache import Span, SpanCache
from prfaas.gateway.tokenization.text_splitter import cutting_for
from prfaas.gateway.tokenization.word_caches import forget_words

CACHE_BYTES_MAX = 256 * 2**20
"""About 25 million tokens at 16 to a block, more with larger blocks."""
SPAN_CHARS = 2048
"""Less is found again more often; each span costs some microseconds, found or not."""
SPAN_TOKENS = 512
"""The same for prompts of token ids."""
REACH_CHARS = 64 * 1024
"""Text without a cut for so long is tokenised as one from there on."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Naming:
    """Whose blocks these are, and how they are named.

    Attributes:
        cache_salt: The tenant's secret.
        tokens_per_hash: Tokens to a block hash; 0 for no hashes.
        seed: The engines' hash seed.
    """

    cache_salt: str
    tokens_per_hash: int = 0
    seed: str = ""

    def hashes(self, token_ids: Sequence[int], known: list[bytes]) -> list[bytes]:
        """Hashes of all whole blocks; `known` are the first of them."""
        if not self.tokens_per_hash:
            return []
        return hash_chain(
            token_ids,
            tokens_per_hash=self.tokens_per_hash,
            seed=self.seed,
            cache_salt=self.cache_salt,
            known=known,
        )


class Encoder:
    """Encodes exactly as the tokenizer does. Threads may share it.

    What is remembered of a text is found only under the same naming, and so by the same tenant.

    Args:
        tokenizer: A tokenizer of `transformers`; nobody else may encode with it.
        cache_bytes_max: Memory for what is remembered, bytes.
        span_chars: Characters that are remembered together.
    """

    def __init__(
        self,
        tokenizer: Any,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        span_chars: int = SPAN_CHARS,
    ) -> None:
        self._tokenizer = tokenizer
        self._one_at_a_time = threading.Lock()
        self._span_chars = span_chars
        self.cache = SpanCache(cache_bytes_max)
        self.cutting = cutting_for(tokenizer, self.cache.clear)
        if self.cutting is None:
            _log.warning("this model's texts can not be cut: every prompt is tokenised whole")

    def encode(
        self, text: str, special: bool, naming: Naming, tokens_max: int | None = None
    ) -> tuple[array[int], list[bytes]]:
        """Token ids and block hashes of a text.

        Args:
            text: What to encode; role markers in it count as such.
            special: Whether the tokens that the model wants around a text are added.
            naming: How its blocks are named.
            tokens_max: Stop once a text is known to have more tokens; None for no limit.

        Raises:
            TooLongError: It has more than `tokens_max`. One with a few more may be encoded.
        """
        if self.cutting is None:
            ids = self._encode_whole(text, special, tokens_max)
            return ids, naming.hashes(ids, [])
        before, after = self.cutting.frames[special]
        walk = _Walk(self.cache, naming, f"text, {special}", before)
        position = 0
        for part in self.cutting.parts(text, self._span_chars, REACH_CHARS):
            position += len(part)
            if not walk.finds(part.encode()):
                walk.learns(self.cutting.encode(part))
            if tokens_max is not None and len(walk.token_ids) > tokens_max:
                raise TooLongError(len(walk.token_ids))
        if tokens_max is not None:
            check_tail(text[position:], self.cutting.encode, tokens_max)
        walk.token_ids.extend(self.cutting.encode(text[position:]))
        if walk.is_stale:
            # Tokens of this very text may be wrong; those that are made from here on are not.
            return self.encode(text, special, naming, tokens_max)
        walk.token_ids.extend(after)
        return walk.token_ids, walk.end()

    def _encode_whole(self, text: str, special: bool, tokens_max: int | None) -> array[int]:
        def encode(part: str) -> array[int]:
            with self._one_at_a_time:
                ids = array("I", self._tokenizer.encode(part, add_special_tokens=special))
                forget_words(self._tokenizer)
            return ids

        if tokens_max is not None:
            check_tail(text, encode, tokens_max)
        return encode(text)

    def hashes(self, token_ids: list[int], naming: Naming) -> list[bytes]:
        """Block hashes of token ids, each below 2^32."""
        if not naming.tokens_per_hash:
            return []
        walk = _Walk(self.cache, naming, "ids", ())
        ids = array("I", token_ids)
        for end in range(SPAN_TOKENS, len(ids) + 1, SPAN_TOKENS):
            part = ids[end - SPAN_TOKENS : end]
            if not walk.finds(part.tobytes()):
                walk.learns(part)
        walk.token_ids.extend(ids[len(walk.token_ids) :])
        return walk.end()


class _Walk:
    """Goes along a prompt, span by span, and gathers what it is made of."""

    def __init__(
        self, cache: SpanCache, naming: Naming, kind: str, token_ids: Iterable[int]
    ) -> None:
        self.token_ids = array("I", token_ids)
        self._cache = cache
        self._age = cache.age
        self._naming = naming
        self._key = blake3(repr((kind, astuple(naming))).encode()).digest()
        self._hashes: list[bytes] = []
        self._new: list[tuple[bytes, int, int]] = []

    @property
    def is_stale(self) -> bool:
        """Whether all that was remembered has been forgotten since it began."""
        return self._cache.age != self._age

    def finds(self, span: bytes) -> bool:
        """Take the tokens and hashes of the next span, if it was here before after the same."""
        self._key = blake3(self._key + span).digest()
        found = self._cache.get(self._key)
        if found is None:
            return False
        self.token_ids.extend(found.token_ids)
        if not self._new:
            self._hashes.extend(found.hashes)
        return True

    def learns(self, token_ids: array[int]) -> None:
        """Take the tokens of that span from somebody who has made them."""
        start = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self._new.append((self._key, start, len(self.token_ids)))

    def end(self) -> list[bytes]:
        """All hashes; what is new is remembered."""
        hashes = self._naming.hashes(self.token_ids, self._hashes)
        size = self._naming.tokens_per_hash or 1
        for key, start, end in self._new:
            ids = self.token_ids[start:end]
            self._cache.put(key, Span(ids, tuple(hashes[start // size : end // size])), self._age)
        return hashes
