"""Token ids and block hashes of texts, exactly as the model's own tokenizer makes them, and back.

Prompts that are far too long are refused before all of their text is tokenised. Caches inside
tokenizers, which would outlive a request, are switched off or known to be a thread's. `fastokens`
is twenty times as fast as `tokenizers`, and used as long as both agree.

References:
    `tokenizers` 0.23.3: `BPE` and `Unigram` keep the tokens of 10,000 words for all threads.
    `fastokens` 0.3.5, `src/models/bpe.rs`: a fused tokenizer keeps words by thread; every other one
    keeps 262,144 of them for all threads, whatever their length.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from prfaas.core.kv.hashes import Hashes
from prfaas.gateway.http.json_codec import JsonObject, as_object
from prfaas.gateway.openai.fields import bad
from prfaas.gateway.tokenization.known_prefixes import (
    SPAN_CHARS,
    Beginning,
    KnownPrefixes,
    Naming,
    marker_of,
)
from prfaas.logs import log_event

_log = logging.getLogger(__name__)


CHUNK_CHARS = 16 * 1024
CHARS_PER_TOKEN = 4
"""Characters per token of usual text.

A prompt of up to this many times the limit is tokenised as a whole.
"""
MARGIN = 2
"""Text that is cut at any place may have other tokens than the whole, near the cuts; twice as many
as are allowed are too many in any case."""
_DIGITS = "0123456789"
_DIGIT = re.compile("[0-9]")
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
    """Lower bounds on the tokens of a text, by counting its characters."""

    chars_per_token: int
    """Characters of the longest token."""
    digits_per_token: int
    """Digits in the token that has most of them; 0 where no bound is known."""

    def check(self, text: str, tokens_max: int, param: str, begun: Beginning | None = None) -> None:
        """Refuse a text that cannot fit whatever its tokens are.

        Digits are what costs most: many models have a token for each, and a rule for words that
        looks at each by itself.

        Args:
            begun: Beginning that is known: no digit is counted that its tokens bound.

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
        end, num_known = (0, 0) if begun is None else (begun.end, len(begun.token_ids))
        if not digits_max or num_known * self.digits_per_token + len(text) - end <= digits_max:
            return
        codes = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        num_digits = int(np.count_nonzero(codes - ord("0") < len(_DIGITS)))
        if num_digits > digits_max:
            raise bad(
                f"the prompt has {num_digits} digits; the limit of {tokens_max} tokens is at most "
                f"{digits_max} digits",
                param,
            )


def bounds_of(tokenizer: Any) -> Bounds:
    """Bounds for a tokenizer of `transformers`."""
    tokens = tokenizer.get_vocab()
    digits = max(
        (sum(map(token.count, _DIGITS)) for token in filter(_DIGIT.search, tokens)), default=0
    )
    core = getattr(tokenizer, "backend_tokenizer", None)
    known = core is not None and keeps_digits(core)
    return Bounds(max(map(len, tokens), default=1), digits if known else 0)


def keeps_digits(core: Any) -> bool:
    """Return True if every ASCII digit of a text is in one of the tokens of a `Tokenizer`."""
    if type(core.model).__name__ != "BPE":
        return False
    has_all = all(core.model.token_to_id(digit) is not None for digit in _DIGITS)
    return has_all and _spares_digits(_state(core.normalizer))


def check_length(text: str, encode: Callable[[str], Sequence[int]], tokens_max: int) -> None:
    """Refuse a text that is far too long, before it is tokenised as a whole; TooLongError if its
    pieces have more than `MARGIN` times `tokens_max` tokens."""
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


_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


def drop_word_cache(core: Any) -> None:
    """Have a `tokenizers.Tokenizer` remember no words."""
    model = core.model
    if hasattr(model, "_resize_cache"):
        model._clear_cache()
        model._resize_cache(0)


