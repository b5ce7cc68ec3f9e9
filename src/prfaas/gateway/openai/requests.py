"""Client bodies, checked and stripped, as one frozen request; engine answers in
the client's words.

Nothing that steers the engines' caches or transfers gets past this module: such keys are removed,
wherever vLLM would read them. Other fields pass by an allow-list (`openai/fields.py`).

Every answer and chunk of an engine passes through one of the `Replies`: `Relay` where engine and
client speak the same API, `ChatFromCompletions` where the gateway rendered the chat template itself
and the engine only ever saw a completion.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prfaas.core.market.classes import ServiceClass
from prfaas.errors import RequestError
from prfaas.gateway.http.json_codec import (
    JsonObject,
    as_object,
    from_json,
    is_deeper_than,
    num_containers,
    num_opened,
)
from prfaas.gateway.openai.fields import (
    STRICT,
    ChatFields,
    CompletionFields,
    RequestRules,
    Trait,
    allowed,
    bad,
    coerced,
    fields_with,
    ignored,
    shown,
    token_lists,
    typed,
)
from prfaas.gateway.openai.messages import check_media, has_other_parts, parse_messages, parse_tools

NESTING_MAX = 64
"""Levels of arrays and objects in a body; tool schemas stay far below."""
CONTAINERS_MAX = 100_000
"""Arrays and objects in a body; the messages of a full context have fewer."""
KEYS_MAX = 1000
"""Fields of a body; the API has less than a hundred."""
NUM_PROMPTS_MAX = 128
BYTES_PER_TOKEN = 4
"""Of a text that is not tokenised yet."""
DEFAULT_MAX_TOKENS = 16
"""Default output limit of the completions API."""

SALT_CHARS_MAX = 128
_SALT = re.compile(rf"[^@/\\\x00]{{1,{SALT_CHARS_MAX}}}")
_NOBODY: tuple[object, ...] = (None, "")
_CHAT_ENDPOINT_KEYS = fields_with(Trait.ENDPOINT)
_UNSPLITTABLE_KEYS = fields_with(Trait.WHOLE)


class Api(StrEnum):
    """API of OpenAI that the client uses."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class MadePrompt:
    """A prompt that another process has tokenised."""

    sequences: Sequence[Sequence[int]]
    """Token ids."""
    hashes: Sequence[bytes]
    """Of its blocks."""
    named_by: str
    """Facts that the hashes depend on besides the tokens (`Naming.key`)."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request, checked."""

    api: Api
    body: JsonObject
    """Body as the client sent it, control keys removed."""
    prompts: list[str | list[int]]
    """Prompts of a completions request: text or token ids each. Empty for chat."""
    messages: list[JsonObject]
    """Messages of a chat request, text parts joined. Empty for completions."""
    tools: list[JsonObject]
    """Tools of a chat request, as the template gets them."""
    stream: bool
    """True if the client wants server-sent events."""
    include_usage: bool
    """True if it wants a usage chunk at the end of the stream."""
    continuous_usage: bool
    """True if it wants usage in every chunk."""
    num_choices: int
    max_tokens: int | None
    """Output limit, tokens; None for what the model's length leaves."""
    max_tokens_field: str
    """Its place in the client's request."""
    by_chat_endpoint: bool
    """True if decode needs the engine's chat endpoint: tool and reasoning parsers live there."""
    offloadable: bool
    """True if prefill and decode may be split."""
    is_exact: bool
    """True if the gateway's token ids are exactly what the engine computes on. False with images
    and the like, with a suffix, and where the engine cuts the prompt."""
    num_bytes: int | None = None
    """Of the body; None where that is not known."""
    is_for_adapter: bool = False
    """True if the requested model is an adapter of the engines."""
    user: object = None
    """The end user, as the client sent it: any JSON value."""
    cache_salt: str = ""
    """The client's own salt, within its tenant's; empty for none."""
    ignored: tuple[str, ...] = ()
    """Fields that have no effect."""
    service: ServiceClass | None = None
    """Its class of service; None is that of the deployment."""
    answer_role: str = "assistant"
    """Role of the answers to a chat, where a turn is begun."""
    made: MadePrompt | None = None
    """Its prompt, if a worker has made it."""

    @property
    def num_sequences(self) -> int:
        """Answers that engines make for it: prompts times choices."""
        return max(1, len(self.prompts)) * self.num_choices

    @property
    def num_tokens_expected(self) -> int:
        """Tokens of its prompts as far as is known before they are tokenised."""
        ids = sum(len(prompt) for prompt in self.prompts if not isinstance(prompt, str))
        return ids or (self.num_bytes or 0) // BYTES_PER_TOKEN

    @property
    def priority(self) -> int:
        """Of its class of service."""
        return 0 if self.service is None else self.service.priority

    def forget_messages(self) -> None:
        """Let go of the messages once they are tokens, unless an engine renders them again."""
        if not self.by_chat_endpoint and self.is_exact:
            self.messages.clear()
            self.body.pop("messages", None)


