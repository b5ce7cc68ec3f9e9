"""Answers with a seam, against vLLM's own detokeniser: the client gets what one engine sends."""

from __future__ import annotations

import importlib
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from prfaas.gateway.serving.request_state import StreamedAnswer
from prfaas.gateway.tokenization.text_encoder import pieces

pytestmark = pytest.mark.timeout(180)

ALPHABET = "ab <é世👋"
LETTERS = st.sampled_from(ALPHABET)


@pytest.fixture(scope="module")
def detokenizer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed here")
        module = importlib.import_module("vllm.v1.engine.detokenizer")
    return module.FastIncrementalDetokenizer


def byte_level() -> Tokenizer:
    """As of Qwen and Llama 3: every character may be several tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


def byte_fallback() -> Tokenizer:
    """As of Llama 2: the first space of a text is not its own, rare characters are bytes."""
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "▁", "<", "é"]
    vocab = {letter: i for i, letter in enumerate(known)}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return core


TOKENIZERS = [SimpleNamespace(_tokenizer=core) for core in (byte_level(), byte_fallback())]


class Engine:
    """One leg: tokens in, chunks out, as vLLM's completions make them."""

    def __init__(self, kind: Any, tokenizer: Any, prompt: list[int], stops: list[str]) -> None:
        params = SimpleNamespace(
            stop=stops,
            min_tokens=0,
            include_stop_str_in_output=False,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
        )
        request = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt, request_id="r")
        self._incremental = kind(tokenizer, request)

    def step(self, tokens: list[int], *, is_last: bool) -> dict[str, Any]:
        stop = self._incremental.update(tokens, False)
        done = is_last or stop is not None
        before = self._incremental.num_output_tokens()
        assert before >= 1
        choice = {
            "text": self._incremental.get_next_output_text(done, delta=True),
            "token_ids": list(tokens),
            "finish_reason": "stop" if stop else "length" if is_last else None,
            "stop_reason": stop,
        }
        return {"choices": [choice]}


def stream(
    engine: Engine, ids: list[int], step: int, breaks_after: int | None, answer: StreamedAnswer
) -> tuple[str, bool]:
    """Text that the client gets from a leg, and whether the answer is complete."""
    text = ""
    for number, start in enumerate(range(0, len(ids), step)):
        if number == breaks_after:
            return text, False
        chunk = engine.step(ids[start : start + step], is_last=start + step >= len(ids))
        [choice] = answer.take(chunk)["choices"]
        text += choice["text"]
        if choice["finish_reason"]:
            return text, True
    return text, False


@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    prompt=st.text(LETTERS, min_size=1, max_size=5),
    said=st.text(LETTERS, min_size=1, max_size=14),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=2),
    breaks=st.lists(st.integers(0, 12), max_size=2),
    step=st.integers(1, 3),
)
@example(TOKENIZERS[0], "<", "<👋", ["<👋", "👋"], [1], 1)
@example(TOKENIZERS[0], "<", "<👋", ["👋", "<👋"], [1], 1)
def test_a_broken_stream_reads_like_a_whole_one(
    detokenizer: Any,
    tokenizer: Any,
    prompt: str,
    said: str,
    stops: list[str],
    breaks: list[int],
    step: int,
) -> None:
    def encode(text: str) -> list[int]:
        return list(tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)

    begin, ids = encode(prompt), encode(prompt + said)[len(encode(prompt)) :]
    whole = StreamedAnswer(stops)
    engine = Engine(detokenizer, tokenizer, begin, stops)
    expected, _ = stream(engine, ids, 1, None, whole)

    answer, text, is_done = StreamedAnswer(stops), "", False
    for breaks_after in (*breaks, None):
        engine = Engine(detokenizer, tokenizer, begin + answer.token_ids, stops)
        rest = ids[len(answer.token_ids) :]
        more, is_done = stream(engine, rest, step, breaks_after, answer)
        text += more
        if is_done or breaks_after is None:
            break
        answer.move(pieces(tokenizer, begin, answer.token_ids, skip_special=True))
        if answer.is_stopped:
            [choice] = answer.take({"choices": [{"text": ""}]})["choices"]
            text += choice["text"]
            break
    assert text == expected
    assert answer.finish_reason == whole.finish_reason
    if answer.stop_end is not None:
        ends = itertools.accumulate(
            map(len, pieces(tokenizer, begin, answer.token_ids, skip_special=True))
        )
        assert 1 + sum(end < answer.stop_end for end in ends) == len(whole.token_ids)
