"""Sockets that do not block: connecting them, shaking hands, waiting for them."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from prfaas.wire.sockets import prepare

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
ADDRESS_S = 1.0
"""Time limit of an address of a host that has others."""


async def connect(address: tuple[str, int]) -> socket.socket:
    """A prepared TCP connection: options that count during the handshake are set before it; OSError
    if no connection was accepted."""
    loop = asyncio.get_running_loop()
    error = OSError(f"{address[0]} has no address")
    places = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, place) in enumerate(places, 1):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            control = prepare(connection)
            async with asyncio.timeout(None if number == len(places) else ADDRESS_S):
                await loop.sock_connect(connection, place)
        except OSError as failure:
            connection.close()
            error = failure
            continue
        except BaseException:
            connection.close()
            raise
        log.debug("data connection to %s: congestion control %s", address, control)
        return connection
    raise error


async def shake_hands(connection: ssl.SSLSocket) -> None:
    """The TLS handshake of a socket that does not block.

    Raises:
        OSError: It failed, or took longer than HANDSHAKE_TIMEOUT_S.
    """
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        while True:
            try:
                connection.do_handshake()
                return
            except ssl.SSLWantReadError:
                await readable(connection)
            except ssl.SSLWantWriteError:
                await writable(connection)


async def readable(connection: socket.socket) -> None:
    """Wait until there is something to read."""
    loop = asyncio.get_running_loop()
    await _ready(connection.fileno(), loop.add_reader, loop.remove_reader)


async def writable(connection: socket.socket) -> None:
    """Wait until the socket is writable."""
    loop = asyncio.get_running_loop()
    await _ready(connection.fileno(), loop.add_writer, loop.remove_writer)


async def _ready(number: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    ready = asyncio.Event()
    add(number, ready.set)
    try:
        await ready.wait()
    finally:
        remove(number)
