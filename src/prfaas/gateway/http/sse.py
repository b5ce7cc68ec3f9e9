"""Server-sent events, the part that OpenAI's streams use: data fields and blank lines."""

from __future__ import annotations

from collections import deque

from aiohttp import StreamReader

from prfaas.gateway.http.answer_limits import ANSWER_BYTES_MAX, AnswerTooLongError
from prfaas.gateway.http.json_codec import to_json

DONE = b"[DONE]"


def encode_event(value: object) -> bytes:
    """One event."""
    return b"data: " + to_json(value) + b"\n\n"


DONE_EVENT = b"data: " + DONE + b"\n\n"
_BLANK = (b"", b"\r")


class EventDecoder:
    """Turns a byte stream into the data of its events, however the stream is cut."""

    def __init__(self, event_bytes_max: int = ANSWER_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._line_parts: list[bytes] = []
        self._data: list[bytes] = []
        self._num_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Take the next bytes.

        Returns:
            Data of the events that these bytes complete, in order.

        Raises:
            AnswerTooLongError: An event is longer than the limit.
        """
        *lines, rest = received.split(b"\n")
        if lines and self._line_parts:
            lines[0] = b"".join((*self._line_parts, lines[0]))
            self._line_parts = []
        events = [event for line in lines if (event := self._line(line)) is not None]
        if lines:
            self._num_bytes = sum(map(len, self._data))
        if rest:
            self._line_parts.append(rest)
            self._num_bytes += len(rest)
        if self._num_bytes > self._event_bytes_max:
            raise AnswerTooLongError("an event of the engine's stream", self._event_bytes_max)
        return events

    def _line(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" ").removesuffix(b"\r"))
        elif line in _BLANK and self._data:
            event, self._data = b"\n".join(self._data), []
            return event
        return None


class EventReader:
    """Reads events from an HTTP body, one at a time."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._decoder = EventDecoder()
        self._ready: deque[bytes] = deque()

    @property
    def is_ready(self) -> bool:
        """Return True if the next event has arrived."""
        return bool(self._ready)

    async def next(self) -> bytes | None:
        """Data of the next event; None at the end of the body.

        Raises:
            aiohttp.ClientError: The connection broke.
            AnswerTooLongError: An event is longer than the limit.
        """
        while not self._ready:
            received = await self._content.readany()
            if not received:
                return None
            self._ready.extend(self._decoder.feed(received))
        return self._ready.popleft()
