"""Where a text may be cut so that the tokens of its parts are the tokens of the whole.

A tokenizer works in steps: it finds the added tokens (role markers and the like), normalises what
lies between them, splits that into words, and turns each word into tokens by itself. A place is a
cut if every step has a border there whatever else the text holds. There are three kinds:

- **before an added token**, where no other one can reach across its beginning. Scanning goes from
  left to right and a match depends only on what follows its beginning.
- **between a letter and a space with a letter behind it**, where the words are split by a rule
  known to part them there. The normalisers that are let through leave ASCII alone and never join
  it to its neighbours.
- **between the line feed after a visible character and a letter**, with the same rules, unless a
  word at the beginning of a text gets a space before it.

What is not known to be safe is not cut: tokenizers are read by an allow-list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from prfaas.gateway.http.json_codec import JsonObject, as_object

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_LETTERS = (
    {r" ?\p{L}+"},
    {r"[^\r\n\p{L}\p{N}]?\p{L}+"},
    {r"[^\r\n\p{L}\p{N}]?+\p{L}+"},
    {r"[^\r\n\p{L}\p{N}]?+\p{L}++"},
    {r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"},
    {r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"},
    set(_CASED),
    {f"{word}{_ENDING}?" for word in _CASED},
)
"""Alternatives of a word rule that together take every letter."""
_KNOWN = frozenset().union(
    *_LETTERS,
    (_ENDING, r"'(?i:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    (r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+", r" ?\p{N}+"),
    (r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    (r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*+"),
    (r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", "[一-龥぀-ゟ゠-ヿ]+"),
    (r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+", r"\s"),
)
"""Alternatives of GPT-2, cl100k, o200k, Qwen, Llama 3, Mistral and DeepSeek. None matches across a
cut, looks back, or looks further ahead than one character."""
_LOCAL_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
)
_SPLIT_AT_SPACES = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})
_ONLY_SPLIT_MORE = frozenset({"Digits", "Punctuation"})
_REWRITE = frozenset({"ByteLevel", "Metaspace"})
"""They replace characters: what comes after them would see other ones."""

_BETWEEN_WORDS = r"(?<=[A-Za-z])(?= [A-Za-z])"
_BETWEEN_LINES = r"(?<=[!-~\u3001-\u303e\u4e00-\u9fff\uff01-\uff5e]\n)(?=[A-Za-z\u4e00-\u9fff])"


def cut_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """What a cut looks like.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.

    Returns:
        A pattern whose empty matches are cuts; None where no place is known to be one.
    """
    added = list(tokenizer.get_added_tokens_decoder().values())
    if tokenizer.encode_special_tokens or any(token.single_word for token in added):
        return None
    places = []
    if markers := [re.escape(text) for text in _markers(added)]:
        places.append(f"(?={'|'.join(markers)})")
    normalizer = tokenizer.normalizer
    if all(_spares_words(t, normalizer) for t in added) and _is_local(_state(normalizer)):
        places += _word_cuts(tokenizer)
    return re.compile("|".join(places)) if places else None


def _markers(added: Sequence[Any]) -> Iterator[str]:
    """Added tokens that begin wherever their text stands, and nothing reaches across."""
    texts = [token.content for token in added]
    ends = {text[i:] for text in texts for i in range(1, len(text))}
    inner = {end[:length] for end in ends for length in range(1, len(end) + 1)}
    for token in added:
        text = token.content
        if token.normalized or token.lstrip or not text or text[0].isspace() or text in inner:
            continue
        if not any(text[:length] in ends for length in range(1, len(text) + 1)):
            yield text


def _spares_words(token: Any, normalizer: Any) -> bool:
    """Whether an added token can neither hold a cut between words nor take the space at one."""
    texts = [token.content]
    if token.normalized and normalizer is not None:
        texts.append(normalizer.normalize_str(token.content))
    if any(re.search(r"\S\s|\n\S", text) for text in texts):
        return False
    ends = {text[i].isalnum() for text in texts for i in (0, -1) if text}
    return not (token.lstrip or token.rstrip) or not any(ends)


def _is_local(normalizer: JsonObject) -> bool:
    """Whether normalising the parts at a cut is normalising the whole."""
    if normalizer.get("type") == "Sequence":
        return all(map(_is_local, normalizer["normalizers"]))
    return not normalizer or normalizer.get("type") in _LOCAL_NORMALIZERS


def keeps_digits(tokenizer: Any) -> bool:
    """Return True if every ASCII digit of a text is in one of its tokens."""
    model, normalizer = tokenizer.model, _state(tokenizer.normalizer)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return (
        type(model).__name__ == "BPE"
        and set("0123456789") <= vocabulary.keys()
        and (_is_local(normalizer))
    )


def _word_cuts(tokenizer: Any) -> Iterator[str]:
    steps = list(_steps(_state(tokenizer.pre_tokenizer)))
    known = [_parts_words(step) for step in steps]
    rewrites_early = any(step["type"] in _REWRITE for step in steps[:-1])
    if None in known or rewrites_early or getattr(tokenizer.model, "dropout", None):
        return
    if not any(known) and not _never_joins_words(tokenizer, steps):
        return
    yield _BETWEEN_WORDS
    adds_space = any(s["type"] == "Metaspace" or s.get("add_prefix_space") for s in steps)
    if any(known) and not adds_space:
        yield _BETWEEN_LINES


def _steps(pre_tokenizer: JsonObject) -> Iterator[JsonObject]:
    if pre_tokenizer.get("type") == "Sequence":
        for step in pre_tokenizer["pretokenizers"]:
            yield from _steps(step)
    elif pre_tokenizer:
        yield pre_tokenizer


def _parts_words(step: JsonObject) -> bool | None:
    """Whether a step of splitting has a border at every cut; None if it is not known."""
    kind = step["type"]
    if kind == "ByteLevel":
        return bool(step.get("use_regex", True))
    if kind == "Metaspace":
        return True if step.get("split", True) else None
    if kind == "Split":
        return _rule_parts_words(step)
    return True if kind in _SPLIT_AT_SPACES else False if kind in _ONLY_SPLIT_MORE else None


def _rule_parts_words(step: JsonObject) -> bool | None:
    rule = as_object(step.get("pattern")).get("Regex")
    keeps_matches = (step.get("behavior"), step.get("invert")) in (
        ("Isolated", False),
        ("Removed", True),
    )
    if not isinstance(rule, str) or not keeps_matches:
        return None
    alternatives = set(_alternatives(rule))
    if not alternatives <= _KNOWN:
        return None
    return any(letters <= alternatives for letters in _LETTERS)


def _alternatives(rule: str) -> Iterator[str]:
    """The parts of a regular expression between the bars at its top level."""
    depth, start, in_class = 0, 0, False
    marks = re.finditer(r"\\.|[\[\]()|]", rule, re.DOTALL)
    for mark in marks:
        sign = mark[0]
        if in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign == "|" and not depth:
            yield rule[start : mark.start()]
            start = mark.end()
    yield rule[start:]


def _never_joins_words(tokenizer: Any, steps: list[JsonObject]) -> bool:
    """Whether BPE over unsplit bytes has no token with a space inside: it then merges none."""
    bytes_only = len(steps) == 1 and steps[0]["type"] == "ByteLevel"
    if not bytes_only or type(tokenizer.model).__name__ != "BPE" or tokenizer.model.fuse_unk:
        return False
    space = "Ġ"  # how ByteLevel writes it
    return not any(space in token[1:] for token in tokenizer.get_vocab(with_added_tokens=False))


def _state(part: Any) -> JsonObject:
    """A normaliser or pre-tokenizer as in `tokenizer.json`; empty if there is none."""
    return as_object(json.loads(part.__getstate__())) if part is not None else {}
