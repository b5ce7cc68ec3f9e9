"""Churn through two pool nodes with small limits: does their memory stay within them?

    python -m benchmarks.pool.churn [--gigabytes 10] [--memory-mib 512] [--disk-mib 2048]

Starts two real `prfaas pool` processes. An engine stores blocks of two sizes at the first, every
fourth transfer is pushed to the second over TLS, both spill to disk, and earlier blocks are loaded
back from whatever tier they lie in and compared. The kernel's own numbers are sampled all the time.
Memory that the engine shares with its pool node is the engine's, and is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.shipping import manifest_digest, manifest_of_keys
from prfaas.core.transfer.tickets import Ticket
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.tickets import TicketSigner
from tests.drill.engine import ScriptedEngine, Shape
from tests.ports import free_port

MIB = 1 << 20
SIZES = {0: 2 * MIB, 1: MIB + 64 * 1024}
"""By cache group: attention and state, as of a hybrid model."""
EXTENTS = {group: [(0, size)] for group, size in SIZES.items()}
ROW_BYTES = 2 * MIB
BATCH = NUM_ROWS = 8
LAYOUT = Layout(
    b"L" * 32,
    16,
    "0",
    (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, SIZES[0]),
        CacheGroup(1, GroupKind.LINEAR_STATE, 64, SIZES[1]),
    ),
)
ANSWER_S = 60.0
PATTERN = random.Random(7).randbytes(4 * MIB)


@dataclass
class Memory:
    """Of a process, bytes; the highest seen."""

    anonymous: int = 0
    """What it allocated."""
    shared: int = 0
    """The engine's, mapped here."""
    all: int = 0
    """VmHWM: also the files of Python and its libraries that are mapped."""
    at_start: int = 0

    @property
    def resident(self) -> int:
        """All but the engine's."""
        return self.all - self.shared


@dataclass
class Pool:
    """A running pool node."""

    name: str
    process: subprocess.Popen[bytes]
    admin: int
    memory: Memory = field(default_factory=Memory)
    at_end: dict[str, float] = field(default_factory=dict)
    """Its metrics."""

    def sample(self) -> None:
        fields = {
            line.split(":")[0]: int(line.split()[1]) * 1024
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            if line.startswith(("VmHWM", "RssAnon", "RssShmem"))
        }
        memory = self.memory
        memory.anonymous = max(memory.anonymous, fields["RssAnon"])
        memory.shared = max(memory.shared, fields["RssShmem"])
        memory.all = fields["VmHWM"]
        memory.at_start = memory.at_start or memory.all

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if not line.startswith("#")
        }


@dataclass(frozen=True)
class Settings:
    folder: Path
    memory_bytes: int
    disk_bytes: int


def start_pool(settings: Settings, name: str, *more: str, port: int) -> Pool:
    admin = free_port()
    folder = settings.folder
    command = [sys.executable, "-m", "prfaas", "pool", "--name", name]
    command += ["--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}"]
    command += ["--memory", f"{settings.memory_bytes}B", "--socket", str(folder / f"{name}.sock")]
    # What the kernels of the codec take is the same for every pool node, and not of blocks.
    command += ["--link-codec", "raw"]
    command += ["--disk", str(folder / name), "--disk-limit", f"{settings.disk_bytes}B"]
    command += ["--identities", str(folder), "--gateway", "gateway", *more]
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    pool = Pool(name, process, admin)
    wait_until(lambda: is_serving(pool))
    return pool


def is_serving(pool: Pool) -> bool:
    if pool.process.poll() is not None:
        raise RuntimeError(f"pool node {pool.name} ended with {pool.process.returncode}")
    try:
        return pool.metrics().get("prfaas_pool_disk_up") == 1.0
    except OSError:
        return False


