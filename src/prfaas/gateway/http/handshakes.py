"""TLS handshakes of clients, counted until each is done, has failed, or is aborted.

A server that `asyncio` makes with a certificate reports a failed handshake to no protocol: those
that fail could not be counted apart from those under way.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

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
