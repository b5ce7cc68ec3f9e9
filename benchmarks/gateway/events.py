"""Rate of KV events that a gateway takes: decoded, checked for order and put into the index.

python benchmarks/gateway/events.py [--engines 200] [--seconds 10] [--rate 100000] [--hashes bytes]

One process publishes for all engines over ZeroMQ as vLLM does, at a given rate of events, each
about one to four blocks with their token ids: blocks come, and go when the engine is full. This one
follows them with the gateway's own subscription. Prints events and blocks a second, the share of a
core that it took (CPU time of this process, ZeroMQ's threads included), and what was lost; before
that, what one core could do of decoding and applying alone.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from prfaas.config.deployment import Deployment
from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.gateway.engines.kv_event_stream import EngineFeed
from prfaas.gateway.engines.kv_event_subscriber import EngineEvents, SubscriptionObserver
from prfaas.wire.kv_events import KvEventBatch

LAYOUT = Layout(b"L" * 32, 16, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 2**16),))
EVENTS_A_BATCH = 20
HELD_MAX = 20_000
"""Blocks of an engine's device memory."""
ALONE_BATCHES = 20_000


class Engine:
    """Events of one engine."""

    def __init__(self, number: int, *, as_bytes: bool) -> None:
        self._draw = random.Random(number)
        self._as_bytes = as_bytes
        self._held: deque[Any] = deque()
        self.num_blocks = 0
        self.seq = 0

    def batch(self) -> tuple[bytes, bytes]:
        """The next batch: its number and content."""
        events = [
            self._removed() if self._is_full else self._stored() for _ in range(EVENTS_A_BATCH)
        ]
        seq, self.seq = self.seq, self.seq + 1
        payload = msgspec.msgpack.encode([float(seq), events, 0])
        return seq.to_bytes(8, "big"), payload

    @property
    def _is_full(self) -> bool:
        return len(self._held) > HELD_MAX and self._draw.random() < 0.72

    def _stored(self) -> dict[str, Any]:
        count = self._draw.randint(1, 4)
        names: list[Any] = [self._draw.randbytes(32) for _ in range(count)]
        if not self._as_bytes:
            names = [int.from_bytes(name[-8:], "big") for name in names]
        self._held.extend(names)
        self.num_blocks += count
        return {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": names[0],
            "token_ids": [self._draw.randrange(150_000)] * (16 * count),
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * count,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def _removed(self) -> dict[str, Any]:
        self.num_blocks += 1
        name = self._held.popleft()
        return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}


def publish(
    endpoints: list[str], payloads: list[list[tuple[bytes, bytes]]], rate: int, go: Any
) -> None:
    """All engines in turn, batches at even distances."""
    context: Any = zmq.Context()
    sockets = [context.socket(zmq.XPUB) for _ in endpoints]
    for socket, endpoint in zip(sockets, endpoints, strict=True):
        socket.set_hwm(100_000)
        socket.bind(endpoint)
    for socket in sockets:
        socket.recv()
    go.wait()
    started, sent = time.monotonic(), 0
    for step in range(len(payloads[0])):
        for socket, batches in zip(sockets, payloads, strict=True):
            socket.send_multipart((b"", *batches[step]))
            sent += EVENTS_A_BATCH
            ahead = started + sent / rate - time.monotonic()
            if ahead > 0.002:
                time.sleep(ahead)
    time.sleep(60)  # The other side ends this process.


def deployment(endpoints: list[str]) -> Deployment:
    engines = {f"e{n}": {"pool": "pool", "kv_events": where} for n, where in enumerate(endpoints)}
    return Deployment.model_validate(
        {
            "model": {"name": "m", "path": "nowhere"},
            "routing": {"offload_threshold": 100},
            "security": {"identities": "nowhere"},
            "clusters": {"pd": {"role": "pd", "pools": {"pool": {}}, "engines": engines}},
        }
    )


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def follow(
    endpoints: list[str], num_events: int, start: Callable[[], None]
) -> tuple[int, float, float, PrefixIndex]:
    """Events applied, seconds, CPU seconds, and the index."""
    index, applied = PrefixIndex(), 0

    class Counted(SubscriptionObserver):
        def applied(self, engine: str, batch: KvEventBatch) -> None:
            nonlocal applied
            applied += batch.num_events

    events = EngineEvents(deployment(endpoints), index, lambda *_: LAYOUT, Counted())
    events.start()
    for name in events.names():
        while not index.state(name).is_live:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    start()
    began, cpu, seen, quiet = time.monotonic(), cpu_seconds(), 0, 0
    while applied < num_events and quiet < 20:
        await asyncio.sleep(0.1)
        quiet = quiet + 1 if applied == seen else 0
        seen = applied
    took = time.monotonic() - began - 0.1 * quiet, cpu_seconds() - cpu
    await events.close()
    return applied, *took, index


def alone(*, as_bytes: bool) -> None:
    """Decoding and applying, without sockets."""
    engine = Engine(1, as_bytes=as_bytes)
    batches = [engine.batch() for _ in range(ALONE_BATCHES)]
    index = PrefixIndex()
    feed = EngineFeed("e0", index)
    feed.connected(LAYOUT)
    feed.start_blind()
    began = time.thread_time()
    for seq, (_, payload) in enumerate(batches):
        feed.live(seq, payload)
    index.num_blocks("e0")
    took = time.thread_time() - began
    num_events = ALONE_BATCHES * EVENTS_A_BATCH
    print(f"decode and apply alone   {num_events / took:12,.0f} events/s of one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rate", type=int, default=100_000)
    parser.add_argument("--hashes", choices=("bytes", "ints"), default="ints")
    options = parser.parse_args()
    as_bytes = options.hashes == "bytes"
    alone(as_bytes=as_bytes)
    steps = round(options.rate * options.seconds / EVENTS_A_BATCH / options.engines)
    makers = [Engine(number, as_bytes=as_bytes) for number in range(options.engines)]
    payloads = [[maker.batch() for _ in range(steps)] for maker in makers]
    num_events = steps * EVENTS_A_BATCH * options.engines
    with tempfile.TemporaryDirectory() as folder:
        endpoints = [f"ipc://{folder}/{number}" for number in range(options.engines)]
        fork = multiprocessing.get_context("fork")
        go = fork.Event()
        publisher = fork.Process(target=publish, args=(endpoints, payloads, options.rate, go))
        publisher.start()
        try:
            applied, seconds, cpu, index = asyncio.run(follow(endpoints, num_events, go.set))
        finally:
            publisher.kill()
            publisher.join()
    num_blocks = sum(maker.num_blocks for maker in makers) * applied / num_events
    print(f"{options.engines} engines, hashes as {options.hashes}, {EVENTS_A_BATCH} events a batch")
    print(f"published                {num_events:12,} events at {options.rate:,}/s")
    print(f"applied                  {applied:12,} events, {applied / seconds:,.0f}/s")
    print(f"blocks                   {num_blocks / seconds:12,.0f}/s")
    print(f"CPU                      {100 * cpu / seconds:12.0f} % of a core")
    print(f"known blocks             {index.num_blocks_known:12,}")


if __name__ == "__main__":
    main()
