"""Texts in parts whose tokens, one after the other, are the tokens of the whole."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prfaas.gateway.tokenization.fast_tokenizer import PLAIN_TEXTS, Quick
from prfaas.gateway.tokenization.split_points import cut_pattern
from prfaas.gateway.tokenization.word_caches import drop_word_cache

Frame = tuple[list[int], list[int]]
"""Tokens that a model wants before and after a text."""

_MARKERS_TRIED = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How one tokenizer's texts are cut.

    Attributes:
        pattern: Its empty matches are places where a text may be cut.
        encode: Tokens of a part. Threads may share it.
        frames: Tokens around a whole text, without and with those that the model wants.
    """

    pattern: re.Pattern[str]
    encode: Callable[[str], array[int]]
    frames: dict[bool, Frame]

    def parts(self, text: str, stride: int, reach: int) -> Iterator[str]:
        """Parts of about `stride` characters, from the beginning of a text to its last cut.

        Texts that begin alike are cut alike as far as they are.

        Args:
            text: What to cut.
            stride: Characters in a part, at least.
            reach: How far behind `stride` a cut is looked for, characters.
        """
        start = 0
        while (least := start + stride) < len(text):
            found = self.pattern.search(text, least, least + reach)
            if found is None:
                return
            yield text[start : found.start()]
            start = found.start()

    def agrees(self, tokenizer: Any, text: str) -> bool:
        """Whether a text that is cut wherever it can be has the tokens of the whole."""
        parts = list(self.parts(text, 1, len(text)))
        parts.append(text[sum(map(len, parts)) :])
        tokens = [token for part in parts for token in self.encode(part)]
        return all(
            [*before, *tokens, *after] == list(tokenizer.encode(text, add_special_tokens=special))
            for special, (before, after) in self.frames.items()
        )


def cutting_for(tokenizer: Any, on_difference: Callable[[], None]) -> Cutting | None:
    """How to cut the texts of a tokenizer of `transformers`; None if that is not safe.

    Args:
        tokenizer: The tokenizer.
        on_difference: See `Quick`.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return None
    drop_word_cache(fast)
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = bool(tokenizer.split_special_tokens)
    pattern = cut_pattern(fast)
    if pattern is None:
        return None

    frames = {special: _frame(fast, special) for special in (False, True)}
    cutting = Cutting(pattern, Quick(fast, on_difference), frames)
    markers = [token.content for token in fast.get_added_tokens_decoder().values()]
    marked = "".join(f"{m}{PLAIN_TEXTS[i % 3]}" for i, m in enumerate(markers[:_MARKERS_TRIED]))
    if not all(cutting.agrees(tokenizer, text) for text in (*PLAIN_TEXTS, marked)):
        _log.warning("cut texts do not have the tokens of whole ones")
        return None
    return cutting


def _frame(fast: Any, special: bool) -> Frame:
    """What stands around the tokens of a text; nothing where that can not be told."""
    inner = fast.encode(PLAIN_TEXTS[0], add_special_tokens=False).ids
    whole = fast.encode(PLAIN_TEXTS[0], add_special_tokens=special).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return [], []
