"""Answers: those of engines within limits, and to clients whole, as streams or as OpenAI's errors.

Of server-sent events there is the part that OpenAI's streams use: data fields and blank lines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp import StreamReader, web

from prfaas.errors import EngineError
from prfaas.gateway.http.json_codec import to_json

ANSWER_BYTES_MAX = 32 << 20
"""Limit of a whole answer, an event of a stream, a page such as `/metrics`, and the part of a
stream kept for its continuation.

An answer of 20,000 tokens with 20 log probabilities each fits, vLLM's metrics a hundred times.
"""


class AnswerTooLongError(EngineError):
    """An engine's answer exceeds the limit."""

    def __init__(self, what: str, bytes_max: int) -> None:
        super().__init__(
            f"{what} has more than {bytes_max:,} bytes, the most that the gateway takes"
        )


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """All of an engine's answer.

    Raises:
        aiohttp.ClientError: The connection broke.
        AnswerTooLongError: It is longer than the limit; the rest of it was not read.
    """
    answer = bytearray()
    async for part in response.content.iter_any():
        answer += part
        if len(answer) > ANSWER_BYTES_MAX:
            raise AnswerTooLongError(
                f"the engine's answer to {response.url.path}", ANSWER_BYTES_MAX
            )
    return bytes(answer)


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
        """Take the next bytes; AnswerTooLongError if an event is longer than the limit.

        Returns:
            Data of the events that these bytes complete, in order.
        """
        if not self._line_parts and not self._data and b"\r" not in received:
            events = [part[6:] for part in received.split(b"\n\n") if part.startswith(b"data: ")]
            if received.endswith(b"\n\n") and received.count(b"\n") == 2 * len(events):
                return events  # Each of one line, as nearly always.
        # To look for one byte takes a hundredth of the time that a split takes.
        *lines, rest = received.split(b"\n") if b"\n" in received else [received]
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
            start = 6 if line.startswith(b"data: ") else 5
            self._data.append(line[start : -1 if line.endswith(b"\r") else None])
        elif line in _BLANK and self._data:
            event, self._data = b"\n".join(self._data), []
            return event
        return None


class EventReader:
    """Reads events from an HTTP body, one at a time."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._decoder = EventDecoder()
        self.ready: list[bytes] = []
        """Events that have arrived, the next one last. A queue of its own would take 760 bytes of
        each open stream."""

    async def next(self) -> bytes | None:
        """Data of the next event; None at the end of the body.

        Raises:
            aiohttp.ClientError: The connection broke.
            AnswerTooLongError: An event is longer than the limit.
        """
        while not self.ready:
            received = await self._content.readany()
            if not received:
                return None
            self.ready = self._decoder.feed(received)[::-1]
        return self.ready.pop()


class ClientGoneError(Exception):
    """The client closed the connection while it was written to."""


STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def error_object(message: str, error_type: str, param: str | None, code: int) -> dict[str, object]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=to_json(value), status=status, headers=headers, content_type="application/json"
    )


COMMENT = b": waiting for the first token\n\n"
"""Keeps the connection of a client that waits in use; readers of events skip it."""


class ClientStream:
    """A stream to the client. Until its head is sent, an error can be an ordinary HTTP error."""

    def __init__(self, request: web.Request | None = None) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._unsent: list[bytes] = []
        self.opening = asyncio.Lock()
        """Held while the head or a comment is written."""
        self.has_begun = False
        """True once there is something of an answer to send."""

    @property
    def is_open(self) -> bool:
        """Return True if the head has been sent."""
        return self._response is not None

    async def begin(self, headers: Mapping[str, str]) -> None:
        """An answer is there: send the head unless it was sent; ClientGoneError if there is nobody
        to send it to."""
        self.has_begun = True
        await self.open(headers)

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the head unless it was sent; ClientGoneError if there is nobody to send it to."""
        async with self.opening:
            if self._response is not None:
                return
            assert self._request is not None  # noqa: S101 (else another process opens it)
            self._response = web.StreamResponse(headers={**STREAM_HEADERS, **headers})
            try:
                await self._response.prepare(self._request)
            except ConnectionResetError:
                raise ClientGoneError from None

    async def comment(self) -> None:
        """Send a comment while there is no answer."""
        async with self.opening:
            if self.has_begun:
                return
            try:
                await self._started.write(COMMENT)
            except ConnectionResetError:
                raise ClientGoneError from None

    def put(self, value: object) -> None:
        """Have one event sent with the next ones, or when `flush` is called."""
        self._unsent.append(encode_event(value))

    async def send(self, value: object) -> None:
        """Send one event."""
        self.put(value)
        await self.flush()

    async def flush(self) -> None:
        """Send what was put. Each call is a system call, which costs more than the event."""
        if self._unsent:
            try:
                await self._started.write(self._take())
            except ConnectionResetError:
                raise ClientGoneError from None

    async def finish(self) -> web.StreamResponse:
        """Send the end mark."""
        try:
            await self._started.write_eof(self._take() + DONE_EVENT)
        except ConnectionResetError:
            raise ClientGoneError from None
        return self._started

    async def fail(self, error: object) -> web.StreamResponse:
        """End with an error event."""
        self.put(error)
        return await self.finish()

    def _take(self) -> bytes:
        unsent, self._unsent = b"".join(self._unsent), []
        return unsent

    @property
    def _started(self) -> web.StreamResponse:
        if self._response is None:
            raise RuntimeError("the stream has not begun")
        return self._response


class WaitingStream:
    """Sends the head of a stream, and comments, as long as its first token is not there.

    Args:
        headers: Returns the headers of the answer.
        head_s: Wait before the head, seconds: what fails by then has an HTTP status.
        comment_s: Time between two comments, seconds.
    """

    def __init__(
        self,
        stream: ClientStream,
        headers: Callable[[], Mapping[str, str]],
        head_s: float,
        comment_s: float,
    ) -> None:
        self._stream, self._headers, self._comment_s = stream, headers, comment_s
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(head_s, self._begin)

    async def close(self) -> None:
        """Stop, once what is being written is written."""
        self._timer.cancel()
        if self._task is not None:
            async with self._stream.opening:
                self._task.cancel()

    def _begin(self) -> None:
        if not self._stream.has_begun:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with contextlib.suppress(ClientGoneError):
            await self._stream.open(self._headers())
            while not self._stream.has_begun:
                await asyncio.sleep(self._comment_s)
                await self._stream.comment()
