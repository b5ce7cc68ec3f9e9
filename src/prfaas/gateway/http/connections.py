"""Clients' connections: limits of their number and idle time.

    waiting (no request yet) ──a head is complete──► busy ──the answer is sent──► kept
                                                      ▲                            │
                                                      └──────── the next head ─────┘

Whoever opens connections and asks for nothing gets none of the descriptors that requests need.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import ssl
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from typing import Any

from aiohttp import StreamReader, web

from prfaas.gateway.http.errors import error_body
from prfaas.gateway.http.handshakes import Handshakes
from prfaas.gateway.http.json_codec import to_json
from prfaas.gateway.http.responses import error_object, json_response
from prfaas.log_throttle import LogThrottle
from prfaas.logs import log_event
from prfaas.wire.plain_http import FIELD_BYTES_MAX, HEAD_BYTES_MAX, TimedHandler

HEAD_S = 30.0
"""Time limit of the head of the first request."""
HANDSHAKES_SHARE = 0.25
"""Share of all connections that may be in their TLS handshake."""
KEEPALIVE_S = 75.0
"""Time limit of the head of each further request; above the 60 s of common load balancers."""
DESCRIPTORS_EACH = 3
"""A request in flight takes one of its client's, and one of each leg's."""
PLACES_EACH = 4
"""Connections for each request that may be in flight."""
_TOO_LONG = re.compile(r"Got more than \d+ bytes")
_QUOTED = re.compile(r"\bb['\"]")
_log = logging.getLogger(__name__)
_FULL = to_json(
    error_object(
        "the gateway has as many connections as it takes, and all are in use; try again in 1 s",
        "ServiceUnavailableError",
        None,
        503,
    )
)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)


class Closed(StrEnum):
    """Reason for closing a connection."""

    NO_REQUEST = "no_request"
    """It brought no request in time."""
    FULL = "full"
    """It was not in use, and another one needed its place."""
    REFUSED = "refused"
    """All others were in use."""


def connections_max(requests_max: int) -> int:
    """Connections that leave descriptors for what their requests need."""
    most = PLACES_EACH * requests_max
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // DESCRIPTORS_EACH))


class ClientConnections:
    """All connections of clients; makes those that come in.

    Args:
        limit: Most of them at once, handshakes included.
        tls: Certificate for clients; None serves plain HTTP.
    """

    def __init__(self, server: web.Server, limit: int, tls: ssl.SSLContext | None = None) -> None:
        self._server, self.limit = server, limit
        self.head_s = HEAD_S
        self._waiting: dict[ClientConnection, None] = {}
        self._kept: dict[ClientConnection, None] = {}
        self._busy: set[ClientConnection] = set()
        self.handshakes = None if tls is None else Handshakes(tls, self._arrived, self._give_up)
        self.on_closed: Callable[[Closed], None] = lambda _: None
        self._said = LogThrottle()
        handle = server.request_handler

        def begin(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
            if isinstance(request.protocol, ClientConnection):
                request.protocol.begin(request)
            return handle(request)

        server.request_handler = begin

    @property
    def num_open(self) -> int:
        """Connections that are open, those in their TLS handshake included."""
        num_handshakes = 0 if self.handshakes is None else len(self.handshakes)
        return len(self._waiting) + len(self._kept) + len(self._busy) + num_handshakes

    @property
    def num_busy(self) -> int:
        """Connections with a request under way."""
        return len(self._busy)

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a connection that was accepted."""
        if self.handshakes is None:
            return self._next()
        self.handshakes.num_max = max(1, int(self.limit * HANDSHAKES_SHARE))
        return self.handshakes.begin()

    def came(self, connection: ClientConnection) -> None:
        """It is open."""
        self._waiting[connection] = None

    def begins(self, connection: ClientConnection) -> None:
        """It has brought a request."""
        self.gone(connection)
        self._busy.add(connection)

    def rests(self, connection: ClientConnection) -> None:
        """Its request is answered."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._kept[connection] = None

    def is_busy(self, connection: ClientConnection) -> bool:
        """Return True if it has a request under way."""
        return connection in self._busy

    def gone(self, connection: ClientConnection) -> None:
        """It is closed."""
        self._waiting.pop(connection, None)
        self._kept.pop(connection, None)
        self._busy.discard(connection)

    def close(self, connection: ClientConnection, why: Closed) -> None:
        """Close one without a request."""
        self.on_closed(why)
        self.gone(connection)
        connection.force_close()

    async def stop(self) -> None:
        """End handshakes."""
        if self.handshakes is not None:
            await self.handshakes.stop()

    def _next(self) -> asyncio.Protocol:
        """Accept a connection, in place of the one that has been idle longest if all are in use."""
        num_places = self.limit - (0 if self.handshakes is None else self.handshakes.num_max)
        if len(self._waiting) + len(self._kept) + len(self._busy) >= max(1, num_places):
            self._say_full()
            idle = next(iter(self._waiting or self._kept), None)
            if idle is None:
                self.on_closed(Closed.REFUSED)
                return _Refused()
            self.close(idle, Closed.FULL)
        return ClientConnection(self._server, self)

    def _arrived(self, transport: asyncio.Transport, early: bytes) -> None:
        """A handshake is done."""
        protocol = self._next()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if early:
            protocol.data_received(early)

    def _give_up(self) -> None:
        """A handshake was closed for a newer one."""
        self._say_full()
        self.on_closed(Closed.FULL)

    def _say_full(self) -> None:
        if self._said.is_new("connections_full"):
            fields = {"limit": self.limit, "busy": self.num_busy}
            log_event(_log, logging.WARNING, "connections_full", **fields)


class ClientConnection(TimedHandler):
    """One connection of a client."""

    __slots__ = ("_body", "_connections", "_num_unread")

    def __init__(self, server: web.Server, connections: ClientConnections) -> None:
        super().__init__(server, keepalive_s=KEEPALIVE_S)
        self._connections = connections
        self._body: StreamReader | None = None
        """Of the last request, until all of it has come."""
        self._num_unread = 0
        """Bytes that came since then."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Its first head has to come within `ClientConnections.head_s`."""
        super().connection_made(transport)
        self._connections.came(self)
        give_up = partial(self._connections.close, self, Closed.NO_REQUEST)
        self.limit(self._connections.head_s, give_up)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is closed, by whomever."""
        self._connections.gone(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came; a head without an end ends the connection."""
        if self._body is not None and self._body.is_eof():
            self._body = None
        if self._body is None:
            self._num_unread += len(data)
            if self._num_unread > HEAD_BYTES_MAX and not self._connections.is_busy(self):
                self._connections.close(self, Closed.NO_REQUEST)
                return
        super().data_received(data)

    def begin(self, request: web.BaseRequest) -> None:
        """A request begins."""
        self._body, self._num_unread = request.content, 0
        self.lift()
        self._connections.begins(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; errors from before all handlers, such as an unknown Expect, included."""
        if isinstance(resp, web.HTTPException):
            resp = json_response(error_body(resp), resp.status)
        sent = await super().finish_response(request, resp, start_time)
        self._connections.rests(self)
        return sent

    def error_answer(self, status: int, message: str) -> web.Response:
        """OpenAI's error for what is no HTTP request, or what failed before all handlers."""
        if _TOO_LONG.match(message):
            said = f"the request's line or one of its headers has more than {FIELD_BYTES_MAX} bytes"
            return json_response(error_object(said, "BadRequestError", None, 431), 431)
        if status < 500:
            # aiohttp quotes what it could not read, as Python writes bytes.
            why = _QUOTED.split(message.split("\n", maxsplit=1)[0])[0].strip(" :")
            said = f"this is no HTTP request that can be read: {why[:200]}"
            return json_response(error_object(said, "BadRequestError", None, status), status)
        said = "the gateway failed; see its log"
        return json_response(error_object(said, "InternalServerError", None, status), status)

    def log_exception(self, *args: Any, **more: Any) -> None:
        """A body with an invalid Content-Encoding is answered, and not logged."""
        if not isinstance(more.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **more)


class _Refused(asyncio.Protocol):
    """A connection that there is no place for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer and close it."""
        if isinstance(transport, asyncio.Transport):
            transport.write(_REFUSAL)
            transport.close()
