"""Two network namespaces joined by an emulated WAN, to be changed while processes talk over it.

    async with Wan(rtt_ms=40, rate_bits_per_s=10**9, loss=0.001, queue_ms=20) as wan:
        server = await wan.run("b", ["iperf3", "-s", "-1"])
        client = await wan.run("a", ["iperf3", "-c", wan.address("b")])
        await wan.change(rate_bits_per_s=10**8)

Loss applies to what side a sends; the way back, which carries acknowledgements, loses nothing
by default. Needs root, `ip` and /dev/net/tun: `why_not` returns what is missing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from prfaas.errors import ConfigError
from tests.lab.path import PathCounters

ROOT = Path(__file__).parents[2]
Side = Literal["a", "b"]
SIDES: tuple[Side, Side] = ("a", "b")
READY_TIMEOUT_S = 20.0
END_TIMEOUT_S = 5.0
DEVICE_QUEUE_PACKETS = 5000
"""Packets the kernel holds for the emulator: a late emulator is no lossy one."""
_numbers = itertools.count()


def why_not() -> str:
    """Return the missing requirement of the lab; empty if there is none."""
    if os.geteuid() != 0:
        return "the WAN lab needs root to make network namespaces"
    if not Path("/dev/net/tun").exists():
        return "the WAN lab needs /dev/net/tun"
    if shutil.which("ip") is None:
        return "the WAN lab needs the command `ip` (package iproute2)"
    return ""


@dataclass(frozen=True, slots=True)
class WanCounters:
    """Counters of the link, by direction."""

    there: PathCounters
    """Counters from side a to side b."""
    back: PathCounters


class Wan:
    """An emulated link; an async context manager.

    Args:
        rtt_ms: Round-trip time, milliseconds, half of it in each direction.
        rate_bits_per_s: Of each direction, Ethernet included; 0 is unlimited.
        loss: Share of segments from a to b that are lost at random.
        queue_ms: Length of the bottleneck's queue, as time at the present rate.
        jitter_ms: Largest addition to the delay of each direction, which drifts below it.
        reorder: Share of segments from a to b that come 3 ms later, after those behind them.
        idle_s: TCP connections that are silent for so long are forgotten, as by an address
            translator, and the rest of them dropped without notice; 0 forgets none.
    """

    def __init__(
        self,
        *,
        rtt_ms: float,
        rate_bits_per_s: int = 0,
        loss: float = 0.0,
        queue_ms: float = 20.0,
        jitter_ms: float = 0.0,
        reorder: float = 0.0,
        idle_s: float = 0.0,
        seed: int = 1,
    ) -> None:
        self._first = {
            "rtt_ms": rtt_ms,
            "rate_bits_per_s": rate_bits_per_s,
            "loss": loss,
            "queue_ms": queue_ms,
            "jitter_ms": jitter_ms,
            "reorder": reorder,
            "idle_s": idle_s,
        }
        self._seed = seed
        self._id = f"{next(_numbers)}{secrets.token_hex(3)}"
        self._emulator: asyncio.subprocess.Process | None = None
        self._processes: list[asyncio.subprocess.Process] = []
        self._joined: list[Side] = []
        self._asking = asyncio.Lock()

    def namespace(self, side: Side) -> str:
        """Name of a side's network namespace."""
        return f"prfaas-{self._id}-{side}"

    def address(self, side: Side) -> str:
        """IPv4 address of a side."""
        return f"10.77.0.{1 + SIDES.index(side)}"

    async def __aenter__(self) -> Self:
        """Make namespaces, devices and the emulator.

        Raises:
            ConfigError: Something is missing on this machine.
        """
        reason = why_not()
        if reason:
            raise ConfigError(reason)
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every process that was started in here, and remove the namespaces."""
        await self._stop()

    async def run(
        self, side: Side, args: Sequence[str], **options: Any
    ) -> asyncio.subprocess.Process:
        """Start a process in a side's namespace.

        Args:
            options: As of `asyncio.create_subprocess_exec`.
        """
        process = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", self.namespace(side), *args, **options
        )
        self._processes.append(process)
        return process

    async def change(
        self,
        *,
        rtt_ms: float | None = None,
        rate_bits_per_s: int | None = None,
        loss: float | None = None,
        queue_ms: float | None = None,
        loss_back: float | None = None,
        rate_back_bits_per_s: int | None = None,
        jitter_ms: float | None = None,
        reorder: float | None = None,
        idle_s: float | None = None,
    ) -> None:
        """Change the link; packets already in transit are not affected."""
        both: dict[str, Any] = {}
        if rtt_ms is not None:
            both["delay_ns"] = round(rtt_ms * 1e6 / 2)
        if rate_bits_per_s is not None:
            both["rate_bits_per_s"] = rate_bits_per_s
        if idle_s is not None:
            both["idle_ns"] = round(idle_s * 1e9)
        if queue_ms is not None:
            both["queue_ns"] = round(queue_ms * 1e6)
        if jitter_ms is not None:
            both["jitter_ns"] = round(jitter_ms * 1e6)
        there = both | ({} if loss is None else {"loss": loss})
        there |= {} if reorder is None else {"reorder": reorder}
        back = both | ({} if loss_back is None else {"loss": loss_back})
        if rate_back_bits_per_s is not None:
            back["rate_bits_per_s"] = rate_back_bits_per_s
        await self._ask({"there": there, "back": back})

    async def down(self) -> None:
        """Drop all packets without notice: a blackhole."""
        await self._ask({"there": {"is_down": True}, "back": {"is_down": True}})

    async def up(self) -> None:
        """End the blackhole."""
        await self._ask({"there": {"is_down": False}, "back": {"is_down": False}})

    async def counters(self) -> WanCounters:
        """Counters of the link."""
        there, back = await self._ask({})
        return WanCounters(PathCounters(**there), PathCounters(**back))

    async def _ask(self, change: dict[str, Any]) -> Any:
        async with self._asking:
            emulator = self._emulator
            if emulator is None or emulator.stdin is None:
                raise ConfigError("the emulated link is not there: use `async with Wan(...)`")
            emulator.stdin.write(json.dumps(change).encode() + b"\n")
            return json.loads(await self._line(emulator))

    async def _line(self, emulator: asyncio.subprocess.Process) -> bytes:
        line = await emulator.stdout.readline() if emulator.stdout else b""
        if not line:
            raise ConfigError("the emulator of the WAN lab ended; its error is on standard error")
        return line

    async def _start(self) -> None:
        devices = [f"pf{self._id}{side}" for side in SIDES]
        self._emulator = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.lab.emulator",
            *devices,
            str(self._seed),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(READY_TIMEOUT_S):
            await self._line(self._emulator)
        for side, device in zip(SIDES, devices, strict=True):
            await self._join(side, device)
        await self.change(**self._first)  # type: ignore[arg-type]

    async def _join(self, side: Side, device: str) -> None:
        """Give a side its device and address."""
        space, other = self.namespace(side), self.address("b" if side == "a" else "a")
        await _ip("netns", "add", space)
        self._joined.append(side)
        await _ip("link", "set", device, "netns", space)
        inside = ("-n", space)
        await _ip(*inside, "link", "set", "lo", "up")
        await _ip(*inside, "link", "set", device, "txqueuelen", str(DEVICE_QUEUE_PACKETS), "up")
        await _ip(*inside, "addr", "add", self.address(side), "peer", other, "dev", device)

    async def _stop(self) -> None:
        for process in self._processes:
            await _end(process)
        if self._emulator is not None:
            if self._emulator.stdin is not None:
                self._emulator.stdin.close()
            await _end(self._emulator)
        for side in SIDES:
            if side in self._joined:
                await _ip("netns", "delete", self.namespace(side))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to stop, and make it stop if it does not."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _ip(*args: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "ip", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise ConfigError(f"`ip {' '.join(args)}` failed: {output.decode().strip()}")