def forget_words(tokenizer: Any) -> None:
    """Clear the dictionary in which a tokenizer written in Python keeps words."""
    cache = getattr(tokenizer, "cache", None)
    if isinstance(cache, dict):
        cache.clear()


def keeps_words_by_thread(core: Any) -> bool:
    """Return True if `fastokens` caches this tokenizer's words in the calling thread alone."""
    model = core.model
    if type(model).__name__ != "BPE" or core.pre_tokenizer is None:
        return False
    # An empty affix is none.
    affixes = (model.dropout, model.continuing_subword_prefix, model.end_of_word_suffix)
    if any(affixes):
        return False
    pre = as_object(json.loads(core.pre_tokenizer.__getstate__()))
    if pre.get("type") == "ByteLevel":
        return bool(pre.get("use_regex", True)) and not pre.get("add_prefix_space")
    steps = [as_object(step) for step in pre.get("pretokenizers") or []]
    if not steps or not _only_writes_bytes(steps[-1]):
        return False
    splits = steps[:-1]
    if any(step.get("type") != "Split" for step in splits):
        return False
    return len(splits) == 1 or tuple(map(_isolated, splits)) == _DEEPSEEK


def _only_writes_bytes(step: JsonObject) -> bool:
    plain = not step.get("add_prefix_space") and not step.get("use_regex", True)
    return step.get("type") == "ByteLevel" and plain


def _isolated(step: JsonObject) -> object:
    """The rule of a split that keeps its matches; None of another kind."""
    keeps = step.get("behavior") == "Isolated" and not step.get("invert")
    return as_object(step.get("pattern")).get("Regex") if keeps else None


CHECKED_EACH = 64
"""One of so many texts whose beginning is known is encoded as a whole."""
COMPARED_EACH = 16
"""A part of one text of so many is encoded by both."""
COMPARED_CHARS = 2048
PLAIN_TEXTS = (
    "Don't you see? It's 1,234.5 or 67890, in café or cafe\u0301.\n\n  He said:\t“ok”\r\nYes ",
    "def f(x):\n    return x  # note\n\n\nclass A:\n\tpass\n{'a': [1, 2]}   trailing  \nend",
    "東京へ。\n你好世界,\n一二三。 Привет мир, as they say\nΣΑΣ in Greek ﬁne Å 👩‍👧 family\u00a0z",
)
_ODD_TEXTS = (
    "I'LL we'Re ſ'ſ it‘s 'tis ''s don'T\u0301 K\u212a İı ß ǅ ª º ﬀ ℡ 𝔘𝔫 ٣४२ ½ Ⅷ 1\u0664\u09e8 x²",
    " \t \n\r\n\n \r\x0b\x0c\x1c\x85\u00a0\u2003\u2028\u3000\u200b\ufeff a  b  c\n  \n\t\te \n",
    "a\u0300\u0301\u0323o\u0308\u0323 \u0301x \u1100\u1161\u11a8각 ाक्षि ด้วย ﷺ \u200d\u200c\ufe0f",
    "🏳️‍🌈🇩🇪🇫 \U0010ffff\ue000\u0000\x7f",
    "".join(map(chr, range(0x20, 0x250))),
    "".join(chr(code) for code in range(0x250, 0x30000, 0x53) if not 0xD800 <= code < 0xE000),
    "https://a.b/c?d=e&f=%20#g --option=a_b-c C:\\d\\e $x += {y}[0]; // === *** ...",
    "!!!??? <<<|>>> ▁Ġ ___---### ~`@^ 1.2.3-4,5/6:7 a1b2C3 camelCaseHTTPServer snake_case ¿¡«»",
    "=" * 300 + "ab" * 300 + " " * 300 + "9" * 300 + "\n" * 300 + "é" * 300 + "一" * 300,
)
_MARKERS_TRIED = 64


