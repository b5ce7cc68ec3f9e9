"""Real pool node processes, and what can be asked of them from outside."""

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from prfaas.core.kv.blocks import BlockKey
from prfaas.wire.channel import Channel, keep_alive
from prfaas.wire.frames import Frame
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.codec import decode
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.gateway import (
    Evicted,
    Snapshot,
    SnapshotEnd,
    Stored,
    Subscribe,
    TransferEnded,
)

LOOPBACK = "127.0.0.1"
READY_S = 30.0


class NodeProcess:
    """One pool node in a process of its own; started anew after every kill.

    Args:
        name: Name in its certificate.
        directory: With identities; socket and log go there as well.
        options: Further options of `prfaas pool`.
    """

    def __init__(self, name: str, directory: Path, options: list[str]) -> None:
        self.name = name
        self.socket = directory / f"{name}.sock"
        self.log = directory / f"{name}.log"
        self.port = 0
        self._directory = directory
        self._options = options
        self._admin = ""
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        args = ["--name", self.name, "--listen", f"{LOOPBACK}:0", "--admin", f"{LOOPBACK}:0"]
        args += ["--socket", str(self.socket), "--identities", str(self._directory)]
        self._process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "prfaas", "pool", *args, *self._options],
            stderr=asyncio.subprocess.PIPE,
        )
        ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read_log(self._process, ready))
        async with asyncio.timeout(READY_S):
            line = await ready
        self.port = int(line.split("links at ")[1].split(",")[0].rpartition(":")[2])
        self._admin = line.rsplit(" ", 1)[1].strip()

    async def kill(self) -> None:
        """SIGKILL: it has no chance to say anything."""
        assert self._process is not None
        assert self._reader is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reader

    async def stop(self) -> None:
        """SIGTERM: it ends in order."""
        assert self._process is not None
        assert self._reader is not None
        self._process.terminate()
        await self._process.wait()
        await self._reader

    async def metrics(self) -> dict[str, float]:
        """Every sample by name, summed over its labels."""
        url = f"{self._admin.rstrip('/')}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def cpu_s(self) -> float:
        """CPU time of the process so far, seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * 4096

    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    async def _read_log(
        self, process: asyncio.subprocess.Process, ready: asyncio.Future[str]
    ) -> None:
        assert process.stderr is not None
        with self.log.open("ab") as log:
            while line := await process.stderr.readline():
                log.write(line)
                log.flush()
                if b": links at " in line and not ready.done():
                    ready.set_result(line.decode())
        if not ready.done():
            ready.set_exception(RuntimeError(f"{self.name} did not start: see {self.log}"))


@dataclass
class Observer:
    """A gateway that watches one run of a pool node's process."""

    held: set[tuple[bytes, BlockKey]] = field(default_factory=set)
    ended: list[TransferEnded] = field(default_factory=list)
    is_complete: bool = False
    is_lost: bool = False
    """Its connection is gone: on a machine that stands still for five seconds, say."""
    pinging: asyncio.Task[None] | None = None

    @classmethod
    async def of(cls, node: NodeProcess, identities: Path) -> "Observer":
        observer = cls()
        _, channel = await asyncio.get_running_loop().create_connection(
            lambda: Channel(observer._take, observer._lost),
            LOOPBACK,
            node.port,
            ssl=identity_in(identities, "gateway").client_context(),
        )
        channel.send(Subscribe(gateway="gateway"))
        observer.pinging = asyncio.create_task(keep_alive(channel))
        return observer

    def stop(self) -> None:
        """Watch no more."""
        if self.pinging is not None:
            self.pinging.cancel()

    def _lost(self, *_: object) -> None:
        self.is_lost = True

    def states(self, transfer_id: bytes) -> list[str]:
        """States in which a transfer ended, one for each end."""
        return [event.state for event in self.ended if event.transfer_id == transfer_id]

    def _take(self, _: Channel, frame: Frame) -> None:
        match decode(frame.payload):
            case Snapshot() | Stored() as event:
                self.held |= {(event.layout_id, key) for key in keys_of(event.keys)}
            case Evicted() as event:
                self.held -= {(event.layout_id, key) for key in keys_of(event.keys)}
            case TransferEnded() as event:
                self.ended.append(event)
            case SnapshotEnd():
                self.is_complete = True
