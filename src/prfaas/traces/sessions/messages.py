"""Messages of chat transcripts, one session or one message a line.

A session a line has its messages under `messages` (OpenAI), `conversations` (ShareGPT) or
`conversation` (WildChat, LMSYS), with `tools` and `system` beside them if there are any. A message
a line has `role` and `content`, itself or under `message` (agents' logs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from prfaas.traces import checks
from prfaas.traces.checks import DroppedError, decode

NUM_MESSAGES_MAX = 100_000
"""Limit of one line."""
ID_CHARS_MAX = 256
ROLE_CHARS_MAX = 64
_DEPTH_MAX = 8
_LISTS = ("messages", "conversations", "conversation")
_IDS = ("session_id", "sessionId", "conversation_id", "conversation_hash")
_TIMES = ("timestamp", "created_at", "create_time", "time", "ts")
_ANSWERS = frozenset(
    {"assistant", "gpt", "model", "ai", "bot", "chatgpt", "bard", "bing", "function_call"}
)
_HIDDEN_PARTS = frozenset({"thinking", "reasoning"})
_decoder = msgspec.json.Decoder(dict[str, Any])


class SessionMessage(NamedTuple):
    """A message."""

    role: str
    is_answer: bool
    """It comes from the model."""
    text: str
    """Part that later prompts have."""
    hidden: str = ""
    """Reasoning: part of the output, not of later prompts."""
    at_s: float | None = None
    """Time when it came, s since 1970 or any origin; None if unknown."""
    num_media: int = 0
    """Parts that are no text."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """Messages of a line."""

    session: str
    """Their session; empty if the line has none."""
    messages: tuple[SessionMessage, ...]
    from_start: bool
    """True if they begin the session; otherwise they continue the line before."""


def transcript_of(line: bytes) -> Transcript:
    """The messages of a line; DroppedError if the line has no messages."""
    fields = decode(_decoder, line)
    found = next((fields[name] for name in _LISTS if isinstance(fields.get(name), list)), None)
    if found is not None:
        if len(found) > NUM_MESSAGES_MAX:
            raise DroppedError(
                "too many messages", f"{len(found):,} messages; at most {NUM_MESSAGES_MAX:,}"
            )
        messages = (*_preamble(fields), *(_message(each, fields) for each in found))
        return Transcript(_session(fields, (*_IDS, "id")), messages, from_start=True)
    single = fields.get("message", fields)
    if not isinstance(single, dict) or not {"role", "content"} <= single.keys():
        raise DroppedError("no messages", damaged=False)
    one = _message({**single, **_time_of(fields, single)}, {})
    return Transcript(_session(fields, _IDS), (one,), from_start=False)


def _preamble(fields: dict[str, Any]) -> Iterator[SessionMessage]:
    """Tools and a system prompt outside the messages; they are first in the prompt."""
    if tools := fields.get("tools"):
        yield SessionMessage("tools", False, _json(tools))
    if system := fields.get("system"):
        yield _message({"role": "system", "content": system}, {})


def _session(fields: dict[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        value = fields.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            side = f"/{fields.get('agentId', '')}"[:ID_CHARS_MAX]
            return f"{value}"[:ID_CHARS_MAX] + (side if fields.get("isSidechain") else "")
    return ""


def _time_of(fields: dict[str, Any], single: dict[str, Any]) -> dict[str, Any]:
    name = next((name for name in _TIMES if name in fields and name not in single), None)
    return {} if name is None else {name: fields[name]}


def _message(raw: object, line: dict[str, Any]) -> SessionMessage:
    if not isinstance(raw, dict):
        raise DroppedError("a message is no object")
    role = raw.get("role", raw.get("from"))
    if not isinstance(role, str) or not 0 < len(role) <= ROLE_CHARS_MAX:
        raise DroppedError("a message has no role")
    parts = _Parts()
    parts.add(raw.get("content", raw.get("value")))
    parts.hide(raw.get("reasoning_content"))
    for call in raw.get("tool_calls") or ():
        parts.text.append(_json(call.get("function", call) if isinstance(call, dict) else call))
    at_s = next((at for name in _TIMES if (at := _seconds(raw.get(name))) is not None), None)
    return SessionMessage(
        role,
        role.lower() in _ANSWERS,
        "".join(parts.text),
        "".join(parts.hidden),
        at_s,
        parts.num_media,
    )


class _Parts:
    """Text of a message's content, which is a text or a list of parts."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.hidden: list[str] = []
        self.num_media = 0

    def hide(self, text: object) -> None:
        """Add reasoning."""
        if isinstance(text, str):
            self.hidden.append(text)

    def add(self, content: object, depth: int = 0) -> None:
        """Add content; DroppedError if it is neither text nor parts, or nested too deep."""
        if isinstance(content, str):
            self.text.append(content)
        elif isinstance(content, list) and depth < _DEPTH_MAX:
            for part in content:
                self._part(part, depth)
        elif content is not None:
            raise DroppedError("content is neither text nor a list of parts")

    def _part(self, part: object, depth: int) -> None:
        if not isinstance(part, dict):
            self.add(part, depth + 1)
            return
        kind = part.get("type")
        if kind in _HIDDEN_PARTS:
            self.hide(part.get("thinking", part.get("text")))
        elif isinstance(part.get("text"), str):
            self.text.append(part["text"])
        elif kind == "tool_use":
            self.text.append(_json([part.get("name"), part.get("input")]))
        elif kind == "tool_result":
            self.add(part.get("content"), depth + 1)
        else:
            self.num_media += 1


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _seconds(value: object) -> float | None:
    """Seconds of an instant: a number of seconds or milliseconds, or a date and time; else None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1000 if abs(value) > 10**11 else value
        return float(seconds) if abs(seconds) <= checks.INSTANT_S_MAX else None
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        instant = datetime.fromisoformat(value)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
