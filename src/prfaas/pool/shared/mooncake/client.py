"""The Mooncake client of a pool node: a process that is started, asked, killed and started again.

Every order is answered or fails. A process that does not answer one in time is killed: its calls
cannot be cancelled, and may write to the shared memory until it is gone.

Bytes go through the memory that both share once: blocks are sealed into it and opened from it, and
the native library sends and receives there. A buffer that the library may still write to is never
reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import time
from bisect import insort
from typing import NamedTuple

import msgspec

from prfaas.errors import ConfigError, TransferError
from prfaas.extras import require
from prfaas.log_throttle import LogThrottle
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.mooncake.orders import (
    LENGTH_BYTES,
    NO_LIBRARY,
    Order,
    StoreAnswer,
    StoreOperation,
    StoreSetup,
    framed,
)
from prfaas.pool.shared.mooncake.settings import MooncakeSettings

log = logging.getLogger(__name__)


class ClientMemory:
    """Two halves, one for what is written and one for what is read."""

    def __init__(self, num_bytes: int) -> None:
        page = mmap.PAGESIZE
        half = num_bytes // 2 // page * page
        self.num_bytes = 2 * half
        self.descriptor = os.memfd_create("prfaas-mooncake")
        os.ftruncate(self.descriptor, self.num_bytes)
        self._map = mmap.mmap(self.descriptor, self.num_bytes)
        self._view = memoryview(self._map)
        self.writes, self.reads = Buffers(0, half), Buffers(half, half)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Part of the memory."""
        return self._view[offset : offset + num_bytes]

    def close(self) -> None:
        """Close the descriptor; the memory goes with its last user."""
        os.close(self.descriptor)


