"""Chat messages, checked and brought into the shape that chat templates expect."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.validation import bad, shown, typed

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
