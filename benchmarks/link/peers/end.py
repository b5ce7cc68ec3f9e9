"""One end of a peer engine. Runs in the peers' own environment, which has no prfaas.

    python end.py mooncake|nixl receive|send ADDRESS BYTES

Takes JSON lines on standard input and answers each with one. The first answer of `receive` tells
`send` where to write to. A transfer is timed from its post to its completion at the sender.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

MIB = 1 << 20
PAGE = 4096
BLOCKS = (2 * MIB, 2 * MIB, 2 * MIB, MIB)
"""Three of attention to one of state, over and over."""
POLL_S = 0.0005


class Engine(Protocol):
    def describe(self) -> Any: ...

    def connect(self, there: Any) -> None: ...

    def write(self, blocks: list[tuple[int, int]]) -> None: ...


def blocks_of(num_bytes: int) -> list[tuple[int, int]]:
    """Offset and length of every block."""
    blocks: list[tuple[int, int]] = []
    at = 0
    while at < num_bytes:
        length = min(BLOCKS[len(blocks) % len(BLOCKS)], num_bytes - at)
        blocks.append((at, length))
        at += length
    return blocks


class Mooncake:
    """Mooncake's transfer engine over TCP: a batch of writes, spread over its lanes."""

    def __init__(self, role: str, host: str, address: int, num_bytes: int) -> None:
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        assert self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
        assert self.engine.register_memory(address, num_bytes) == 0
        self.host, self.address = host, address

    def describe(self) -> Any:
        return [f"{self.host}:{self.engine.get_rpc_port()}", self.address]

    def connect(self, there: Any) -> None:
        self.target, self.base = there

    def write(self, blocks: list[tuple[int, int]]) -> None:
        result = self.engine.batch_transfer_sync_write(
            self.target,
            [self.address + offset for offset, _ in blocks],
            [self.base + offset for offset, _ in blocks],
            [length for _, length in blocks],
        )
        if result:
            raise SystemExit(f"mooncake: the batch ended with {result}")


class Nixl:
    """NIXL with UCX over TCP: one write of many descriptors."""

    def __init__(self, role: str, host: str, address: int, num_bytes: int) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
        self.address = address
        self.agent.register_memory([(address, num_bytes, 0, "")], mem_type="DRAM")

    def describe(self) -> Any:
        threading.Thread(target=self.progress, daemon=True).start()
        return [self.agent.get_agent_metadata().hex(), self.address]

    def progress(self) -> None:
        while True:
            self.agent.get_new_notifs()
            time.sleep(POLL_S)

    def connect(self, there: Any) -> None:
        metadata, self.base = there
        self.peer = self.agent.add_remote_agent(bytes.fromhex(metadata))

    def write(self, blocks: list[tuple[int, int]]) -> None:
        here, there = (
            self.agent.get_xfer_descs(
                [(base + offset, length, 0) for offset, length in blocks], mem_type="DRAM"
            )
            for base in (self.address, self.base)
        )
        handle = self.agent.initialize_xfer("WRITE", here, there, self.peer, b"done")
        state = self.agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise SystemExit(f"nixl: the write ended as {state}")


def mark(at: int) -> int:
    """Content at the start of a page of the sender."""
    return 1 + (at // PAGE) % 251


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(value: object) -> None:
    print("=", json.dumps(value), flush=True)


def main() -> None:
    name, role, host, num_bytes = sys.argv[1:]
    memory = mmap.mmap(-1, int(num_bytes))
    for at in range(0, len(memory), PAGE):  # Touched before anything is timed.
        memory[at] = mark(at) if role == "send" else 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    made: dict[str, Callable[..., Engine]] = {"mooncake": Mooncake, "nixl": Nixl}
    engine = made[name](role, host, address, int(num_bytes))
    say(engine.describe() if role == "receive" else "ready")
    for line in sys.stdin:
        match json.loads(line):
            case {"connect": there}:
                engine.connect(there)
                say("connected")
            case {"transfer": size}:
                blocks = blocks_of(size)
                began = time.monotonic()
                engine.write(blocks)
                say({"s": time.monotonic() - began})
            case {"cpu": _}:
                say({"cpu_s": cpu_s()})
            case {"compare": size}:
                say(all(memory[at] == mark(at) for at in range(0, size, PAGE)))


if __name__ == "__main__":
    main()
