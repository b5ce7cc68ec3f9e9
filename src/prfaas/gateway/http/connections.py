"""Clients' connections: limits of their number and idle time, TLS and its handshakes.

    waiting (no request yet) ──a head is complete──► busy ──the answer is sent──► kept
                                                      ▲                            │
                                                      └──────── the next head ─────┘

Whoever opens connections and asks for nothing gets none of the descriptors that requests need.

TLS has one certificate, taken up anew when its files change. Handshakes are counted until each is
done, has failed, or is aborted: a server that `asyncio` makes with a certificate reports a failed
one to no protocol.
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
from pathlib import Path
from typing import Any, Protocol

from aiohttp import StreamReader, web

from prfaas.config.deployment import ClientTlsTable
from prfaas.core.invariants import check_invariants
from prfaas.errors import ConfigError
from prfaas.gateway.http.errors import error_body
from prfaas.gateway.http.json_codec import to_json
from prfaas.gateway.http.responses import error_object, json_response
from prfaas.log_throttle import LogThrottle
from prfaas.logs import log_event
from prfaas.wire.plain_http import FIELD_BYTES_MAX, HEAD_BYTES_MAX, TimedHandler

_log = logging.getLogger(__name__)


LOOK_S = 10.0
"""Time between two checks of the files. A changed symbolic link counts as a change."""


def server_context(table: ClientTlsTable) -> ssl.SSLContext:
    """TLS 1.2 and later with the certificate of a gateway; clients show none; ConfigError if a file
    is missing, or the key is not the certificate's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, table)
    return context


def _load(context: ssl.SSLContext, table: ClientTlsTable) -> None:
    try:
        # Without a password OpenSSL would ask for one at the terminal, and wait.
        context.load_cert_chain(table.certificate, table.key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"gateway.tls: certificate {table.certificate} and key {table.key} cannot be used: "
            f"{error}; both are PEM, the certificate with its chain, the key without a password"
        ) from None


class ClientTls:
    """The certificate that a gateway shows its clients; ConfigError if the files cannot be used."""

    def __init__(self, table: ClientTlsTable) -> None:
        self._table = table
        self._seen = self._state()
        self.context = server_context(table)

    @classmethod
    def of(cls, table: ClientTlsTable | None) -> ClientTls | None:
        """TLS by a table; None without a table; ConfigError if the files cannot be used."""
        return cls(table) if table else None

    def renew(self) -> None:
        """Show new connections what the files hold at this moment.

        Raises:
            ConfigError: They cannot be used; the certificate of before is kept.
        """
        self._seen = self._state()
        server_context(self._table)  # whole and consistent, before the one in use is touched
        _load(self.context, self._table)

    def look(self) -> bool:
        """Renew if the files changed; report whether a new certificate is shown."""
        if self._state() == self._seen:
            return False
        try:
            self.renew()
        except ConfigError as error:
            log_event(_log, logging.ERROR, "certificate_kept", why=str(error))
            return False
        log_event(_log, logging.INFO, "certificate_renewed")
        return True

    async def watch(self) -> None:
        """Check the files periodically, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_file_state(path) for path in (self._table.certificate, self._table.key))


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


HANDSHAKE_S = 10.0
"""Longest a client may take."""


class Handshakes:
    """Connections that were accepted and are not through with TLS.

    Args:
        context: Certificate; taken anew for every connection.
        on_done: Called with the transport and what came of the request with the handshake's end.
        on_given_up: Called when one is ended because a newer one needs its place.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        on_done: Callable[[asyncio.Transport, bytes], None],
        on_given_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._context, self._on_done, self._on_given_up = context, on_done, on_given_up
        self._tasks: dict[asyncio.BaseTransport, asyncio.Task[None]] = {}
        self.num_max = 1
        """Most of them at once; one more ends the oldest."""
        self.limit_s = HANDSHAKE_S

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self) -> asyncio.Protocol:
        """Return the protocol of a connection that was accepted."""
        return _Accepted(self._accepted)

    async def stop(self) -> None:
        """End all of them."""
        tasks = list(self._tasks.values())
        for transport in list(self._tasks):
            self._end(transport)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accepted(self, transport: asyncio.Transport) -> None:
        transport.pause_reading()
        if len(self._tasks) >= self.num_max:
            self._end(next(iter(self._tasks)))
            self._on_given_up()
        self._tasks[transport] = asyncio.create_task(self._run(transport))

    def _end(self, transport: asyncio.BaseTransport) -> None:
        self._tasks.pop(transport).cancel()
        # A task that has not begun does nothing when it is cancelled.
        if isinstance(transport, asyncio.Transport):
            transport.abort()

    async def _run(self, transport: asyncio.Transport) -> None:
        loop, early, secured = asyncio.get_running_loop(), _Early(), None
        try:
            secured = await loop.start_tls(
                transport,
                early,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self.limit_s,
            )
        except OSError:
            # The client left, speaks no TLS, trusts us not, or took too long.
            pass
        finally:
            self._tasks.pop(transport, None)
            if secured is None:
                transport.abort()
        if secured is not None and not early.is_over:
            self._on_done(secured, bytes(early.data))
        elif secured is not None:
            secured.abort()


class _Accepted(asyncio.Protocol):
    """A connection before its handshake."""

    def __init__(self, begin: Callable[[asyncio.Transport], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        if isinstance(transport, asyncio.Transport):
            self._begin(transport)


class _Early(asyncio.Protocol):
    """Data that arrives with the end of the handshake, before the connection is served."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_over = False

    def data_received(self, data: bytes) -> None:
        """Keep it: one read at most."""
        self.data += data

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has left."""
        self.is_over = True


BACKLOG = 100
"""Connections that wait to be accepted."""
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


class ClientsCounted(Protocol):
    """Counts of connections of clients."""

    on_closed: Callable[[Closed], None]
    """Called when one is closed for them."""

    @property
    def num_open(self) -> int:
        """Connections that are open."""


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

    def validate(self) -> None:
        """Check what has to hold whenever nothing is being done; AssertionError if it does not."""
        states = (self._waiting.keys(), self._kept.keys(), self._busy)
        num = sum(map(len, states))
        one_each = len(set[ClientConnection]().union(*states)) == num
        over = f"{num} connections, at most {self.limit} are allowed"
        check_invariants([("a connection has two states", one_each), (over, num <= self.limit)])

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
