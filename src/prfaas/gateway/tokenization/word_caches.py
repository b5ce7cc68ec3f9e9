"""Caches inside tokenizers, which would outlive a request: switched off, or known to be a thread's.

References:
    `tokenizers` 0.23.3: `BPE` and `Unigram` keep the tokens of 10,000 words for all threads.
    `fastokens` 0.3.5, `src/models/bpe.rs`: a fused tokenizer keeps words by thread; every other one
    keeps 262,144 of them for all threads, whatever their length.
"""

from __future__ import annotations

import json
from typing import Any

from prfaas.gateway.http.json_codec import JsonObject, as_object

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
