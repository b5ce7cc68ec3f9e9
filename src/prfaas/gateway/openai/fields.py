"""Fields of a request body: the table of those that reach an engine, with types and traits.

vLLM ignores what it does not know and obeys what it does: `priority` moves a request ahead of
others, `data_parallel_rank` picks its GPUs, `logits_processors` names code. A field reaches an
engine if it is in the structs here, or if the operator lists it for everybody or for a tenant. A
field of type `Any` is passed on unread. `null` counts as absent. Values may have the other forms
that vLLM reads, such as `5.0` or `"5"` for 5 (`coerced`). Whatever the gateway does by the name
of a field is a `Trait` in the table.

References:
    vLLM 0.32, `entrypoints/openai/chat_completion/protocol.py` and `completion/protocol.py`.

Every error has the field, the value and the limit. Only a body that has other types than its fields
is coerced, by the rules of Pydantic, by which vLLM reads a body as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import TypeAdapter, ValidationError

from prfaas.errors import RequestError
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.service_tier import NO_SERVICES, Services

SHOWN_CHARS = 80
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "an array",
    "object": "an object",
}
_KIND = re.compile("|".join(_WORDS))
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def bad(message: str, param: str | None = None) -> RequestError:
    """A 400."""
    return RequestError(message, param=param)


def shown(value: object) -> str:
    """A value for an error message, cut to a bearable length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def typed(value: object, kind: Any, place: str = "") -> Any:
    """A decoded JSON value as a type of `msgspec`.

    Args:
        kind: The type; JSON's integers count as numbers, its true and false do not.
        place: Field that has the value; "" for the whole body.

    Raises:
        RequestError: 400, naming the field, its value and what it must be.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), value, place) from None


def _refusal(said: str, value: Any, place: str) -> RequestError:
    """An error of `msgspec` in the words of this API."""
    said, _, path = said.partition(" - at `$")
    for name, index in _STEP.findall(path):
        place += f".{name}" if name else f"[{index}]"
        value = value[name or int(index)]
    place, said = place.removeprefix("."), said.replace("`", "")
    param = re.split(r"[.\[]", place, maxsplit=1)[0]
    if (missing := said.removeprefix("Object missing required field ")) != said:
        return bad(f"{place}.{missing} must be given", param)
    said = said.partition(", got ")[0].replace("Expected", "must be").replace(" | null", "")
    said = _KIND.sub(lambda kind: _WORDS[kind[0]], said).replace(" | ", " or ")
    return bad(f"{place} {said}, got {shown(value)}", param)


NUM_CHOICES_MAX = 128
TOP_LOGPROBS_MAX = 1000
NumTop = Annotated[int, msgspec.Meta(ge=-1, le=TOP_LOGPROBS_MAX)]


class Trait(Enum):
    """Effect of a field on the course of a request."""

    EACH = auto()
    """It applies to each next token separately, given all earlier ones: another engine can continue
    the answer."""
    OURS = auto()
    """The gateway reads and checks it; a rehearsal leaves it out."""
    TEMPLATE = auto()
    """The gateway renders the chat template with it."""
    CHAT = auto()
    """It means something else, or nothing, in a completion that stands for a chat."""
    ENDPOINT = auto()
    """A chat with it needs the engine's chat endpoint."""
    WHOLE = auto()
    """A request with it is prefilled and decoded by one engine."""


_T = Trait