def parse_request(
    body: bytes | JsonObject,
    api: Api,
    model: str,
    vocab_size: int,
    *,
    chat_endpoint: bool = False,
    rules: RequestRules = STRICT,
    adapters: Collection[str] = (),
) -> ClientRequest:
    """Check a body.

    Args:
        body: As it came, or as a JSON object.
        vocab_size: Token ids have to be below this.
        chat_endpoint: Every chat needs the engines' chat endpoint.
        rules: What its tenant may send beyond what everybody may.
        adapters: Names of adapters, which may be asked for instead of the model.

    Raises:
        RequestError: 400 or 404.
    """
    num_bytes = None
    if isinstance(body, bytes):
        num_bytes, body = len(body), parse_object(body)
    user = body.get("safety_identifier")
    user = body.get("user") if user in _NOBODY else user
    cache_salt = _cache_salt(body.get("cache_salt"))
    service = rules.services.named(body.get("service_tier"))
    sent, body = body, allowed(body, rules.fields)
    is_for_adapter = check_model(body, model, adapters)
    chat = api is Api.CHAT
    body, fields = _fields(body, ChatFields if chat else CompletionFields)
    if isinstance(fields, ChatFields) and fields.top_logprobs and not fields.logprobs:
        raise bad("top_logprobs needs logprobs to be true", "top_logprobs")
    max_tokens, max_tokens_field = _max_tokens(fields, sent)
    stream, options = bool(fields.stream), fields.stream_options or {}
    if options and not stream:
        raise bad("stream_options can only be set when stream is true", "stream_options")
    given = {key for key, value in body.items() if value is not None}
    switched_off = {key for key, value in body.items() if value is False}
    prompts = [] if chat else _prompts(body.get("prompt"), vocab_size)
    messages = parse_messages(body.get("messages")) if chat else []
    tools = parse_tools(body.get("tools")) if chat else []
    if chat:
        check_media(body["messages"], rules.media_domains)
    is_multimodal = chat and has_other_parts(body["messages"])
    include_usage = bool(options.get("include_usage"))
    return ClientRequest(
        api=api,
        body=body,
        prompts=prompts,
        messages=messages,
        tools=tools,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        num_choices=fields.n or 1,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        by_chat_endpoint=chat
        and (chat_endpoint or is_multimodal or _needs_chat_endpoint(body, given)),
        offloadable=not is_multimodal
        and not is_for_adapter
        and len(prompts) <= 1
        and not (given - switched_off) & _UNSPLITTABLE_KEYS,
        is_exact=not is_multimodal and not given & {"truncate_prompt_tokens", "suffix"},
        num_bytes=num_bytes,
        is_for_adapter=is_for_adapter,
        user=user,
        cache_salt=cache_salt,
        ignored=ignored(sent, body),
        service=service,
    )


