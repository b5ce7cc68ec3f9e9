"""Time of a snapshot of a large pool at a gateway, and the delay of others meanwhile.

python benchmarks/gateway/snapshot.py [--blocks 10000000]

A pool node's event feed sends the names of so many blocks over mutual TLS to a gateway's pool
client, each in a process of its own. Prints the time, the gateway's CPU time, the longest time that
its event loop was kept busy at once, and its memory for each million blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.gateway.pools.pool_client import PoolSubscription, PoolTiming
from prfaas.gateway.pools.subscription import Subscription
from prfaas.gateway.routing.transfer_tracker import Transfers
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.event_feed import EventFeed
from prfaas.wire.channel import Channel
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.gateway import PoolState, Subscribe

LAYOUT_ID = b"L" * 32


class Names:
    """A store of which only the names are there."""

    def __init__(self, num_blocks: int) -> None:
        self._names: dict[BlockName, None] = {
            (LAYOUT_ID, BlockKey(n & 1, os.urandom(32))): None for n in range(num_blocks)
        }

    def names(self) -> Iterator[BlockName]:
        return iter(self._names)


async def serve(identities: Path, num_blocks: int, ports: Any) -> None:
    feed, store = EventFeed(), Names(num_blocks)

    def subscribe(channel: Channel, _: Any) -> None:
        state = PoolState(seq=0, layouts={}, links={})
        feed.subscribe(channel, cast(BlockStore, store), lambda: state)

    server = await asyncio.get_running_loop().create_server(
        lambda: Channel(subscribe, lambda channel, _: feed.unsubscribe(channel)),
        "127.0.0.1",
        0,
        ssl=identity_in(identities, "pool").server_context(),
    )
    ports.put(server.sockets[0].getsockname()[1])
    await asyncio.sleep(3600)  # The other process ends this one.


def pool(identities: Path, num_blocks: int, ports: Any) -> None:
    asyncio.run(serve(identities, num_blocks, ports))


async def learn(identities: Path, port: int, index: PrefixIndex) -> tuple[float, float]:
    """Seconds in all, and the most CPU seconds that another task had to wait for its turn."""
    live, longest = asyncio.Event(), 0.0

    async def watch() -> None:
        nonlocal longest
        while not live.is_set():
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    client = PoolSubscription(
        "pool",
        ("127.0.0.1", port),
        Subscribe(gateway="gateway"),
        identity_in(identities, "gateway").client_context(),
        Subscription("pool", index, Transfers(), lambda view: live.set() if view.is_live else None),
        PoolTiming(),
    )
    began = time.monotonic()
    tasks = [asyncio.create_task(client.run()), asyncio.create_task(watch())]
    await live.wait()
    took = time.monotonic() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return took, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    options = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        identities = Path(folder)
        make_authority(identities)
        for name in ("pool", "gateway"):
            make_identity(identities, name)
        ports = fork.Queue()
        process = fork.Process(target=pool, args=(identities, options.blocks, ports))
        process.start()
        try:
            port, index = ports.get(), PrefixIndex()
            gc.freeze()  # As `prfaas gateway` does.
            before = resource.getrusage(resource.RUSAGE_SELF)
            took, longest = asyncio.run(learn(identities, port, index))
            after = resource.getrusage(resource.RUSAGE_SELF)
        finally:
            process.kill()
            process.join()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    grown = (after.ru_maxrss - before.ru_maxrss) * 1024 / index.num_blocks("pool")
    print(f"{index.num_blocks('pool'):,} blocks")
    print(f"time                 {took:8.1f} s")
    print(
        f"CPU of the gateway   {cpu:8.1f} s, {cpu / index.num_blocks('pool') * 1e6:.2f} us a block"
    )
    print(f"longest turn         {longest * 1e3:8.1f} ms")
    print(f"memory, at most      {grown:8.1f} MB for each million blocks")


if __name__ == "__main__":
    main()
