"""Responses to clients: whole answers, streams, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from aiohttp import web

from prfaas.gateway.http.json_codec import to_json
from prfaas.gateway.http.sse import DONE_EVENT, encode_event


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

    def __init__(self, request: web.Request) -> None:
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
        """An answer is there: send the head unless it was sent.

        Raises:
            ClientGoneError: There is nobody to send it to.
        """
        self.has_begun = True
        await self.open(headers)

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the head unless it was sent.

        Raises:
            ClientGoneError: There is nobody to send it to.
        """
        async with self.opening:
            if self._response is not None:
                return
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
