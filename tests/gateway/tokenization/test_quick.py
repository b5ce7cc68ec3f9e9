"""`fastokens` is used where it agrees with `tokenizers`, and left as soon as it does not."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from fastokens import Tokenizer

from prfaas.gateway.tokenization import text_encoder
from prfaas.gateway.tokenization.known_prefixes import Naming
from prfaas.gateway.tokenization.text_encoder import (
    COMPARED_CHARS,
    COMPARED_EACH,
    Encoder,
    FastTokenizer,
)
from tests.gateway.tokenizer_zoo import ZOO, bpe, by_rules, tokenizer

UNKNOWN = {"bert", "unigram", "unigram-first", "unsplit-first", "strip"}
SHARING = {"bytes", "deepseek", "roberta", "unsplit", "llama2", "rewritten early"}
"""It would keep their words for all threads."""
TEXT = "The cat sat on the mat, and that's what they've said 12,345 times."


def core(name: str) -> Any:
    return tokenizer(name).backend_tokenizer


def exact(name: str, text: str) -> list[int]:
    ids: list[int] = core(name).encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", ZOO)
def test_who_is_encoded_quickly(name: str) -> None:
    made = FastTokenizer(core(name)).settled()
    assert made.is_on is (name not in UNKNOWN | SHARING)
    assert made(TEXT).tolist() == exact(name, TEXT)


def test_a_difference_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Tokenizer.from_json_str(core("llama3").to_str())
    monkeypatch.setattr(text_encoder, "_load", lambda _: other)
    made = FastTokenizer(core("qwen")).settled()
    assert not made.is_on
    assert made(TEXT).tolist() == exact("qwen", TEXT)


def test_a_difference_later(caplog: pytest.LogCaptureFixture) -> None:
    """It is found among what is compared, the tokens are right from then on, no text is logged."""
    encoder = Encoder(tokenizer("qwen")).settled()
    made = encoder._fast
    assert made is not None
    made._fast = Tokenizer.from_json_str(core("llama3").to_str())
    for _ in range(COMPARED_EACH):
        last, _ = encoder.encode(TEXT, False, Naming("salt"))
    assert not made.is_on
    assert last.tolist() == exact("qwen", TEXT)
    assert "12,345" not in caplog.text


def test_a_difference_within_a_long_prompt() -> None:
    """A part of it shows the difference, and all of it is made again."""
    made = FastTokenizer(core("qwen")).settled()
    made._fast = Tokenizer.from_json_str(core("llama3").to_str())
    # Both write words alike, and numbers not.
    text = f"{TEXT} " * 200
    made._numbers = itertools.count(COMPARED_EACH)
    assert len(text) > COMPARED_CHARS
    assert made(text).tolist() == exact("qwen", text)
    assert not made.is_on


def test_a_rule_that_takes_too_many_steps() -> None:
    slow = bpe(by_rules(r"(?:a+)+b|\s+|[^\s]"))
    made = FastTokenizer(slow).settled()
    text = "a" * 40 + "c"
    with pytest.raises(ValueError, match="limit"):
        Tokenizer.from_json_str(slow.to_str()).encode(text)
    assert made.is_on
    assert made(text).tolist() == slow.encode(text, add_special_tokens=False).ids


def test_texts_are_encoded_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway does not wait for it, and takes it once all probes agree."""
    load, go = text_encoder._load, threading.Event()
    monkeypatch.setattr(text_encoder, "_load", lambda core: load(core) if go.wait() else None)
    made = FastTokenizer(core("qwen"))
    assert not made.is_on
    assert made(TEXT).tolist() == exact("qwen", TEXT)
    go.set()
    assert made.settled().is_on
    assert made(TEXT).tolist() == exact("qwen", TEXT)
