"""Chat messages, tools and media, checked and brought into the shape that chat templates expect.

An engine fetches what a URL names, with the network rights of its host: other services, a cloud's
metadata address, files. So a URL passes if it carries its bytes ("data:"), or if the operator has
listed its host under `model.media_domains`.

References:
    vLLM 0.32, `multimodal/media/connector.py` and `renderers/chat_utils.py`.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Collection
from typing import Annotated, Any

import msgspec

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.fields import bad, shown, typed

_KEPT = ("name", "tool_call_id", "task")
TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of parts that are text, with the key that has it."""
_CHANGING_LINE = "x-anthropic-billing-header"
"""Beginning of a line that some clients change with each request."""


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: Any = None
    refusal: Any = None
    thinking: Any = None


class ToolCall(msgspec.Struct):
    """A tool call of an assistant."""

    function: dict[str, Any]


class ChatMessage(msgspec.Struct):
    """A message of a chat."""

    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str | list[str | ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None


def parse_messages(messages: object) -> list[JsonObject]:
    """The conversation, its contents as lists of text parts and tool arguments as objects.

    Raises:
        RequestError: 400, naming the message.

    References:
        vLLM 0.32, `renderers/chat_utils.py`: `refusal`, `input_text` and others are texts too,
        arguments of tool calls are parsed, `reasoning` has a second name for templates, and the
        first line of a system message is dropped that some clients change with each request.
    """
    if not isinstance(messages, list) or not messages:
        raise bad(f"messages must be a non-empty array, got {shown(messages)}", "messages")
    checked: list[ChatMessage] = typed(messages, list[ChatMessage], "messages")
    return [
        _message(message, raw, f"messages[{i}]")
        for i, (message, raw) in enumerate(zip(checked, messages, strict=True))
    ]


def for_template(
    messages: list[JsonObject], *, knows_developer: bool, takes_parts: bool
) -> list[JsonObject]:
    """Parsed messages in the form that a chat template takes.

    Args:
        knows_developer: False turns developer messages into system messages, which are then one
            message at the front.
        takes_parts: The template goes through the parts of a content; else they are one text.
    """
    found = [_in_form(message, takes_parts=takes_parts) for message in messages]
    if knows_developer or all(message["role"] != "developer" for message in found):
        return found
    named = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in found
    ]
    first, *others = [message for message in named if message["role"] == "system"]
    if not others and named[0] is first:
        return named
    texts = [_joined(message["content"]) for message in (first, *others)]
    whole = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [whole, *(message for message in named if message["role"] != "system")]


def _in_form(message: JsonObject, *, takes_parts: bool) -> JsonObject:
    parts = message["content"]
    if takes_parts and message["role"] != "tool":
        return message
    texts = [part["text"] for part in parts]
    # Empty texts are left out, but for tools of a template that takes parts.
    return message | {"content": "\n".join(t for t in texts if t or takes_parts)}


