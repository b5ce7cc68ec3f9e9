"""A path between two pool nodes that keeps and changes what goes over it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .sites import LOOPBACK


@dataclass
class Tap:
    """A path that keeps what goes to the destination, and may change or refuse it."""

    target: int = 0
    change: Callable[[int, bytes], bytes | None] = lambda _, data: data
    """New bytes of connection and bytes; None resets the connection."""
    carried: dict[int, bytearray] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _numbers: Any = field(default_factory=itertools.count)
    _server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def data_connections(self) -> list[bytes]:
        """Content of those without TLS."""
        return [bytes(data) for data in self.carried.values() if data[:4] == b"PFKS"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(LOOPBACK, self.target)
        number = next(self._numbers)
        self.carried[number] = bytearray()
        for ends, kept in (((reader, there[1]), number), ((there[0], writer), None)):
            task = asyncio.create_task(self._pump(*ends, kept))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: int | None
    ) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    if kept is not None:
                        changed = self.change(kept, data)
                        if changed is None:
                            return
                        self.carried[kept] += changed
                        data = changed
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.transport.abort()
