"""vLLM's KV cache events over ZMQ: numbered batches, and a socket for replay.

References:
    vLLM 0.32, `vllm/distributed/kv_events.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from typing import Any

import msgspec

from prfaas.errors import ConfigError
from prfaas.tasks import cancel_all

log = logging.getLogger(__name__)

IPC = "ipc://"

REPLAY_BATCHES_MAX = 10_000
END_SEQ = (-1).to_bytes(8, "big", signed=True)


class KvEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """Base of all events."""


class BlockStored(KvEvent):
    """Blocks that follow each other in a prompt have come."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KvEvent):
    """Blocks are gone."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KvEvent):
    """All blocks are gone."""


class KvEventMessage(msgspec.Struct, array_like=True, omit_defaults=True):
    """Limit of one message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Events:
    """Events of an instance without subscribers."""

    wanted = False

    def add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """Note an event for the next batch."""

    def flush(self) -> None:
        """Send collected events."""

    def cleared(self) -> None:
        """Report that all blocks were removed."""
        self.add(AllBlocksCleared())
        self.flush()

    async def close(self) -> None:
        """Stop sending."""


class ZmqEvents(Events):
    """Events of an instance on a PUB socket, with a ROUTER socket for replay; ConfigError if pyzmq
    is not installed, or an address is taken.

    Args:
        endpoint: Where subscribers come, such as "tcp://127.0.0.1:5557".
        replay: Where they ask for batches from a number on; None for nowhere.
    """

    wanted = True

    def __init__(self, endpoint: str, replay: str | None) -> None:
        try:
            import zmq
            import zmq.asyncio
        except ImportError:
            raise ConfigError("KV events need pyzmq; install it, or leave them out") from None
        self._context = zmq.asyncio.Context()
        self._pending: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES_MAX)
        self._next_seq = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._task: asyncio.Task[None] | None = None
        try:
            self._pub: Any = zmq.Context.shadow(self._context.underlying).socket(zmq.PUB)
            _bind(self._pub, endpoint)
            if replay is not None:
                router = self._context.socket(zmq.ROUTER)
                _bind(router, replay)
                self._task = asyncio.create_task(self._replay(router))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"KV events cannot be sent at {endpoint}, {replay}: {error}"
            ) from None

    def add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """See `Events`."""
        self._pending.append(event)

    def flush(self) -> None:
        """See `Events`."""
        if not self._pending:
            return
        payload = self._encoder.encode(KvEventMessage(time.time(), self._pending, 0))
        self._pending = []
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._pub.send_multipart((b"", seq.to_bytes(8, "big"), payload))
        self._sent.append((seq, payload))

    async def close(self) -> None:
        """See `Events`."""
        if self._task is not None:
            await cancel_all([self._task])
        self._pub.close(linger=0)
        self._context.destroy(linger=0)

    async def _replay(self, router: Any) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("a request for missed events has %s frames", len(frames))
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for seq, payload in list(self._sent):
                if seq >= first:
                    await router.send_multipart((client, b"", b"", seq.to_bytes(8, "big"), payload))
            await router.send_multipart((client, b"", b"", END_SEQ, b""))


def _bind(socket: Any, endpoint: str) -> None:
    """Bind; a socket in the file system is its owner's alone, for events carry prompts."""
    path = endpoint.removeprefix(IPC)
    if path == endpoint:
        socket.bind(endpoint)
        return
    before = os.umask(0o177)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(before)