class FastTokenizer:
    """Encodes texts as a `tokenizers.Tokenizer` does. Threads may share it.

    Args:
        core: The tokenizer. It must not truncate or pad.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._numbers = itertools.count(1)
        self._fast: Any = None
        self._reading = threading.Thread(target=self._read, name="fastokens")
        # On the calling thread alone, with nothing kept beside its cache of words.
        os.environ["FASTOKENS_BPE_THREADS"] = "1"
        for name in ("FASTOKENS_INPUT_CACHE", "FASTOKENS_SEGMENT_CACHE"):
            os.environ.pop(name, None)
        self._reading.start()

    def settled(self) -> Self:
        """Wait until it is known whether `fastokens` is used."""
        self._reading.join()
        return self

    def _read(self) -> None:
        if (fast := _load(self._core)) is None:
            return
        markers = [token.content for token in self._core.get_added_tokens_decoder().values()]
        probes = _probes(markers[:_MARKERS_TRIED])
        if any(self._differs(fast, text) for text in probes):
            _log.warning("fastokens differs from tokenizers on this model's texts: it is not used")
        else:
            self._fast = fast

    @property
    def is_on(self) -> bool:
        """True while `fastokens` is used."""
        return self._fast is not None

    def __call__(self, text: str, special: bool = False) -> array[int]:
        """Tokens of a text; with `special`, those that the model wants around it as well."""
        fast = self._fast
        if fast is None:
            return self._exactly(text, special)
        if next(self._numbers) % COMPARED_EACH == 0:
            start = random.randrange(max(len(text) - COMPARED_CHARS, 0) + 1)  # noqa: S311
            if self._differs(fast, text[start : start + COMPARED_CHARS]):
                self._fast = None
                _log.error("fastokens differs from tokenizers on a text: it is not used any more")
                return self._exactly(text, special)
        return self._quickly(fast, text, special)

    def _differs(self, fast: Any, text: str) -> bool:
        return any(
            self._quickly(fast, text, special) != self._exactly(text, special)
            for special in (False, True)
        )

    def _quickly(self, fast: Any, text: str, special: bool) -> array[int]:
        try:
            ids, _ = fast.encode_batch_flat([text], add_special_tokens=special)
        except ValueError:  # A rule for words that takes too many steps on this text.
            return self._exactly(text, special)
        return array("I", ids)

    def _exactly(self, text: str, special: bool) -> array[int]:
        # Leaves out where the tokens stand, which takes a third of the time.
        [encoding] = self._core.encode_batch_fast([text], add_special_tokens=special)
        return array("I", encoding.ids)


def _load(core: Any) -> Any:
    if not keeps_words_by_thread(core):
        _log.info("fastokens is not used: it would keep this model's words for all tenants")
        return None
    from fastokens import Tokenizer

    try:
        return Tokenizer.from_json_str(core.to_str())
    except ValueError as error:
        _log.info("fastokens does not know this kind of tokenizer: %s", error)
        return None


def _probes(markers: list[str]) -> Iterable[str]:
    texts = (*PLAIN_TEXTS, *_ODD_TEXTS)
    yield from texts
    for number, marker in enumerate(markers):
        text = texts[number % len(texts)]
        broken = f"{marker[:-1]}{marker}{marker[1:]}"
        yield f"{marker}{text}{marker} {marker}{marker}\n{broken} x{marker}x"


class Encoder:
    """Encodes exactly as a tokenizer does. Threads may share it.

    Of a text it keeps, for its tenant and salt, the tokens and hashes of what another one may begin
    with (`KnownPrefixes`). One of `CHECKED_EACH` texts that begin so is encoded as a whole as well,
    and if that differs, nothing is kept any more.

    Args:
        tokenizer: A tokenizer of `transformers`; nobody else may encode with it.
        chat: Messages by the model's template, whose marker texts are cut at; "" for none.
    """

    def __init__(self, tokenizer: Any, chat: str = "") -> None:
        self._tokenizer = tokenizer
        self._one_at_a_time = threading.Lock()
        self._fast: FastTokenizer | None = None
        self.known: KnownPrefixes | None = None
        self._numbers = itertools.count(1)
        if (core := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            drop_word_cache(core)
            core.no_truncation()
            core.no_padding()
            core.encode_special_tokens = bool(tokenizer.split_special_tokens)
            self._fast = FastTokenizer(core)
            if (marker := marker_of(core, chat)) is not None:
                self.known = KnownPrefixes(marker)

    def settled(self) -> Self:
        """Wait until it encodes as it will from then on."""
        if self._fast is not None:
            self._fast.settled()
        return self

    def begun(self, text: str, special: bool, naming: Naming) -> Beginning | None:
        """Return the known beginning of a text; None for a text of which nothing is kept."""
        if self.known is None or special or len(text) < SPAN_CHARS:
            return None
        return self.known.find(text, naming)

    def encode(
        self,
        text: str,
        special: bool,
        naming: Naming,
        tokens_max: int | None = None,
        begun: Beginning | None = None,
    ) -> tuple[array[int], Hashes]:
        """Token ids and block hashes of a text; TooLongError if it has more than `tokens_max`.

        Args:
            text: Text to encode; role markers in it count as such.
            special: True to add the tokens that the model wants around a text.
            tokens_max: Limit on the tokens; None for none.
            begun: Its known beginning, if that has been looked up.
        """
        ids = partial(self._fast or self._slowly, special=special)
        if tokens_max is not None:
            check_length(text, ids, tokens_max)
        begun = begun or self.begun(text, special, naming)
        if (known := self.known) is None or begun is None:
            token_ids = ids(text)
            hashes = naming.hashes(token_ids)
        else:
            token_ids, hashes = self._continued(known, text, naming, begun)
        if tokens_max is not None and len(token_ids) > tokens_max:
            raise TooLongError(len(token_ids))
        return token_ids, hashes

    def _continued(
        self, known: KnownPrefixes, text: str, naming: Naming, begun: Beginning
    ) -> tuple[array[int], Hashes]:
        """Tokens and hashes of a text, of which what is known is not made again."""
        ids = self._fast or self._slowly
        token_ids = begun.token_ids + ids(text[begun.end :])
        hashes = naming.hashes(token_ids, begun.hashes)
        if begun.num_known and next(self._numbers) % CHECKED_EACH == 0:
            whole = ids(text)
            if whole != token_ids or naming.hashes(whole) != hashes:
                self.known = None
                log_event(_log, logging.ERROR, "known_prefix_differs", tokens=len(whole))
                return whole, naming.hashes(whole)
        known.keep(text, naming, begun, token_ids, hashes)
        return token_ids, hashes

    def _slowly(self, text: str, special: bool = False) -> array[int]:
        """Tokens of a tokenizer that is written in Python."""
        with self._one_at_a_time:
            ids = array("I", self._tokenizer.encode(text, add_special_tokens=special))
            forget_words(self._tokenizer)
        return ids


class NoDetokenizerError(Exception):
    """The tokenizer, or these tokens, cannot be detokenised the way the engine does."""


def pieces(
    tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], *, skip_special: bool
) -> list[str]:
    """Text that each of `token_ids` added behind a prompt; "" where it only began a character.

    Args:
        tokenizer: A fast tokenizer of `transformers`.
        prompt_ids: What came before: it decides about spaces and half characters.
        skip_special: Special tokens give no text.

    Raises:
        NoDetokenizerError: It cannot be done exactly.

    References:
        vLLM 0.32, `v1/engine/detokenizer.py`, `FastIncrementalDetokenizer`.
    """
    from tokenizers.decoders import DecodeStream

    core = getattr(tokenizer, "_tokenizer", None)
    if core is None:
        raise NoDetokenizerError("the tokenizer is no fast one")
    stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special)
    try:
        return [stream.step(core, token_id) or "" for token_id in token_ids]
    except Exception as error:
        # The library raises plain `Exception` where an answer is no valid UTF-8.
        raise NoDetokenizerError(str(error)) from None
