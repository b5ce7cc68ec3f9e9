"""A TCP relay that does to connections what networks do: the fault proxy. Needs no privilege."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prfaas.tasks import cancel_all

CHUNK_BYTES = 1 << 16
PIECE_BYTES = 1 << 12
"""Most that is taken of a connection at once while all of them share a low rate."""
PIECES_PER_S = 1000
"""Pieces of a higher rate in a second: each costs the proxy some CPU time."""
_LINGER_RESET = struct.pack("ii", 1, 0)


class Fault(StrEnum):
    """Fault of a connection."""

    CUT = "cut"
    """Both ends get an orderly end of the stream."""
    RESET = "reset"
    """Both ends get a reset."""
    HALF_OPEN = "half_open"
    """All data is dropped without notice."""
    CORRUPT = "corrupt"
    """A bit of the next bytes towards the target is flipped."""


@dataclass(eq=False, slots=True)
class _Relayed:
    """One connection through the proxy."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while bytes may pass."""
    corrupts: bool = False


class FaultProxy:
    """Relays connections to a target, and breaks them on demand.

    Args:
        target: Host and port that connections are relayed to; may be changed.
        buffer_bytes: Bytes of a connection that it may hold, twice; 0 is the system's choice. A
            sender takes what lies there for delivered, which hides a slow link of small transfers.

    Attributes:
        is_plugged: True if new connections are taken; they are reset otherwise.
        read_bits_per_s: Rate at which bytes towards the target are taken, each connection for
            itself; 0 is unlimited. A small one is a slow reader.
        link_bits_per_s: The same for all connections together, as of a slow link.
        delay_s: From one end to the other, in each direction; to be set before connections are
            made. Bytes on their way are in memory, as many as `link_bits_per_s` lets through.
        num_bytes: Carried towards the target so far.
    """

    def __init__(self, target: tuple[str, int], *, buffer_bytes: int = 0) -> None:
        self.target = target
        self._buffer_bytes = buffer_bytes
        self.is_plugged = True
        self.read_bits_per_s = self.link_bits_per_s = 0
        self.delay_s = 0.0
        self._free_at_s = 0.0
        """Instant at which the link has carried what was taken so far."""
        self.num_bytes = 0
        self._connections: list[_Relayed] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """Its address on loopback."""
        if self._server is None:
            raise RuntimeError("the proxy is not open")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Connections being relayed, half-open ones included."""
        return len(self._connections)

    async def open(self) -> None:
        """Start to listen on a free port of loopback."""
        listener = socket.create_server(("127.0.0.1", 0))
        if self._buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
        limit = self._buffer_bytes or CHUNK_BYTES
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=limit)

    async def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        self.strike(Fault.RESET)
        await cancel_all(self._tasks)

    def strike(self, fault: Fault, index: int | None = None) -> None:
        """Break one connection, by its age, or all of them.

        Args:
            index: Of the connection, the oldest is 0; None is all.
        """
        struck = self._connections if index is None else self._connections[index : index + 1]
        for connection in list(struck):
            self._strike(connection, fault)

    def _strike(self, connection: _Relayed, fault: Fault) -> None:
        match fault:
            case Fault.HALF_OPEN:
                connection.held.clear()
            case Fault.CORRUPT:
                connection.corrupts = True
            case Fault.CUT | Fault.RESET:
                for writer in (connection.near, connection.far):
                    _drop(writer, is_reset=fault is Fault.RESET)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_plugged:
            _drop(writer, is_reset=True)
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            _drop(writer, is_reset=True)
            return
        connection = _Relayed(writer, far_writer)
        connection.held.set()
        self._connections.append(connection)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, connection, is_forth=True)),
            asyncio.create_task(self._pump(far_reader, writer, connection, is_forth=False)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps)
        finally:
            self._connections.remove(connection)
            self._tasks.difference_update(pumps)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: _Relayed,
        *,
        is_forth: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await reader.read(self._piece_bytes):
                await connection.held.wait()
                if is_forth:
                    data = await self._towards_target(connection, data)
                if self.delay_s:
                    loop.call_later(self.delay_s, writer.write, data)
                else:
                    writer.write(data)
                await writer.drain()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        _drop(writer, is_reset=False)

    @property
    def _piece_bytes(self) -> int:
        """Most that is read at once."""
        if not self.link_bits_per_s:
            return CHUNK_BYTES
        return max(PIECE_BYTES, min(CHUNK_BYTES, self.link_bits_per_s // 8 // PIECES_PER_S))

    async def _towards_target(self, connection: _Relayed, data: bytes) -> bytes:
        self.num_bytes += len(data)
        if self.read_bits_per_s:
            await asyncio.sleep(len(data) * 8 / self.read_bits_per_s)
        if self.link_bits_per_s:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s) + len(data) * 8 / self.link_bits_per_s
            await asyncio.sleep(self._free_at_s - now_s)
        if not connection.corrupts:
            return data
        connection.corrupts = False
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _drop(writer: asyncio.StreamWriter, *, is_reset: bool) -> None:
    """Close now, with a reset if asked for."""
    connection = writer.get_extra_info("socket")
    if is_reset and connection is not None and not writer.is_closing():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
    writer.transport.abort()
