"""Responses to clients: whole answers, streams, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

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


class ClientStream:
    """A stream to the client that starts with its first event.

    Until then an error can still be an ordinary HTTP error.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._unsent: list[bytes] = []

    @property
    def has_begun(self) -> bool:
        """Return True if the status line has been sent."""
        return self._response is not None

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the head.

        Raises:
            ClientGoneError: There is nobody to send it to.
        """
        self._response = web.StreamResponse(headers={**STREAM_HEADERS, **headers})
        try:
            await self._response.prepare(self._request)
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
