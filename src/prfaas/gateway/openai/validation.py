"""Checks of single request fields; every failure says what, the value and the limit."""

from __future__ import annotations

from prfaas.errors import RequestError
from prfaas.gateway.http.json_codec import JsonObject

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_INTEGERS = ("n", "seed", "top_k", "min_tokens", "top_logprobs", "prompt_logprobs")
_BOOLEANS = (
    "stream",
    "echo",
    "ignore_eos",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "use_beam_search",
)
_OBJECTS = ("stream_options", "logit_bias", "response_format", "chat_template_kwargs", "vllm_xargs")
_STRINGS = ("user", "reasoning_effort", "suffix")
_ARRAYS = ("tools", "documents")
REFUSED = ("chat_template", "prompt_embeds")
"""A program for the template engine, and tensors for the model: neither is taken from clients."""
TOP_LOGPROBS_MAX = 1000
SHOWN_CHARS = 80


def bad(message: str, param: str | None = None) -> RequestError:
    """A 400."""
    return RequestError(message, param=param)


def shown(value: object) -> str:
    """A value for an error message, cut to a bearable length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def is_integer(value: object) -> bool:
    """Whether `value` is a JSON integer; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_types(body: JsonObject) -> None:
    """Refuse wrong types in the fields that both APIs share. `null` counts as absent.

    Raises:
        RequestError: 400, naming the field.
    """
    for name in _NUMBERS:
        value = body.get(name)
        if value is not None and not is_integer(value) and not isinstance(value, float):
            raise bad(f"{name} must be a number, got {shown(value)}", name)
    for name in _INTEGERS:
        integer(body, name)
    for names, kind, what in (
        (_BOOLEANS, bool, "true or false"),
        (_OBJECTS, dict, "an object"),
        (_STRINGS, str, "a string"),
        (_ARRAYS, list, "an array"),
    ):
        for name in names:
            value = body.get(name)
            if value is not None and not isinstance(value, kind):
                raise bad(f"{name} must be {what}, got {shown(value)}", name)
    _check_stop(body.get("stop"))
    for name in REFUSED:
        if body.get(name) is not None:
            raise bad(f"{name} is not accepted from clients", name)


def check_logprobs(body: JsonObject, *, is_chat: bool) -> None:
    """Chat asks with a switch and `top_logprobs`, completions with one number.

    Raises:
        RequestError: 400, naming the field.
    """
    if not is_chat:
        _in_range(integer(body, "logprobs"), "logprobs")
        return
    switch = body.get("logprobs")
    if switch is not None and not isinstance(switch, bool):
        raise bad(f"logprobs must be true or false, got {shown(switch)}", "logprobs")
    num_top = integer(body, "top_logprobs")
    _in_range(num_top, "top_logprobs")
    if num_top and not switch:
        raise bad("top_logprobs needs logprobs to be true", "top_logprobs")


def _in_range(num_logprobs: int | None, name: str) -> None:
    if num_logprobs is not None and not -1 <= num_logprobs <= TOP_LOGPROBS_MAX:
        raise bad(f"{name} must be between -1 and {TOP_LOGPROBS_MAX}, got {num_logprobs}", name)


def integer(body: JsonObject, name: str) -> int | None:
    """An optional integer field.

    Raises:
        RequestError: 400, it is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if not is_integer(value):
        raise bad(f"{name} must be an integer, got {shown(value)}", name)
    return int(value)


def _check_stop(stop: object) -> None:
    if stop is None or isinstance(stop, str):
        return
    if not isinstance(stop, list) or not all(isinstance(entry, str) for entry in stop):
        raise bad(f"stop must be a string or an array of strings, got {shown(stop)}", "stop")