class Buffers:
    """Hands out parts of a range, first fit. Lives on one event loop.

    Args:
        start: Offset of the range.
    """

    def __init__(self, start: int, num_bytes: int) -> None:
        self.capacity_bytes = num_bytes
        self._free = [(start, num_bytes)]
        """Offset and size of free parts, in order, none beside another."""
        self._waiters: list[asyncio.Future[None]] = []

    def take(self, num_bytes: int) -> int | None:
        """Offset of a buffer; None if there is no room at present."""
        size = _rounded(num_bytes)
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                rest = [(offset + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                return offset
        return None

    async def taken(self, num_bytes: int) -> int:
        """Offset of a buffer, once there is room.

        Args:
            num_bytes: At most the capacity.
        """
        while (offset := self.take(num_bytes)) is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Free a buffer."""
        insort(self._free, (offset, _rounded(num_bytes)))
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((start, size))
        self._free = joined
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


MODULE = "prfaas.pool.shared.mooncake.client_process"
TICK_S = 0.25
CHECK_S = 30.0


class _Pending(NamedTuple):
    future: asyncio.Future[list[int]]
    since_s: float


class MooncakeClient:
    """The process, as long as `run` runs.

    Attributes:
        memory: Shared with the process.
        prefix: Of all keys.
    """

    def __init__(self, settings: MooncakeSettings, metrics: PoolMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self.memory, self.prefix = ClientMemory(settings.buffer_bytes), settings.prefix
        self._limits = settings.limits
        self._writer: asyncio.StreamWriter | None = None
        self._pending: dict[int, _Pending] = {}
        self._number = 0
        self._said = LogThrottle(time.monotonic_ns)
        self.is_starting = True
        """True until the first process is connected, or cannot be."""
        self.process_id: int | None = None
        """Of the process that runs at present."""

    @property
    def is_ready(self) -> bool:
        """Return True while the process is connected to the master."""
        return self._writer is not None

    def ask(
        self, operation: StoreOperation, names: list[str], offset: int = 0, num_bytes: int = 0
    ) -> asyncio.Future[list[int]]:
        """Send an order; TransferError if there is no process that could take it.

        Returns:
            The codes of the library. Ends in any case, at the latest when the process is killed;
            until then the process may use the buffer.
        """
        if self._writer is None:
            raise TransferError("its client is not connected")
        self._number += 1
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_seen)
        self._pending[self._number] = _Pending(future, time.monotonic())
        self._writer.write(framed(Order(self._number, operation, names, offset, num_bytes)))
        return future

    async def run(self) -> None:
        """Keep a process running until cancelled."""
        pause_s = self._limits.restart_s
        while True:
            began_s = time.monotonic()
            why = await self._run_once()
            if self._said.is_new("ended"):
                log.error("shared tier: the Mooncake client %s, and is started again", why)
            pause_s = min(2 * pause_s, self._limits.restart_max_s)
            if time.monotonic() - began_s > self._limits.start_s:
                pause_s = self._limits.restart_s
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> str:
        """Run one process to its end; return the reason."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULE,
                str(theirs.fileno()),
                str(self.memory.descriptor),
                msgspec.json.encode(self._setup()).decode(),
                pass_fds=(theirs.fileno(), self.memory.descriptor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._metrics.shared_client_starts.inc()
        self.process_id = process.pid
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(self._limits.start_s):
                ready = await _answer(reader)
            if ready.codes == [NO_LIBRARY]:
                return "cannot load the library (on Debian: apt-get install libibverbs1)"
            if ready.codes != [0]:
                return f"cannot reach the master: code {ready.codes}"
            self._writer, self.is_starting = writer, False
            return await self._take_answers(reader)
        except TimeoutError:
            return f"was not connected after {self._limits.start_s:g} s"
        except (EOFError, OSError, msgspec.DecodeError) as error:
            return f"has ended ({type(error).__name__})"
        finally:
            self._writer, self.is_starting = None, False
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
            self._fail_all()

    async def _take_answers(self, reader: asyncio.StreamReader) -> str:
        """Complete orders until one hangs; return the reason."""
        coming = asyncio.ensure_future(_answer(reader))
        try:
            while True:
                done, _ = await asyncio.wait([coming], timeout=TICK_S)
                if done:
                    answer = coming.result()
                    pending = self._pending.pop(answer.number, None)
                    if pending is not None and not pending.future.done():
                        pending.future.set_result(answer.codes)
                    coming = asyncio.ensure_future(_answer(reader))
                oldest = next(iter(self._pending.values()), None)
                if oldest is not None and time.monotonic() - oldest.since_s > self._limits.stuck_s:
                    return f"does not answer for {self._limits.stuck_s:g} s"
        finally:
            coming.cancel()

    def _fail_all(self) -> None:
        pending, self._pending = self._pending, {}
        for each in pending.values():
            if not each.future.done():
                each.future.set_exception(TransferError("its client has ended"))

    def _setup(self) -> StoreSetup:
        settings = self._settings
        host, port = settings.master
        return StoreSetup(
            _own_address(host, port),
            settings.metadata,
            settings.protocol,
            settings.devices,
            f"{host}:{port}",
            settings.replicas,
            self.memory.num_bytes,
        )


def check_package() -> None:
    """Check that the package is installed; ConfigError if it is not."""
    require("the shared tier in a Mooncake Store", "mooncake")


def check_library() -> None:
    """Check that the native library can be loaded, in a process of its own.

    Raises:
        ConfigError: It cannot; with the command that installs what is missing.
    """
    check_package()
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"],
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(
            f"the library of Mooncake cannot be loaded: {lines[-1][:200]}; on Debian it needs: "
            "apt-get install libibverbs1"
        )


async def _answer(reader: asyncio.StreamReader) -> StoreAnswer:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(await reader.readexactly(length), type=StoreAnswer)


def _own_address(host: str, port: int) -> str:
    """Address of this host on the way to another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _seen(future: asyncio.Future[list[int]]) -> None:
    """Mark the exception of an order that nobody waits for any more as seen."""
    if not future.cancelled():
        future.exception()
