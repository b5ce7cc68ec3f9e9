"""An engine's KV events as vLLM publishes them, with what can go wrong on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from prfaas.config.deployment import Deployment

END = (-1).to_bytes(8, "big", signed=True)


def stored(hashes: list[Any], group: int | None = 0, medium: str | None = "GPU") -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [1, 2, 3],
        "block_size": 16,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": group,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(hashes: list[Any], group: int | None = 0, medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group}


CLEARED = {"type": "AllBlocksCleared"}


def followed_deployment(endpoint: str, replay: str | None) -> Deployment:
    """A deployment of one engine, `decode`, that publishes its KV events at these places."""
    engine: dict[str, Any] = {"pool": "pool", "kv_events": endpoint, "kv_events_replay": replay}
    return Deployment.model_validate(
        {
            "model": {"name": "m", "path": "nowhere"},
            "routing": {"offload_threshold": 100},
            "security": {"identities": "nowhere"},
            "clusters": {
                "pd": {"role": "pd", "pools": {"pool": {}}, "engines": {"decode": engine}}
            },
        }
    )


class Publisher:
    """One life of an engine.

    Args:
        endpoint: Where it publishes.
        replay: Where it repeats; None for nowhere.
    """

    def __init__(self, endpoint: str, replay: str | None) -> None:
        self._context = zmq.asyncio.Context()
        self._pub: Any = zmq.Context.shadow(self._context.underlying).socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._pub.bind(endpoint)
        self.batches: list[tuple[int, bytes]] = []
        self.next_seq = 0
        self.num_replays = 0
        self._num_subscriptions = 0
        self.is_mute = False
        """Hears requests for a replay, and does not answer."""
        self._task: asyncio.Task[None] | None = None
        if replay is not None:
            router = self._context.socket(zmq.ROUTER)
            router.bind(replay)
            self._task = asyncio.create_task(self._answer(router))

    def publish(self, *events: Any, lost: bool = False, payload: bytes | None = None) -> None:
        """Number a batch and send it, or lose it on the way."""
        if payload is None:
            payload = msgspec.msgpack.encode([1700000000.0 + id(events), list(events), 0])
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.batches.append((seq, payload))
        if not lost:
            self._pub.send_multipart((b"", seq.to_bytes(8, "big"), payload))

    def send_frames(self, frames: list[bytes]) -> None:
        """Send what is no batch to those who have subscribed."""
        self._pub.send_multipart(frames)

    def num_subscriptions(self) -> int:
        """Subscriptions that have taken effect so far, those that ended included.

        What is published before a subscription has taken effect does not reach the subscriber, even
        if it was given a replay before.
        """
        while True:
            try:
                self._num_subscriptions += self._pub.recv(zmq.NOBLOCK)[:1] == b"\x01"
            except zmq.Again:
                return self._num_subscriptions

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close(linger=0)
        self._context.destroy(linger=0)

    async def _answer(self, router: Any) -> None:
        while True:
            client, _, first = await router.recv_multipart()
            self.num_replays += 1
            if self.is_mute:
                continue
            for seq, payload in list(self.batches):
                if seq >= int.from_bytes(first, "big"):
                    await router.send_multipart((client, b"", b"", seq.to_bytes(8, "big"), payload))
            await router.send_multipart((client, b"", b"", END, b""))
