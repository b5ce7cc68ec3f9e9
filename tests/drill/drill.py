"""Faults during transfers between real pool node processes, and what has to hold after each."""

import asyncio
import contextlib
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.wire.identity import make_authority, make_identity
from tests.lab.faults import Fault, FaultProxy

from .audit import audited
from .engine import BLOCK_BYTES, CODED_SHAPE, LAYOUT, ROUNDED_SHAPE, SHAPE, ScriptedEngine
from .forgery import forge, seal
from .processes import LOOPBACK, NodeProcess, Observer

MEMORY, DISK = "24MiB", "64MiB"
"""Of each pool node: a few rounds fill both, so blocks are evicted while others are pinned."""
LOCAL_BLOCKS = 20
SAMPLE_BLOCKS = 24
"""Older blocks that decode loads after every fault, wherever they lie."""
READ_BITS_PER_S = 40_000_000
"""Of each connection: a transfer takes long enough to be hit."""
SETTLE_S = 40.0
EVENT_S = 5.0
WAIT_S = 20.0
"""How long decode waits for blocks on their way."""
CHUNK_BLOCKS = 4
CODED_SHARE = 0.7
"""Of the bytes of blocks, that pass at least if they are coded."""
ROUNDED_SHARE = 0.45
"""The same if they are rounded."""
AUDIT = "audit"
"""Folder of the audit logs."""
SOURCE, DESTINATION = "prfaas-pool", "pd-pool"


class Kind(StrEnum):
    """A fault of a transfer under way."""

    CUT = "cut"
    RESET = "reset"
    HALF_OPEN = "half-open"
    CORRUPT = "corrupt"
    KILL_SOURCE = "kill -9 of the source"
    KILL_DESTINATION = "kill -9 of the destination"
    DISK = "damaged files, after kill -9 of the destination"
    FORGE = "damaged blocks under a good identity"


PROXIED = {
    Kind.CUT: Fault.CUT,
    Kind.RESET: Fault.RESET,
    Kind.HALF_OPEN: Fault.HALF_OPEN,
    Kind.CORRUPT: Fault.CORRUPT,
}
DESTINATION_DIES = {Kind.KILL_DESTINATION, Kind.DISK}
KILLED = {Kind.KILL_SOURCE: SOURCE, Kind.KILL_DESTINATION: DESTINATION}


@dataclass
class Round:
    """The effect of one fault.

    Attributes:
        kind: The fault.
        source_states: How transfers ended at the source; empty for those that died with it.
        destination_states: The same at the destination; empty also for those never heard of.
        num_blocks: Blocks that the transfers had.
        num_served: Of these, what decode loaded, each compared byte by byte.
        num_older: Blocks of earlier transfers that were loaded, and compared, afterwards.
        seconds: From the fault until everything was at rest.
        problems: What did not hold.
    """

    kind: Kind
    source_states: list[str] = field(default_factory=list)
    destination_states: list[str] = field(default_factory=list)
    num_blocks: int = 0
    num_served: int = 0
    num_older: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def prompt(chance: random.Random) -> list[BlockKey]:
    """Blocks of a new prompt: attention, and the state that decode resumes from.

    Earlier states are checkpoints, which a link may leave out.
    """
    count = chance.randint(3, 10)
    attention = [BlockKey(0, chance.randbytes(32)) for _ in range(count)]
    return [*attention, *(BlockKey(1, key.block_hash) for key in attention[3::4][-1:])]


async def until(what: str, condition: Callable[[], bool], limit_s: float = SETTLE_S) -> None:
    try:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - other processes signal nothing
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise TimeoutError(f"waited {limit_s:.0f} s until {what}") from None


@dataclass(frozen=True)
class Protocol:
    """Protection and coding of blocks on the link.

    Attributes:
        codec: `link_codec` of both pool nodes; engines announce what can be coded unless it is raw.
        encryption: `link_encryption` of both.
        lanes: `link_lanes` of both.
        quality: Class of all transfers. Blocks are such that rounding changes no bit.
    """

    codec: LinkCodec = LinkCodec.RAW
    encryption: LinkEncryption = LinkEncryption.TLS
    lanes: int = 1
    quality: Quality = Quality.LOSSLESS


RAW_OVER_TLS = Protocol()


