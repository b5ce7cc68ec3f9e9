"""Validated request bodies of vLLM's HTTP API.

JSON bodies as vLLM writes them.

References:
    vLLM 0.32, `entrypoints/openai`: `completion/protocol.py`, `chat_completion/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from prfaas.engines.timing.api.answers import AnswerChoice
from prfaas.errors import RequestError

NUM_CHOICES_MAX = 128
NUM_PROMPTS_MAX = 1024
DEFAULT_MAX_TOKENS = 16
Count = Annotated[int, msgspec.Meta(ge=0)]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct):
    """A completion or a chat completion; other fields have no effect."""

    model: str | None = None
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=NUM_CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: Count | None = None
    echo: bool | None = None
    logprobs: bool | Count | None = None
    top_logprobs: int | None = None
    temperature: float | None = None
    add_special_tokens: bool | None = None
    include_stop_str_in_output: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(filter(None, self.stop))

    @property
    def include_usage(self) -> bool:
        """Return True if a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return True if every chunk of a stream has the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


def read_body(data: bytes, model: str) -> tuple[Body, Mapping[str, Any]]:
    """A body, typed and as it came.

    Raises:
        RequestError: It is no JSON object, a field has the wrong type, or it asks for another
            model.
    """
    try:
        raw = msgspec.json.decode(data)
        body = msgspec.convert(raw, Body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RequestError(str(error)) from None
    if body.model is not None and body.model != model:
        raise RequestError(
            f"The model `{body.model[:256]}` does not exist.",
            status=404,
            param="model",
        )
    return body, raw


def prompts_of(prompt: object, vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completion: texts, or token ids; RequestError if it is neither."""
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if type(prompt[0]) is int:
            return [_token_ids(prompt, vocab_size)]
        if len(prompt) <= NUM_PROMPTS_MAX:
            return [_entry(entry, vocab_size) for entry in prompt]
    raise RequestError("prompt must be text or token ids, not empty, or a list of them")


def _entry(entry: object, vocab_size: int) -> str | list[int]:
    if isinstance(entry, str) and entry:
        return entry
    if isinstance(entry, list) and entry:
        return _token_ids(entry, vocab_size)
    raise RequestError("an entry of prompt must be text or token ids, not empty")


def _token_ids(ids: list[Any], vocab_size: int) -> list[int]:
    if set(map(type, ids)) != {int}:
        raise RequestError("token ids must be integers")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise RequestError(f"Token id {max(ids)} is out of vocabulary")
    return ids


Json = dict[str, Any]


def error_body(message: str, error_type: str, param: str | None, status: int) -> Json:
    """An error."""
    return {
        "error": {"message": message, "type": error_type, "param": param, "code": status},
    }


@dataclass(slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int = 0

    def counts(self) -> Json:
        """Without details, as chunks of a stream have it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def whole(self) -> Json:
        """Usage with details."""
        cached = {"cached_tokens": self.cached_tokens} if self.cached_tokens else None
        return self.counts() | {"prompt_tokens_details": cached}


class Replies:
    """Replies to one request.

    Args:
        created: Seconds since 1970.
        prompts: Token ids of every prompt.
        chat: True if it is a chat.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        body: Body,
        prompts: list[list[int]],
        *,
        chat: bool,
    ) -> None:
        self._chat, self._body, self._prompts = chat, body, prompts
        prefix = "chatcmpl-" if chat else "cmpl-"
        self._head = {"id": prefix + request_id, "created": created, "model": model}
        self._is_opened = False

    def whole(self, choices: list[AnswerChoice], usage: Usage) -> Json:
        """The complete answer."""
        kind = "chat.completion" if self._chat else "text_completion"
        reply = {**self._head, "object": kind, "usage": usage.whole()}
        if self._chat and self._body.return_token_ids:
            reply["prompt_token_ids"] = self._prompts[0]
        return reply | {
            "choices": [
                self._whole_chat(choice) if self._chat else self._whole_text(choice)
                for choice in choices
            ],
            "kv_transfer_params": None,
        }

    def chunks(self, changed: list[AnswerChoice], usage: Usage) -> list[Json]:
        """Chunks of a stream for choices that have grown."""
        chunks: list[Json] = []
        first = not self._is_opened
        if self._chat and first:
            chunks += [self._chunk([self._opening(choice.index)], usage) for choice in changed]
        self._is_opened = True
        for choice in changed:
            entry = self._delta(choice)
            if first and not self._chat and self._body.return_token_ids:
                entry["prompt_token_ids"] = self._prompt_of(choice)
            chunks.append(self._chunk([entry], usage))
        if first and self._chat and self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._prompts[0]
        return chunks

    def last(self, usage: Usage) -> Json:
        """The chunk with the usage of the whole request."""
        return self._chunk([], usage) | {"usage": usage.whole()}

    def _chunk(self, choices: list[Json], usage: Usage) -> Json:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        return chunk | ({"usage": usage.counts()} if self._body.continuous_usage else {})

    def _opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, choice: AnswerChoice) -> Json:
        text, tokens = choice.take()
        entry: Json = {"index": choice.index, **self._ids(tokens)}
        if self._chat:
            entry |= {"delta": {"content": text}, "logprobs": choice.chat_logprobs(tokens)}
        else:
            entry |= {"text": text, "logprobs": choice.completion_logprobs(tokens)}
        return entry | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _whole_chat(self, choice: AnswerChoice) -> Json:
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": choice.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": choice.chat_logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(choice.tokens),
        }

    def _whole_text(self, choice: AnswerChoice) -> Json:
        entry = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.completion_logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(choice.tokens),
        }
        if self._body.return_token_ids:
            entry["prompt_token_ids"] = self._prompt_of(choice)
        return entry

    def _prompt_of(self, choice: AnswerChoice) -> list[int]:
        return self._prompts[choice.index // (self._body.n or 1)]

    def _ids(self, tokens: list[int]) -> Json:
        return {"token_ids": tokens} if self._body.return_token_ids else {}
