"""Chat messages, checked and brought into the shape that chat templates expect."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from prfaas.gateway.http.json_codec import JsonObject, from_json
from prfaas.gateway.openai.validation import bad, shown, typed

_KEPT = ("name", "tool_call_id")


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: Any = None


class ToolCall(msgspec.Struct):
    """A tool call of an assistant."""

    function: dict[str, Any]


class Message(msgspec.Struct):
    """A message of a chat."""

    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str | list[str | Part] | None = None
    tool_calls: list[ToolCall] | None = None


def parse_messages(messages: object) -> list[JsonObject]:
    """The conversation as templates take it: plain text, tool arguments as objects.

    Raises:
        RequestError: 400, naming the message.

    References:
        vLLM 0.32, `renderers/chat_utils.py`: text parts are joined with a line feed, arguments of
        tool calls are parsed, `reasoning_content` is another name for `reasoning`.
    """
    if not isinstance(messages, list) or not messages:
        raise bad(f"messages must be a non-empty array, got {shown(messages)}", "messages")
    checked: list[Message] = typed(messages, list[Message], "messages")
    return [
        _message(message, raw, f"messages[{i}]")
        for i, (message, raw) in enumerate(zip(checked, messages, strict=True))
    ]


def has_other_parts(messages: list[JsonObject]) -> bool:
    """Return True if a message carries anything but text. It has passed `parse_messages`."""
    return any(
        part["type"] != "text"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
    )


def _message(message: Message, raw: JsonObject, place: str) -> JsonObject:
    parsed: JsonObject = {"role": message.role, "content": _text(message, place)}
    parsed |= {key: raw[key] for key in _KEPT if isinstance(raw.get(key), str)}
    if message.role == "assistant":
        reasoning = raw.get("reasoning", raw.get("reasoning_content"))
        if isinstance(reasoning, str):
            parsed["reasoning"] = parsed["reasoning_content"] = reasoning
        if message.tool_calls:
            parsed["tool_calls"] = [_tool_call(call) for call in raw["tool_calls"]]
    return parsed


def _text(message: Message, place: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for i, part in enumerate(message.content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type == "text":
            texts.append(typed(part.text, str, f"{place}.content[{i}].text"))
    return "\n".join(texts)


def _tool_call(call: JsonObject) -> JsonObject:
    function = call["function"]
    return call | {"function": function | {"arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> JsonObject:
    """Arguments as an object; other values count as none, as in vLLM."""
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments.encode())
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}