def _joined(content: str | list[JsonObject]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def has_other_parts(messages: list[JsonObject]) -> bool:
    """Return True if a message carries anything but text. It has passed `parse_messages`."""
    return any(
        part["type"] not in TEXT_KEYS
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
    )


def _message(message: ChatMessage, raw: JsonObject, place: str) -> JsonObject:
    parsed: JsonObject = {"role": message.role, "content": _parts(message, place)}
    parsed |= {key: raw[key] for key in _KEPT if isinstance(raw.get(key), str)}
    if message.role == "assistant":
        reasoning = raw.get("reasoning", raw.get("reasoning_content"))
        if isinstance(reasoning, str):
            parsed["reasoning"] = parsed["reasoning_content"] = reasoning
        if message.tool_calls:
            parsed["tool_calls"] = [_tool_call(call) for call in raw["tool_calls"]]
    elif message.role == "developer":
        parsed["tools"] = raw.get("tools")
    return parsed


def _parts(message: ChatMessage, place: str) -> list[JsonObject]:
    content = message.content
    if not isinstance(content, list):
        content = [] if content is None else [content]
    parts: list[JsonObject] = []
    for i, part in enumerate(content):
        text = part if isinstance(part, str) else _text(part, f"{place}.content[{i}]")
        if text is not None:
            parts.append({"type": "text", "text": text})
    if message.role == "system":
        parts = [kept for part in parts if (kept := _without_first_line(part)) is not None]
    return parts


def _text(part: ContentPart, place: str) -> str | None:
    """Text of a part; None if it is no text."""
    key = TEXT_KEYS.get(part.type)
    return None if key is None else str(typed(getattr(part, key), str, f"{place}.{key}"))


def _without_first_line(part: JsonObject) -> JsonObject | None:
    if not part["text"].startswith(_CHANGING_LINE):
        return part
    rest = part["text"].partition("\n")[2]
    return {"type": "text", "text": rest} if rest else None


def _tool_call(call: JsonObject) -> JsonObject:
    function = call["function"]
    return call | {"function": function | {"arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> JsonObject:
    """Arguments as an object; other values count as none, as in vLLM."""
    if isinstance(arguments, str):
        try:
            # The reader of vLLM: it takes NaN, numbers beyond the range and single surrogates.
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


_ALWAYS = ("description", "parameters")


class Function(msgspec.Struct):
    """A function that a chat may call; templates print its keys in this order."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(msgspec.Struct):
    """A tool of a chat."""

    function: Function
    type: str = "function"
    defer_loading: bool | None = None


def parse_tools(tools: object) -> list[JsonObject]:
    """The tools of a chat request, keys in vLLM's order, its defaults added, the rest left out.

    Templates print tools as JSON, so order and absent keys make tokens.

    Raises:
        RequestError: 400, naming the tool.

    References:
        vLLM 0.32, `ChatCompletionToolsParam` and `FunctionDefinition`, `model_dump`.
    """
    found: list[Tool] = typed(tools or [], list[Tool], "tools")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(found)]


def _tool(tool: Tool, place: str) -> JsonObject:
    if tool.type != "function":
        raise bad(f'{place}.type must be "function", got {shown(tool.type)}', "tools")
    deferred, function = tool.defer_loading, tool.function
    if function.defer_loading is None:
        function.defer_loading = deferred
    values = msgspec.structs.asdict(function).items()
    kept = {key: value for key, value in values if value is not None or key in _ALWAYS}
    parsed: JsonObject = {"type": "function", "function": kept}
    return parsed if deferred is None else parsed | {"defer_loading": deferred}


ANY_PUBLIC = "*"
"""Value of `model.media_domains` for all names except those of private networks."""
_URL_KEYS = {"image_url": "image_url", "audio_url": "audio_url", "video_url": "video_url"}
_URL_TYPES = frozenset({*_URL_KEYS, "input_image"})
_TYPES = _URL_TYPES | {*TEXT_KEYS, "input_audio", "tool_reference"}
_MEDIA_KEYS = frozenset(
    {*_URL_KEYS, "input_audio", "image_pil", "image_embeds", "audio_embeds", "video_embeds"}
    | {"prompt_embeds", "uuid"}
)
_URL = re.compile(r"https?://(\[[0-9a-f:.]{2,45}\]|[a-z0-9.-]{1,253})(:[0-9]{1,5})?(?:[/?#].*)?")
"""Pattern of an unambiguous URL: no user, no escapes and no unusual characters in the host."""
_PUBLIC_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z][a-z0-9-]*[a-z0-9]")
_PRIVATE_ENDS = frozenset(
    {"localhost", "localdomain", "local", "internal", "intranet", "private", "lan", "home", "corp"}
    | {"arpa", "svc", "test"}
)
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")))
"""NAT64 and 6to4: the address within may be a private one. Teredo is not global to begin with."""


def check_media(messages: list[JsonObject], domains: Collection[str]) -> None:
    """Refuse parts of messages that would have an engine fetch what it may not.

    Args:
        messages: They have passed `parse_messages`.
        domains: Hosts that may be fetched from, in lower case; `ANY_PUBLIC` for all public names.

    Raises:
        RequestError: 400, naming the part.
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict):
                _check_part(part, f"messages[{i}].content[{j}]", domains)


def _check_part(part: JsonObject, place: str, domains: Collection[str]) -> None:
    kind = part["type"]
    if kind not in _TYPES:
        raise bad(
            f"{place}.type must be text, image_url or the like, got {shown(kind)}", "messages"
        )
    # vLLM takes some keys for media whatever the type says, and a `uuid` for the name under which
    # it keeps them, for all tenants.
    own = {"image_url"} if kind == "input_image" else {kind}
    odd = sorted((_MEDIA_KEYS & part.keys()) - own)
    if odd:
        raise bad(f"{place} of type {kind!r} must not have {', '.join(odd)}", "messages")
    if kind in _URL_TYPES:
        key = _URL_KEYS.get(kind, "image_url")
        _check_url(part.get(key), f"{place}.{key}", domains)


def _check_url(value: object, place: str, domains: Collection[str]) -> None:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise bad(f"{place} must hold a URL, got {shown(value)}", "messages")
    if url[:5].lower() == "data:":
        return
    found = _URL.fullmatch(url.lower())
    if found is None:
        raise bad(
            f'{place} must be a "data:" URL, or one that begins with http:// or https:// and a '
            f"host; got {shown(url)}",
            "messages",
        )
    host = found[1].strip("[]")
    if host in domains or (ANY_PUBLIC in domains and _is_public(host)):
        return
    raise bad(
        f'{place}: nothing is fetched from {shown(host)}; send the media itself as a "data:" URL, '
        "or have the operator add the host to model.media_domains",
        "messages",
    )


def _is_public(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
        is_translated = address.version == 6 and any(address in net for net in _TRANSLATED)
        return address.is_global and not is_translated
    except ValueError:
        # A last label of digits would be an address in another notation.
        named = _PUBLIC_NAME.fullmatch(host) is not None
        return named and host.rpartition(".")[2] not in _PRIVATE_ENDS
