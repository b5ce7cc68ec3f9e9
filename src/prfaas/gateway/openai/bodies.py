"""Types of the fields of a request. `null` counts as absent; other fields reach engines unread.

References:
    vLLM 0.32, `entrypoints/openai/chat_completion/protocol.py` and `completion/protocol.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

NUM_CHOICES_MAX = 128
TOP_LOGPROBS_MAX = 1000
NumTop = Annotated[int, msgspec.Meta(ge=-1, le=TOP_LOGPROBS_MAX)]


class Fields(msgspec.Struct):
    """Fields of both APIs."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=NUM_CHOICES_MAX)] | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    echo: bool | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    add_special_tokens: bool | None = None
    vllm_xargs: dict[str, Any] | None = None


class CompletionFields(Fields):
    """A completion; `prompt` is read by `requests.py`, which knows the vocabulary."""

    logprobs: NumTop | None = None
    suffix: str | None = None


class ChatFields(Fields):
    """A chat completion; `messages.py` and `tools.py` read what templates get."""

    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
