"""HTTP servers that show no more of themselves than their name: no versions, no traces of Python.

aiohttp names itself, Python and their versions in every answer, and quotes its parser's exceptions
in answers to what is no HTTP. It also inflates compressed bodies as they come, whoever sends them
and whether or not they are read; here they stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from aiohttp.connector import Connection

from prfaas.wire.sockets import keep_path_open

SERVER = "prfaas"
FIELD_BYTES_MAX = 96 << 10
"""Limit of the request line and of each header; vLLM's server takes 64 KiB and more."""
HEAD_BYTES_MAX = 1 << 20
"""Limits of a connection before its request is read."""
_log = logging.getLogger(__name__)


async def name_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler for `web.Application.on_response_prepare`."""
    response.headers[hdrs.SERVER] = SERVER


class EngineResponse(aiohttp.ClientResponse):
    """Answer of an engine, whose connection is not used again after an error of the engine's own.

    uvicorn closes it right behind such an answer, and the next request on it would be reset.
    """

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the head of the answer."""
        protocol = connection.protocol
        await super().start(connection)
        self._raw_headers = ()
        if self.status >= 500 and protocol is not None:
            if self.connection is None:  # All of it has come, and the connection was given back.
                protocol.close()
            else:
                protocol.force_close()
        return self


class PlainHandler(web.RequestHandler):
    """One connection. It answers errors that occur before an application's handlers."""

    __slots__ = ()

    def __init__(self, server: web.Server, *, keepalive_s: float = 3630.0) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=keepalive_s,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            max_line_size=FIELD_BYTES_MAX,
            max_field_size=FIELD_BYTES_MAX,
        )

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer."""
        if not resp.prepared:
            resp.headers[hdrs.SERVER] = SERVER
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to an invalid or failed request; the connection ends with it;
        ConnectionError if an answer has begun."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; no other can be sent")
        if status >= 500:
            _log.error("request_failed", exc_info=exc)
        answer = self.error_answer(status, message or "")
        answer.force_close()
        return answer

    def error_answer(self, status: int, message: str) -> web.Response:
        """The body of `handle_error`'s answer.

        Args:
            status: 400 and above.
            message: What aiohttp has to report; it quotes the client and names Python.
        """
        said = "the request failed; see the log" if status >= 500 else "this is no HTTP request"
        return web.Response(status=status, text=f"{said}\n")


class TimedHandler(PlainHandler):
    """One connection with a time limit, of what it waits for at present."""

    __slots__ = ("_time_limit",)

    def __init__(self, server: web.Server, *, keepalive_s: float = 3630.0) -> None:
        super().__init__(server, keepalive_s=keepalive_s)
        self._time_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open; an answer may be long in coming."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            keep_path_open(connection)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is closed, by whomever."""
        self.lift()
        super().connection_lost(exc)

    def limit(self, seconds: float, end: Callable[[], None]) -> None:
        """Call `end` after a time, in place of the limit of before."""
        self.lift()
        self._time_limit = asyncio.get_running_loop().call_later(seconds, end)

    def lift(self) -> None:
        """Have no limit."""
        if self._time_limit is not None:
            self._time_limit.cancel()
            self._time_limit = None


async def listen(
    runner: web.AppRunner,
    host: str,
    port: int,
    connection: Callable[[web.Server], PlainHandler] = PlainHandler,
    **tls: Any,
) -> asyncio.Server:
    """Serve an application whose runner is set up; close the answer before the runner; OSError if
    the address cannot be listened on.

    Args:
        connection: Makes each connection.
        tls: As of `asyncio.loop.create_server`.
    """
    server, loop = runner.server, asyncio.get_running_loop()
    if server is None:
        raise RuntimeError("the runner is not set up")
    return await loop.create_server(partial(connection, server), host, port, **tls)
