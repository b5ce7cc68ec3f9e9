"""The process of the Mooncake client: `python -m ... SOCKET MEMORY SETUP`.

The native library runs in its own process: it listens on all interfaces, its calls wait without a
limit while a peer is stopped, and a crash of it would end the pool node. Calls run on threads, so
that one that hangs holds up only its like. The process ends with its socket.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from prfaas.pool.shared.mooncake.orders import (
    LENGTH_BYTES,
    NO_LIBRARY,
    Order,
    StoreAnswer,
    StoreOperation,
    StoreSetup,
    framed,
)

THREADS = {
    StoreOperation.PUT: 1,
    StoreOperation.GET: 4,
    StoreOperation.EXIST: 2,
    StoreOperation.REMOVE: 1,
}
"""Threads for each operation. Several for writing were slower than one (docs/results)."""
BATCH_BYTES, BATCH_MAX = 4 << 20, 16
"""Small blocks are written together, up to this."""
LOCAL_BYTES = 16 << 20
"""Buffer of the library for its own use."""


class StoreClient:
    """Runs orders.

    Args:
        orders: Socket to the pool node.
    """

    def __init__(self, orders: socket.socket, memory: mmap.mmap, setup: StoreSetup) -> None:
        self._orders, self._lock = orders, threading.Lock()
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError:
            self._send(StoreAnswer(0, [NO_LIBRARY]))
            raise
        self._memory = memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._store: Any = MooncakeDistributedStore()
        self._config = ReplicateConfig()
        self._config.replica_num = setup.replicas
        code = self._store.setup(
            setup.address,
            setup.metadata,
            0,
            LOCAL_BYTES,
            setup.protocol,
            setup.devices,
            setup.master,
        )
        code = code or self._store.register_buffer(self._base, setup.memory_bytes)
        self._send(StoreAnswer(0, [code]))
        self._queues: dict[StoreOperation, queue.SimpleQueue[Order]] = {
            operation: queue.SimpleQueue() for operation in THREADS
        }
        for operation, number in THREADS.items():
            for _ in range(number):
                threading.Thread(target=self._work, args=[operation], daemon=True).start()

    def run(self) -> None:
        """Take orders until the socket ends."""
        with self._orders.makefile("rb") as file:
            while True:
                length = file.read(LENGTH_BYTES)
                data = file.read(int.from_bytes(length, "big"))
                if not data:
                    return
                order = msgspec.msgpack.decode(data, type=Order)
                self._queues[order.operation].put(order)

    def _work(self, operation: StoreOperation) -> None:
        orders = self._queues[operation]
        if operation is StoreOperation.PUT:
            while True:
                self._put(self._batch(orders))
        calls: dict[StoreOperation, Callable[[Order], list[int]]] = {
            StoreOperation.GET: self._get,
            StoreOperation.EXIST: lambda order: list(self._store.batch_is_exist(order.names)),
            StoreOperation.REMOVE: lambda order: [
                self._store.remove_by_regex(order.names[0], True)
            ],
        }
        while True:
            order = orders.get()
            self._send(StoreAnswer(order.number, calls[operation](order)))

    def _batch(self, orders: queue.SimpleQueue[Order]) -> list[Order]:
        """The next orders, as many as are written together."""
        batch = [orders.get()]
        num_bytes = batch[0].num_bytes
        while num_bytes < BATCH_BYTES and len(batch) < BATCH_MAX:
            try:
                batch.append(orders.get_nowait())
            except queue.Empty:
                break
            num_bytes += batch[-1].num_bytes
        return batch

    def _put(self, batch: list[Order]) -> None:
        codes = self._store.batch_put_from(
            [order.names[0] for order in batch],
            [self._base + order.offset for order in batch],
            [order.num_bytes for order in batch],
            self._config,
        )
        for order, code in zip(batch, codes, strict=True):
            self._send(StoreAnswer(order.number, [code]))

    def _get(self, order: Order) -> list[int]:
        place = self._base + order.offset
        return [self._store.get_into(order.names[0], place, order.num_bytes)]

    def _send(self, answer: StoreAnswer) -> None:
        with self._lock:
            self._orders.sendall(framed(answer))


def main(arguments: list[str]) -> None:
    """Run until the pool node closes the socket."""
    setup = msgspec.json.decode(arguments[2], type=StoreSetup)
    memory = mmap.mmap(int(arguments[1]), setup.memory_bytes)
    try:
        StoreClient(socket.socket(fileno=int(arguments[0])), memory, setup).run()
    except (OSError, ImportError):
        pass  # The pool node has ended, or knows.
    finally:
        os._exit(0)  # Threads may hang in the library.


if __name__ == "__main__":
    main(sys.argv[1:])