def parse_object(data: bytes) -> JsonObject:
    """A body as a JSON object; RequestError (400) if it is invalid, nests too deeply or is too
    large."""
    # Each takes two bytes at least, and counting is worth it only beyond that.
    is_long = len(data) // 2 > CONTAINERS_MAX and num_opened(data) > CONTAINERS_MAX
    if is_long and (num := num_containers(data)) > CONTAINERS_MAX:
        raise bad(f"the body has {num} arrays and objects; the limit is {CONTAINERS_MAX}")
    try:
        body = from_json(data)
    except ValueError as error:
        raise bad(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad(f"the body must be a JSON object, got {type(body).__name__}")
    if is_deeper_than(body, NESTING_MAX):
        raise bad(f"the body nests more than {NESTING_MAX} levels deep")
    if len(body) > KEYS_MAX:
        raise bad(f"the body has {len(body)} fields; the limit is {KEYS_MAX}")
    return body


def check_model(body: JsonObject, model: str, adapters: Collection[str] = ()) -> bool:
    """Check that the model that is asked for is served; put in its name if none is asked for.

    Returns:
        True if it is an adapter.

    Raises:
        RequestError: 404.
    """
    wanted = body.get("model")
    if wanted is not None and not isinstance(wanted, str):
        raise bad(f"model must be a string, got {shown(wanted)}", "model")
    if not wanted or wanted == model:
        body["model"] = model
        return False
    if wanted in adapters:
        return True
    raise RequestError(
        f"The model {shown(wanted)} does not exist; this gateway serves {model!r}"
        f"{' and adapters that /v1/models lists' if adapters else ''}.",
        status=404,
        param="model",
    )


def _fields(
    body: JsonObject, kind: type[ChatFields | CompletionFields]
) -> tuple[JsonObject, ChatFields | CompletionFields]:
    """A body with its values as the engines take them, and its fields.

    Raises:
        RequestError: 400, naming the field, its value and what it must be.
    """
    try:
        return body, typed(body, kind)
    except RequestError:
        body = coerced(body, kind)
        return body, typed(body, kind)


def _max_tokens(fields: ChatFields | CompletionFields, sent: JsonObject) -> tuple[int | None, str]:
    field, value, least = "max_tokens", fields.max_tokens, 1
    if isinstance(fields, CompletionFields):
        # As in vLLM, null is what the model's length leaves.
        value = sent.get("max_tokens", DEFAULT_MAX_TOKENS) if value is None else value
        least = 0 if fields.echo else 1
    elif fields.max_completion_tokens is not None:
        field, value = "max_completion_tokens", fields.max_completion_tokens
    if value is not None and value < least:
        raise bad(f"{field} must be at least {least}, got {value}", field)
    return value, field


def _cache_salt(salt: object) -> str:
    if salt is None:
        return ""
    if isinstance(salt, str) and _SALT.fullmatch(salt):
        return salt
    raise bad(
        f"cache_salt must be a string of 1 to {SALT_CHARS_MAX} characters without @, /, \\ and "
        f"NUL, got {shown(salt)}",
        "cache_salt",
    )


def _needs_chat_endpoint(body: JsonObject, given: set[str]) -> bool:
    wants_tool = body.get("tool_choice") not in (None, "none")
    switched_on = any(body.get(key) is True for key in ("echo", "logprobs"))
    return wants_tool or switched_on or bool(_CHAT_ENDPOINT_KEYS & given)


def _prompts(prompt: object, vocab_size: int) -> list[str | list[int]]:
    if prompt is None or prompt in ("", []):
        raise bad("prompt must be given and not be empty", "prompt")
    try:
        several = _typed_prompts(prompt)
    except RequestError:
        if (ids := token_lists(prompt)) is None or len(ids) > NUM_PROMPTS_MAX:
            raise
        several = list(ids)
    for i, entry in enumerate(several):
        if not entry:
            raise bad(f"prompt[{i}] must be text or token ids, not empty", "prompt")
        if not isinstance(entry, str):
            _check_vocabulary(entry, vocab_size, "prompt")
    return several


def _typed_prompts(prompt: object) -> list[str | list[int]]:
    if not isinstance(prompt, list) or type(prompt[0]) is int:
        return [typed(prompt, str | list[int], "prompt")]
    if len(prompt) <= NUM_PROMPTS_MAX or type(prompt[0]) in (bool, float):
        several: list[str | list[int]] = typed(prompt, list[str | list[int]], "prompt")
        return several
    raise bad(f"prompt holds {len(prompt)} prompts; the limit is {NUM_PROMPTS_MAX}", "prompt")


def token_ids(ids: object, vocab_size: int, param: str) -> list[int]:
    """Token ids of a client.

    Raises:
        RequestError: 400, naming the field: some are no integers, or not in the vocabulary.
    """
    try:
        found: list[int] = typed(ids, list[int], param)
    except RequestError:
        lists = token_lists(ids)
        if lists is None or len(lists) > 1:
            raise
        [found] = lists
    _check_vocabulary(found, vocab_size, param)
    return found


def _check_vocabulary(ids: list[int], vocab_size: int, param: str) -> None:
    for extreme in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= extreme < vocab_size:
            raise bad(f"token id {extreme} is out of vocabulary: 0 to {vocab_size - 1}", param)


_PRIVATE_KEYS = ("kv_transfer_params", "ec_transfer_params")
_WHOLE_CHAT_NULLS = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
_FIRST_CHUNK_NULLS = {"prompt_token_ids": None, "prompt_text": None}
"""Keys of vLLM's chat answers that no completion has. A request that fills one goes to the engine's
chat endpoint."""


class Relay:
    """Same API on both sides: ids change, and transfer parameters become null."""

    def __init__(self, prefix: str, request_id: str) -> None:
        self._id, self.opened = prefix + request_id, True

    def whole(self, answer: JsonObject) -> JsonObject:
        """A complete answer."""
        return answer | _without_private(answer) | {"id": self._id}

    def chunks(self, chunk: JsonObject) -> list[JsonObject]:
        """A chunk of a stream: what to send for it, in order."""
        return [self.whole(chunk)]


class ChatFromCompletions:
    """Completion objects as chat objects, as vLLM's chat endpoint writes them.

    Log probabilities are none of them: a completion lists the most likely tokens by their text, and
    two of one text are one there.

    References:
        vLLM 0.32, `entrypoints/openai/chat_completion/serving.py`.
    """

    def __init__(self, client: ClientRequest, request_id: str) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._num_choices = client.num_choices
        renders_turn = client.body.get("add_generation_prompt") is not False
        self._role = client.answer_role if renders_turn else client.messages[-1]["role"]
        self.opened = False
        """True once the client has the role of the answers."""

    def whole(self, answer: JsonObject) -> JsonObject:
        """A complete answer."""
        head = answer | _without_private(answer) | _WHOLE_CHAT_NULLS
        choices = [self._choice(choice) for choice in answer.get("choices", [])]
        return head | {"id": self._id, "object": "chat.completion", "choices": choices}

    def chunks(self, chunk: JsonObject) -> list[JsonObject]:
        """A chunk of a stream. The first one is preceded by one with the role for every choice."""
        head = chunk | {"id": self._id, "object": "chat.completion.chunk"}
        if chunk.get("choices") and "usage" in chunk:
            head["usage"] = as_object(chunk["usage"]) | {"completion_tokens_details": None}
        out = [head | {"choices": [self._delta(choice) for choice in chunk.get("choices", [])]}]
        if not self.opened and chunk.get("choices"):
            self.opened = True
            return [*self._openings(head), *out]
        return out

    def _openings(self, head: JsonObject) -> list[JsonObject]:
        if usage := as_object(head.get("usage")):
            prompt_tokens = usage.get("prompt_tokens", 0)
            none_yet = {"completion_tokens": 0, "total_tokens": prompt_tokens}
            head = head | {"usage": usage | none_yet}
        delta = {"role": self._role, "content": ""}
        opening = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [
            head | _FIRST_CHUNK_NULLS | {"choices": [{"index": index, **opening}]}
            for index in range(self._num_choices)
        ]

    def _choice(self, choice: JsonObject) -> JsonObject:
        return {
            "index": choice.get("index", 0),
            "message": {
                "role": self._role,
                "content": choice.get("text", ""),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": choice.get("finish_reason") or "stop",
            "stop_reason": choice.get("stop_reason"),
            "token_ids": None,
            "routed_experts": choice.get("routed_experts"),
        }

    def _delta(self, choice: JsonObject) -> JsonObject:
        delta = {
            "index": choice.get("index", 0),
            "delta": {"content": choice.get("text", "")},
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
            "token_ids": None,
        }
        if choice.get("finish_reason") is not None:
            delta["stop_reason"] = choice.get("stop_reason")
        return delta


Replies = Relay | ChatFromCompletions


def replies_for(client: ClientRequest, request_id: str) -> Replies:
    """The conversion of the answers to a request."""
    if client.api is Api.CHAT and not client.by_chat_endpoint:
        return ChatFromCompletions(client, request_id)
    return Relay("chatcmpl-" if client.api is Api.CHAT else "cmpl-", request_id)


def _without_private(answer: JsonObject) -> JsonObject:
    """Null for everything that is between the gateway and its engines."""
    return {key: None for key in _PRIVATE_KEYS if key in answer}
