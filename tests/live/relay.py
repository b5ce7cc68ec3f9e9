"""A TCP relay that a test can cut or hold: the wire between two pool nodes."""

from __future__ import annotations

import asyncio
import contextlib

CHUNK = 1 << 14


class Relay:
    """Forwards connections to a target, for as long as it is told to.

    Attributes:
        forwarded: Bytes passed on so far, towards the target.
        bytes_per_s: What all connections together pass on towards the target; 0 is no limit.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._cut_at: int | None = None
        self.was_cut = asyncio.Event()
        self.forwarded = 0
        self.bytes_per_s = 0
        self._due_at = 0.0

    async def start(self) -> int:
        """Listen on a free loopback port, and say which."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut_after(self, num_bytes: int) -> None:
        """Reset every connection once that many more bytes were passed on."""
        self.was_cut.clear()
        self._cut_at = self.forwarded + num_bytes

    def hold(self) -> None:
        """Pass nothing on, and accept nothing: a blackhole."""
        self._open.clear()

    def release(self) -> None:
        """Go on."""
        self._open.set()

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            back_reader, back_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back_writer}
        forth = self._pump(reader, back_writer, counted=True)
        back = self._pump(back_reader, writer, counted=False)
        await asyncio.gather(forth, back, return_exceptions=True)
        self._writers -= {writer, back_writer}
        self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._open.wait()
                if counted and self.bytes_per_s:
                    await self._pace(len(data))
                writer.write(data)
                await writer.drain()
                if counted:
                    self._count(len(data))
        writer.close()

    async def _pace(self, num_bytes: int) -> None:
        """Wait as long as a slow wire would take."""
        now = asyncio.get_running_loop().time()
        self._due_at = max(self._due_at, now) + num_bytes / self.bytes_per_s
        await asyncio.sleep(self._due_at - now)

    def _count(self, num_bytes: int) -> None:
        self.forwarded += num_bytes
        if self._cut_at is not None and self.forwarded >= self._cut_at:
            self._cut_at = None
            self._cut()
            self.was_cut.set()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