def wait_until(condition: object, limit_s: float = ANSWER_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(0.002)


def open_push(engine: ScriptedEngine, signer: TicketSigner, keys: list[BlockKey]) -> bytes:
    """Begin a transfer to the other pool node; its name."""
    transfer = secrets.token_bytes(16)
    ticket = Ticket(
        transfer_id=transfer,
        tenant="churn",
        layout_id=LAYOUT.layout_id,
        source="prfaas-pool",
        destination="pd-pool",
        blocks=manifest_digest(manifest_of_keys(keys)),
        bytes_max=BATCH * ROW_BYTES,
        expires_at_ns=time.time_ns() + 60 * 10**9,
    )
    engine.push(transfer, signer.seal(ticket), keys)
    return transfer


def content(key: BlockKey) -> bytes:
    at = int.from_bytes(key.block_hash[-4:], "big") * 4099 % (len(PATTERN) - 2 * MIB)
    return PATTERN[at : at + SIZES[key.group]]


def key_of(number: int) -> BlockKey:
    return BlockKey(int(number % 5 == 4), number.to_bytes(32, "big"))


def churn(settings: Settings, num_bytes: int) -> list[Pool]:
    """Move that many bytes through; returns the pool nodes with what they used."""
    make_authority(settings.folder)
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(settings.folder, name)
    port = free_port()
    source = ("--peer", f"pd-pool=127.0.0.1:{port}")
    pools = [
        start_pool(settings, "pd-pool", "--source", "prfaas-pool", port=port),
        start_pool(settings, "prfaas-pool", *source, port=free_port()),
    ]
    stopped = threading.Event()
    sampler = threading.Thread(target=_sample, args=(pools, stopped))
    sampler.start()
    try:
        wait_until(lambda: pools[1].metrics().get('prfaas_link_up{peer="pd-pool"}') == 1.0)
        asyncio.run(_run(settings, num_bytes))
        wait_until(lambda: _is_quiet(pools[1]))
    finally:
        stopped.set()
        sampler.join()
        for pool in pools:
            pool.at_end = _last_metrics(pool)
            pool.process.terminate()
            pool.process.wait(ANSWER_S)
    return pools


async def _run(settings: Settings, num_bytes: int) -> None:
    choice = random.Random(1)
    shape = Shape(LAYOUT, EXTENTS, ROW_BYTES, NUM_ROWS, content)
    engine = ScriptedEngine("prefill", settings.folder / "prfaas-pool.sock", shape)
    reader = ScriptedEngine("decode", settings.folder / "pd-pool.sock", shape)
    signer = TicketSigner(identity_in(settings.folder, "gateway"))
    for one in (engine, reader):
        await asyncio.to_thread(wait_until, lambda one=one: one.client.is_connected)
    num_stored = stored_bytes = turn = 0
    pushed: list[list[BlockKey]] = []
    while stored_bytes < num_bytes:
        keys = [key_of(num_stored + n) for n in range(BATCH)]
        transfer = open_push(engine, signer, keys) if turn % 4 == 0 else None
        await engine.store(keys, transfer)
        if transfer is not None:
            engine.push_done(transfer)
            pushed.append(keys)
        num_stored += BATCH
        stored_bytes += sum(SIZES[key.group] for key in keys)
        turn += 1
        if turn % 8 == 0:
            await engine.load([key_of(choice.randrange(num_stored)) for _ in range(4)])
            if len(pushed) > 4:
                await reader.load(choice.choice(pushed[:-4]))
    engine.close()
    reader.close()


def _sample(pools: list[Pool], stopped: threading.Event) -> None:
    while not stopped.wait(0.02):
        for pool in pools:
            pool.sample()


def _is_quiet(pool: Pool) -> bool:
    return all(
        value == 0
        for name, value in pool.metrics().items()
        if name.startswith(("prfaas_link_queued_bytes", "prfaas_link_in_flight_bytes"))
    )


def _last_metrics(pool: Pool) -> dict[str, float]:
    try:
        return pool.metrics()
    except OSError:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--memory-mib", type=int, default=512)
    parser.add_argument("--disk-mib", type=int, default=2048)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prfaas-churn-", dir=Path.cwd()))
    settings = Settings(folder, asked.memory_mib * MIB, asked.disk_mib * MIB)
    began = time.monotonic()
    try:
        pools = churn(settings, int(asked.gigabytes * 1e9))
        took_s = time.monotonic() - began
    finally:
        shutil.rmtree(folder)
    print(
        f"{asked.gigabytes:.1f} GB stored in {took_s:.1f} s, a quarter pushed; limits "
        f"{asked.memory_mib} MiB of memory and {asked.disk_mib} MiB of disk a pool node\n"
    )
    print(
        "| pool node | at start | peak, anonymous | over the limit | peak, all | over the limit |"
    )
    print("|---|---|---|---|---|---|")
    for pool in pools:
        own, resident = pool.memory.anonymous / MIB, pool.memory.resident / MIB
        print(
            f"| {pool.name} | {pool.memory.at_start / MIB:.0f} MiB | {own:.0f} MiB "
            f"| {own - asked.memory_mib:+.0f} MiB | {resident:.0f} MiB "
            f"| {resident - asked.memory_mib:+.0f} MiB |"
        )
    for pool in pools:
        wanted = ("pool_blocks", "pool_hits", "pool_used", "transfers_total", "link_bytes_total")
        print(f"\n{pool.name}")
        for name, value in pool.at_end.items():
            if any(word in name for word in wanted) and "created" not in name:
                print(f"  {name} {value:,.0f}")


if __name__ == "__main__":
    main()