class Drill:
    """Two sites with a fault proxy between their pool nodes, and an engine at each."""

    def __init__(self, directory: Path, seed: int, protocol: Protocol = RAW_OVER_TLS) -> None:
        self.protocol = protocol
        self.chance = random.Random(seed)
        self.directory = directory
        self.proxy = FaultProxy((LOOPBACK, 0))
        self.nodes: dict[str, NodeProcess] = {}
        self.engines: dict[str, ScriptedEngine] = {}
        self.observers: dict[str, Observer] = {}

    @classmethod
    @asynccontextmanager
    async def at(
        cls, directory: Path, seed: int, protocol: Protocol = RAW_OVER_TLS
    ) -> AsyncIterator["Drill"]:
        drill = cls(directory, seed, protocol)
        try:
            await drill._open()
            yield drill
        finally:
            for engine in drill.engines.values():
                await asyncio.to_thread(engine.close)
            for observer in drill.observers.values():
                observer.stop()
            for node in drill.nodes.values():
                await node.kill()
            await drill.proxy.close()

    async def strike(self, kind: Kind) -> Round:
        """Run transfers, break something, and see what holds afterwards."""
        result = Round(kind)
        transfers = {
            secrets.token_bytes(16): prompt(self.chance) for _ in range(self.chance.randint(1, 2))
        }
        result.num_blocks = sum(map(len, transfers.values()))
        total = sum(BLOCK_BYTES[key.group] for keys in transfers.values() for key in keys)
        share = 0.95 if self.protocol.codec is LinkCodec.RAW else CODED_SHARE
        if self.protocol.quality.is_lossy:
            share = ROUNDED_SHARE
        threshold = self.proxy.num_bytes + self.chance.uniform(0.05, share) * total
        await self._local()
        work = [asyncio.create_task(self._prefill(*item)) for item in transfers.items()]
        loads = [asyncio.create_task(self._decode(*item)) for item in transfers.items()]
        try:
            await until("bytes pass", lambda: self.proxy.num_bytes >= threshold)
            began = time.monotonic()
            await self._break(kind)
            async with asyncio.timeout(SETTLE_S):
                await asyncio.gather(*work)
                result.num_served = sum(await asyncio.gather(*loads))
            await self._at_rest(result, transfers)
            result.seconds = time.monotonic() - began
            await self.ready()
            result.num_older = await self._load_older()
        except (TimeoutError, AssertionError) as error:
            result.problems.append(f"{type(error).__name__}: {error}")
        finally:
            for task in (*work, *loads):
                task.cancel()
            await asyncio.gather(*work, *loads, return_exceptions=True)
        return result

    async def _prefill(self, transfer: bytes, keys: list[BlockKey]) -> None:
        """Store chunk by chunk, as an engine computes them."""
        engine = self.engines[SOURCE]
        engine.push(transfer, seal(self.directory, transfer, keys, self.protocol.quality), keys)
        for start in range(0, len(keys), CHUNK_BLOCKS):
            await engine.store(keys[start : start + CHUNK_BLOCKS], transfer)
        engine.push_done(transfer)

    async def _local(self) -> None:
        """Decode's own prefixes, so that there is something to spill."""
        keys = [BlockKey(0, self.chance.randbytes(32)) for _ in range(LOCAL_BLOCKS)]
        await self.engines[DESTINATION].store(keys, None)

    async def _decode(self, transfer: bytes, keys: list[BlockKey]) -> int:
        """Wait for blocks as long as they are on their way, and load what came."""
        engine = self.engines[DESTINATION]
        found = await engine.find(transfer.hex(), keys, transfer, WAIT_S)
        return await engine.load(found) if found else 0

    async def _load_older(self) -> int:
        """Load some of what the destination says to hold, from either tier."""
        observer = self.observers[DESTINATION]
        await until("the snapshot is there", lambda: observer.is_complete)
        held = sorted(key for _, key in observer.held)
        sample = self.chance.sample(held, min(SAMPLE_BLOCKS, len(held)))
        return await self.engines[DESTINATION].load(sample) if sample else 0

    # --- faults ---

    async def _break(self, kind: Kind) -> None:
        if kind in PROXIED:
            count = self.proxy.num_connections
            one = self.chance.randrange(count) if count and self.chance.random() < 0.5 else None
            self.proxy.strike(PROXIED[kind], one)
        elif kind in KILLED:
            await self._restart(KILLED[kind], lambda: None)
        elif kind is Kind.DISK:
            await self._restart(DESTINATION, self._damage_files)
        else:
            node = self.nodes[DESTINATION]
            await forge(self.directory, node.port, self.chance)

    def _damage_files(self) -> None:
        """A flipped bit in every MiB or so of the disk tier, and one file cut short."""
        files = [path for path in self._disk(DESTINATION).rglob("*") if path.is_file()]
        for path in files:
            size = path.stat().st_size
            with path.open("r+b") as file:
                for _ in range(size >> 20):
                    at = self.chance.randrange(size)
                    file.seek(at)
                    (byte,) = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << self.chance.randrange(8)]))
        if files:
            victim = self.chance.choice(files)
            os.truncate(victim, self.chance.randrange(victim.stat().st_size + 1))

    def _disk(self, name: str) -> Path:
        return self.directory / f"{name}-disk"

    async def _restart(self, name: str, meanwhile: Callable[[], None]) -> None:
        self.observers[name].stop()
        await self.nodes[name].kill()
        meanwhile()
        await self._start(name)

    async def _start(self, name: str) -> None:
        await self.nodes[name].start()
        if name == DESTINATION:
            self.proxy.target = (LOOPBACK, self.nodes[name].port)
        self.observers[name] = await Observer.of(self.nodes[name], self.directory)

    # --- what has to hold ---

    async def _at_rest(self, result: Round, transfers: dict[bytes, list[BlockKey]]) -> None:
        for name in self.nodes:
            await self._nothing_held(name)
        source, destination = self.observers[SOURCE], self.observers[DESTINATION]
        with contextlib.suppress(TimeoutError):  # The events may come after the metrics.
            await until("all was told", lambda: not self._wrong_ends(result, transfers), EVENT_S)
        for transfer in transfers:
            result.source_states += source.states(transfer)
            result.destination_states += destination.states(transfer)
        result.problems += self._wrong_ends(result, transfers)

    def _wrong_ends(self, result: Round, transfers: dict[bytes, list[BlockKey]]) -> list[str]:
        source, destination = self.observers[SOURCE], self.observers[DESTINATION]
        problems = [
            f"{name} was not watched all the time"
            for name, one in self.observers.items()
            if one.is_lost
        ]
        for transfer, keys in transfers.items():
            at_source, at_destination = source.states(transfer), destination.states(transfer)
            if len(at_source) != (0 if result.kind is Kind.KILL_SOURCE else 1):
                problems.append(f"at the source a transfer ended as {at_source}")
            if len(at_destination) > 1:
                problems.append(f"at the destination a transfer ended as {at_destination}")
            if "committed" in at_source and result.kind not in DESTINATION_DIES:
                missing = [key for key in keys if (LAYOUT.layout_id, key) not in destination.held]
                if missing or "committed" not in at_destination:
                    problems.append(f"committed, and {len(missing)} blocks are missing")
        return problems

    async def _nothing_held(self, name: str) -> None:
        """No open transfer, no pin, no part of a block; bytes are those of the blocks there."""
        node, observer = self.nodes[name], self.observers[name]
        await until(f"{name} sent its snapshot", lambda: observer.is_complete)
        began = time.monotonic()
        while True:
            metrics = await node.metrics()
            leaks = {
                "open transfers": metrics["prfaas_open_transfers"],
                "pinned blocks": metrics["prfaas_pool_pinned_blocks"],
                "promised bytes": metrics["prfaas_pool_promised_bytes"],
                "bytes of unfinished blocks": metrics["prfaas_link_unfinished_bytes"],
                "bytes that belong to no block": metrics["prfaas_pool_loose_bytes"],
            }
            leaks = {what: count for what, count in leaks.items() if count}
            if not leaks:
                return
            if time.monotonic() - began > SETTLE_S:
                raise AssertionError(f"{name} holds {leaks}")
            await asyncio.sleep(0.02)

    async def ready(self) -> None:
        """Both engines are connected and both nodes watched, and the link stands."""
        for name, observer in list(self.observers.items()):
            if observer.is_lost:
                self.observers[name] = await Observer.of(self.nodes[name], self.directory)
        for engine in self.engines.values():
            await until("the engine is connected", lambda e=engine: e.client.is_connected)  # type: ignore[misc]
        async with asyncio.timeout(SETTLE_S):
            while True:
                metrics = await self.nodes[SOURCE].metrics()
                if metrics.get("prfaas_link_up") and metrics.get("prfaas_link_connections"):
                    return
                await asyncio.sleep(0.02)

    async def _open(self) -> None:
        make_authority(self.directory)
        for name in (SOURCE, DESTINATION, "gateway"):
            make_identity(self.directory, name)
        await self.proxy.open()
        self.proxy.read_bits_per_s = READ_BITS_PER_S
        common = [
            "--audit",
            str(self.directory / AUDIT),
            "--memory",
            MEMORY,
            "--disk-limit",
            DISK,
            "--gateway",
            "gateway",
            "--link-codec",
            self.protocol.codec,
            "--link-encryption",
            self.protocol.encryption,
            "--link-lanes",
            str(self.protocol.lanes),
        ]
        shape = SHAPE if self.protocol.codec is LinkCodec.RAW else CODED_SHAPE
        if self.protocol.quality.is_lossy:
            shape = ROUNDED_SHAPE
        options = {
            DESTINATION: ["--source", SOURCE],
            SOURCE: ["--peer", f"{DESTINATION}={LOOPBACK}:{self.proxy.port}"],
        }
        for name, own in options.items():
            options_of = [*common, *own, "--disk", str(self._disk(name))]
            self.nodes[name] = NodeProcess(name, self.directory, options_of)
            await self._start(name)
            self.engines[name] = ScriptedEngine(name, self.nodes[name].socket, shape)


def plan(count: int, chance: random.Random) -> list[Kind]:
    """That many faults, every kind as often as the others, in any order."""
    kinds = list(Kind)
    faults = [kinds[index % len(kinds)] for index in range(count)]
    chance.shuffle(faults)
    return faults


async def run(
    directory: Path,
    count: int,
    seed: int,
    on_round: Callable[[Round], None] = lambda _: None,
    protocol: Protocol = RAW_OVER_TLS,
) -> list[Round]:
    """Strike that many times; the audit logs are compared with the counters after the last."""
    rounds: list[Round] = []
    async with Drill.at(directory, seed, protocol) as drill:
        for kind in plan(count, drill.chance):
            try:
                await drill.ready()
                rounds.append(await drill.strike(kind))
            except (TimeoutError, OSError) as error:
                rounds.append(Round(kind, problems=[f"no start: {error}"]))
            on_round(rounds[-1])
        rounds[-1].problems += await audited(drill.nodes, directory / AUDIT)
    return rounds
