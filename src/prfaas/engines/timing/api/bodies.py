"""Validated request bodies of vLLM's HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

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
    return_tokens_as_token_ids: bool | None = None
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
            f"The model `{body.model[:256]}` does not exist.", status=404, param="model"
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