class Fields(msgspec.Struct):
    """Fields of both APIs."""

    model: Annotated[Any, _T.EACH, _T.OURS] = None
    stream: Annotated[bool | None, _T.EACH, _T.OURS] = None
    stream_options: Annotated[dict[str, Any] | None, _T.EACH, _T.OURS] = None
    stream_interval: Annotated[int | None, _T.EACH] = None
    user: Annotated[str | None, _T.EACH, _T.OURS] = None
    n: Annotated[Annotated[int, msgspec.Meta(ge=1, le=NUM_CHOICES_MAX)] | None, _T.EACH] = None
    max_tokens: Annotated[int | None, _T.EACH, _T.OURS] = None
    echo: Annotated[bool | None, _T.CHAT, _T.WHOLE] = None
    add_special_tokens: Annotated[bool | None, _T.EACH, _T.CHAT, _T.TEMPLATE] = None
    response_format: dict[str, Any] | None = None
    # Sampling.
    seed: Annotated[int | None, _T.EACH, _T.OURS] = None
    temperature: Annotated[float | None, _T.EACH] = None
    top_p: Annotated[float | None, _T.EACH] = None
    top_k: Annotated[int | None, _T.EACH] = None
    min_p: Annotated[float | None, _T.EACH] = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: Annotated[float | None, _T.EACH] = None
    repetition_detection: Any = None
    length_penalty: Any = None
    logit_bias: Annotated[dict[str, Any] | None, _T.EACH] = None
    allowed_token_ids: Annotated[list[int] | None, _T.EACH] = None
    bad_words: Any = None
    use_beam_search: Annotated[bool | None, _T.WHOLE] = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: Any = None
    vllm_xargs: dict[str, Any] | None = None
    # The end of the answer.
    min_tokens: Annotated[int | None, _T.EACH] = None
    stop: Annotated[str | list[str] | None, _T.EACH] = None
    stop_token_ids: Annotated[list[int] | None, _T.EACH] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: Annotated[bool | None, _T.EACH] = None
    # Details of prompt and answer.
    truncate_prompt_tokens: Annotated[int | None, _T.ENDPOINT, _T.WHOLE] = None
    truncation_side: Any = None
    prompt_logprobs: Annotated[int | None, _T.ENDPOINT, _T.WHOLE] = None
    logprob_token_ids: Annotated[list[int] | None, _T.ENDPOINT] = None
    return_token_ids: Annotated[bool | None, _T.ENDPOINT] = None
    return_token_offsets: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_strs: Any = None
    skip_special_tokens: Annotated[bool | None, _T.EACH] = None
    spaces_between_special_tokens: bool | None = None


class CompletionFields(Fields):
    """A completion; `prompt` is read by `requests.py`, which knows the vocabulary."""

    prompt: Annotated[Any, _T.EACH, _T.OURS] = None
    logprobs: NumTop | None = None
    suffix: Annotated[str | None, _T.WHOLE] = None


class ChatFields(Fields):
    """A chat completion; `messages.py` and `tools.py` read what templates get."""

    messages: Annotated[Any, _T.EACH, _T.CHAT, _T.OURS] = None
    max_completion_tokens: Annotated[int | None, _T.EACH, _T.CHAT, _T.OURS] = None
    logprobs: Annotated[bool | None, _T.CHAT] = None
    top_logprobs: Annotated[NumTop | None, _T.CHAT] = None
    reasoning_effort: Annotated[str | None, _T.ENDPOINT] = None
    include_reasoning: Annotated[bool | None, _T.ENDPOINT] = None
    return_prompt_text: Annotated[bool | None, _T.ENDPOINT] = None
    media_io_kwargs: Annotated[Any, _T.ENDPOINT] = None
    mm_processor_kwargs: Annotated[Any, _T.ENDPOINT] = None
    tools: Annotated[Any, _T.CHAT, _T.ENDPOINT] = None
    tool_choice: Annotated[Any, _T.EACH, _T.CHAT] = None
    parallel_tool_calls: Annotated[bool | None, _T.CHAT] = None
    documents: Annotated[list[Any] | None, _T.EACH, _T.CHAT, _T.TEMPLATE] = None
    add_generation_prompt: Annotated[bool | None, _T.EACH, _T.CHAT, _T.TEMPLATE] = None
    continue_final_message: Annotated[bool | None, _T.EACH, _T.CHAT, _T.TEMPLATE] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, _T.EACH, _T.CHAT, _T.TEMPLATE] = None


