"""Chat messages, checked and brought into the shape that chat templates expect."""

from __future__ import annotations

from prfaas.gateway.http.json_codec import JsonObject, from_json
from prfaas.gateway.openai.validation import bad, shown

_KEPT = ("name", "tool_call_id")


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
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def has_other_parts(messages: list[JsonObject]) -> bool:
    """Whether a message carries anything but text. `messages` has passed `parse_messages`."""
    return any(
        part["type"] != "text"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
    )


def _message(message: object, place: str) -> JsonObject:
    if not isinstance(message, dict):
        raise bad(f"{place} must be an object, got {shown(message)}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad(f"{place}.role must be a string, got {shown(role)}", "messages")
    parsed: JsonObject = {"role": role, "content": _text(message.get("content"), place)}
    parsed |= {key: message[key] for key in _KEPT if isinstance(message.get(key), str)}
    if role == "assistant":
        _add_assistant_keys(parsed, message, place)
    return parsed


def _text(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{place}.content must be text or an array of parts", "messages")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise bad(f"{place}.content[{i}] must be an object with a type", "messages")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise bad(f"{place}.content[{i}].text must be a string", "messages")
            texts.append(part["text"])
    return "\n".join(texts)


def _add_assistant_keys(parsed: JsonObject, message: JsonObject, place: str) -> None:
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if isinstance(reasoning, str):
        parsed["reasoning"] = parsed["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise bad(f"{place}.tool_calls must be an array, got {shown(calls)}", "messages")
    if calls:
        parsed["tool_calls"] = [_tool_call(call, place) for call in calls]


def _tool_call(call: object, place: str) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise bad(f"{place}.tool_calls entries must be objects with a function", "messages")
    return call | {"function": function | {"arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> JsonObject:
    """Arguments as an object; what is no object counts as none, as in vLLM."""
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments.encode())
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}
