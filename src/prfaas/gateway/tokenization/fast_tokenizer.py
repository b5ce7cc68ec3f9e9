"""Tokens by `fastokens`, twenty times as fast as `tokenizers`, as long as both agree."""

from __future__ import annotations

import itertools
import logging
import os
import random
from array import array
from collections.abc import Iterable
from typing import Any

from prfaas.gateway.tokenization.word_caches import keeps_words_by_thread

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
_log = logging.getLogger(__name__)


class FastTokenizer:
    """Encodes texts as a `tokenizers.Tokenizer` does. Threads may share it.

    Args:
        core: The tokenizer. It must not truncate or pad.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._numbers = itertools.count(1)
        self._fast = fast = _load(core)
        markers = [token.content for token in core.get_added_tokens_decoder().values()]
        probes = _probes(markers[:_MARKERS_TRIED])
        if fast is not None and any(self._differs(fast, text) for text in probes):
            self._fast = None
            _log.warning("fastokens differs from tokenizers on this model's texts: it is not used")

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
    # On the calling thread alone, with nothing kept beside its cache of words.
    os.environ["FASTOKENS_BPE_THREADS"] = "1"
    for name in ("FASTOKENS_INPUT_CACHE", "FASTOKENS_SEGMENT_CACHE"):
        os.environ.pop(name, None)
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