_TRAITS = {
    name: getattr(kind, "__metadata__", ())
    for fields in (CompletionFields, ChatFields)
    for name, kind in get_type_hints(fields, include_extras=True).items()
}
KNOWN_FIELDS = frozenset(_TRAITS)
"""Fields of all endpoints: the engine ignores fields of the other API."""
CONTROL_FIELDS = frozenset(
    {"kv_transfer_params", "cache_salt", "ec_transfer_params", "kv_hints", "request_id"}
)
CONTROL_PREFIX = "bootstrap_"
"""They steer caches and transfers: removed from every body, whatever an operator lists. The gateway
reads `cache_salt` itself."""
DROPPED_FIELDS = frozenset(
    {
        *("audio", "function_call", "functions", "metadata", "modalities", "moderation"),
        *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "verbosity", "web_search_options"),
        # Of OpenAI's older API and of older vLLM, which now ignores them.
        *("best_of", "guided_choice", "guided_decoding_backend", "guided_grammar"),
        *("guided_json", "guided_regex", "guided_whitespace_pattern"),
    }
)
"""No engine reads them: removed, so that clients work unchanged, and named in a response header."""
OURS_FIELDS = frozenset({"cache_salt", "safety_identifier", "service_tier"})
"""Of those that reach no engine, those that the gateway itself acts on."""
NULL_COUNTS = frozenset({"tool_choice"})
"""Fields whose `null` is not the same as leaving them out."""
REFUSED = ("chat_template", "prompt_embeds")
"""A program for the template engine, and tensors for the model: neither is taken from clients."""
NAMES_SHOWN = 8
_NAME = re.compile(r"\w{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Additional rights of a tenant's requests, set by the operator."""

    fields: frozenset[str] = frozenset()
    """Further fields that reach an engine."""
    media_domains: frozenset[str] = frozenset()
    """Hosts in lower case that engines may fetch media from."""
    services: Services = NO_SERVICES


STRICT = RequestRules()
"""No additional fields."""


def fields_with(trait: Trait) -> frozenset[str]:
    """Return the names of the fields that have a trait."""
    return frozenset(name for name, traits in _TRAITS.items() if trait in traits)


def types_of(api: type[Fields]) -> dict[str, Any]:
    """Return the types of the fields of an API, by name."""
    return get_type_hints(api)


def is_control(name: str) -> bool:
    """Return True for a field that steers an engine's caches or transfers."""
    return name in CONTROL_FIELDS or name.startswith(CONTROL_PREFIX)


def allowed(body: JsonObject, more: Collection[str] = ()) -> JsonObject:
    """A body without the fields that are for no engine; RequestError if 400, naming the fields that
    are not allowed.

    Args:
        more: Fields that the operator allows besides.
    """
    known = KNOWN_FIELDS.union(more)
    taken = known.union(DROPPED_FIELDS, REFUSED)
    unknown = [
        name
        for name, value in body.items()
        if name not in taken and not is_control(name) and value is not None
    ]
    if unknown:
        names = ", ".join(map(shown, unknown[:NAMES_SHOWN]))
        raise bad(
            f"{names} cannot be set here: leave it out, or have the operator list it under "
            "gateway.request_fields or the tenant's request_fields",
            unknown[0][:80],
        )
    for name in REFUSED:
        if body.get(name) not in (None, []):
            raise bad(f"{name} is not accepted from clients", name)
    kept = {
        name: value
        for name, value in body.items()
        if name in known and not is_control(name) and (value is not None or name in NULL_COUNTS)
    }
    # vLLM merges this object into the very dictionary that carries kv_transfer_params.
    if isinstance(extra := kept.get("vllm_xargs"), dict):
        kept["vllm_xargs"] = {name: v for name, v in extra.items() if not is_control(name)}
    return kept


def ignored(body: JsonObject, kept: JsonObject) -> tuple[str, ...]:
    """Names of the fields of a body that have no effect, in its order."""
    names = (
        name
        for name, value in body.items()
        if value is not None and name not in kept and name not in OURS_FIELDS
    )
    return tuple(name for name in names if _NAME.fullmatch(name))[:NAMES_SHOWN]


_LAX: dict[Any, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (bool, int, float, list[int])
}
_PROMPTS: TypeAdapter[Any] = TypeAdapter(list[int] | list[list[int]])


def _plain(kind: Any) -> Any:
    """A type without `None` and annotations; None for a union."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        parts = [part for part in get_args(kind) if part is not NoneType]
        if get_origin(kind) is not Annotated and len(parts) > 1:
            return None
        kind = parts[0]
    return kind


_READERS = {
    fields: {
        name: _LAX[plain]
        for name, kind in types_of(fields).items()
        if (plain := _plain(kind)) in _LAX
    }
    for fields in (ChatFields, CompletionFields)
}


def coerced(body: JsonObject, fields: type[ChatFields | CompletionFields]) -> JsonObject:
    """A body with its numbers and truth values as such; what is none stays as it is."""
    readers = _READERS[fields]
    return {
        name: _read(readers[name], value) if name in readers else value
        for name, value in body.items()
    }


def token_lists(value: object) -> list[list[int]] | None:
    """Token ids of one prompt or of several; None if these are not token ids alone."""
    ids = _read(_PROMPTS, value)
    if ids is value or not ids:
        return None
    return ids if isinstance(ids[0], list) else [ids]


def _read(reader: TypeAdapter[Any], value: object) -> Any:
    try:
        read = reader.validate_python(value)
    except ValidationError:
        return value
    # JSON has no infinity: it would become null on its way to the engine.
    return value if isinstance(read, float) and not math.isfinite(read) else read
