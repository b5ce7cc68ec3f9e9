"""Sends chat requests and times their first tokens; a process of its own.

Reads one job as JSON from standard input: {"host", "port", "pids", "concurrency", "bodies": path of
a file with one body a line, "hold": whether to keep streams open}; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

_WORDS = re.compile(rb'"content": ?"[^"]')
_END = b"0\r\n\r\n"


def cpu_s(pids: list[int]) -> float:
    """CPU time of processes, all their threads."""
    # Linux's clock of a process; /proc counts in steps of 10 ms.
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


class Load:
    """All that is sent, and what came of it."""

    def __init__(self, job: dict[str, Any], bodies: list[bytes]) -> None:
        self.job, self.bodies = job, bodies
        self.ttft_s: list[float] = []
        self.num_errors = 0
        self.left = job["concurrency"]
        self.done = asyncio.Event()

    def over(self) -> None:
        """A connection has nothing more to do."""
        self.left -= 1
        if not self.left:
            self.done.set()


class Client(asyncio.Protocol):
    """One connection: a request, its whole answer, the next request."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def _next(self) -> None:
        if self._transport is None or not self._load.bodies:
            self._end()
            return
        body = self._load.bodies.pop()
        self._head: bytes | None = b""
        self._tail = b""
        self._began = time.perf_counter()
        self._transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            if self._head[9:12] != b"200":
                print(self._head[:600], file=sys.stderr)
                self._fail()
                return
            if _WORDS.search(self._head):
                self._load.ttft_s.append(time.perf_counter() - self._began)
                self._head = None
                if self._load.job.get("hold"):
                    self._load.over()
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None and not self._load.job.get("hold"):
            self._fail()

    def _fail(self) -> None:
        self._load.num_errors += 1
        self._end()

    def _end(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
            self._load.over()


async def run(load: Load) -> dict[str, Any]:
    """Send everything."""
    job = load.job
    loop = asyncio.get_running_loop()
    cpu, began = cpu_s(job["pids"]), time.perf_counter()
    for _ in range(job["concurrency"]):
        await loop.create_connection(lambda: Client(load), job["host"], job["port"])
    await load.done.wait()
    result = {
        "wall_s": time.perf_counter() - began,
        "cpu_s": cpu_s(job["pids"]) - cpu,
        "ttft_s": load.ttft_s,
        "num_errors": load.num_errors,
    }
    if job.get("hold"):
        print(json.dumps(result | {"ttft_s": []}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    return result


def main() -> None:
    job = json.loads(sys.stdin.readline())
    bodies = Path(job["bodies"]).read_bytes().splitlines()
    print(json.dumps(asyncio.run(run(Load(job, bodies)))), flush=True)


if __name__ == "__main__":
    main()
