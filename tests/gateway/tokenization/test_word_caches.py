"""Nothing that a tokenizer remembers of one tenant's text is there for another one's."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from prfaas.gateway.tokenization.known_prefixes import Naming
from prfaas.gateway.tokenization.text_encoder import (
    Encoder,
    FastTokenizer,
    forget_words,
    keeps_words_by_thread,
)
from tests.gateway.tokenizer_zoo import (
    DEEPSEEK,
    ZOO,
    bpe,
    by_rules,
    tokenizer,
)

BY_THREAD = {
    *("qwen", "llama3", "mistral", "removed", "gpt2", "spaces", "stripping", "strip"),
    *("unknown rule", "half a rule", "words as tokens", "greedy words", "single words"),
}


def new_words(seed: int, num: int = 20_000) -> list[str]:
    rng = random.Random(seed)
    letters = "etaoinshrdlcumw"
    return ["".join(rng.choices(letters, k=rng.randint(8, 15))) for _ in range(num)]


def cpu_s(work: Callable[[], object]) -> float:
    """Time of the calling thread's own, which a busy machine changes least."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


@pytest.mark.parametrize("name", ZOO)
def test_fastokens_serves_only_tokenizers_whose_words_it_keeps_by_thread(name: str) -> None:
    core = tokenizer(name).backend_tokenizer
    assert keeps_words_by_thread(core) is (name in BY_THREAD)
    if name not in BY_THREAD:
        assert not FastTokenizer(core).settled().is_on


def test_deepseeks_rules_are_known_as_the_model_writes_them() -> None:
    assert not keeps_words_by_thread(bpe(by_rules(*DEEPSEEK)))
    real = [rule.replace(r"\r\n", "\r\n") for rule in DEEPSEEK]
    assert keeps_words_by_thread(bpe(by_rules(*real)))


@pytest.mark.parametrize("name", ["qwen", "gpt2", "deepseek"])
def test_words_of_one_thread_are_new_to_another(name: str) -> None:
    """Known words take a fifth of the time of new ones; on another thread they take all of it."""
    core: Any = bpe(by_rules(*(rule.replace(r"\r\n", "\r\n") for rule in DEEPSEEK)))
    made = FastTokenizer(core if name == "deepseek" else tokenizer(name).backend_tokenizer)
    made.settled()
    assert made.is_on
    known, new = [], []
    for attempt in range(5):
        words, others = new_words(2 * attempt), new_words(2 * attempt + 1)
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            one.submit(made, " ".join(words)).result()
            other.submit(made, "warm up").result()
            again = " ".join(random.Random(attempt).sample(words, len(words)))
            known.append(other.submit(cpu_s, partial(made, again)).result())
            new.append(other.submit(cpu_s, partial(made, " ".join(others))).result())
    assert min(known) > 0.6 * min(new)


@pytest.mark.parametrize("name", ["qwen", "bytes", "unigram"])
def test_tokenizers_remember_no_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prfaas.gateway.tokenization.text_encoder._load", lambda _: None)
    copy = Tokenizer.from_str(tokenizer(name).backend_tokenizer.to_str())
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=copy))
    known, new = [], []
    for attempt in range(5):
        words = [" ".join(new_words(3 * attempt + i, 2000)) for i in range(2)]
        encoder.encode(words[0], False, Naming("red"))
        known.append(cpu_s(partial(encoder.encode, words[0], False, Naming("blue"))))
        new.append(cpu_s(partial(encoder.encode, words[1], False, Naming("blue"))))
    assert min(known) > 0.6 * min(new)


def test_a_slow_tokenizers_words_are_forgotten() -> None:
    class Slow:
        def __init__(self) -> None:
            self.cache = {"word": "w ord"}

    slow = Slow()
    forget_words(slow)
    assert not slow.cache
    forget_words(object())
