"""A pool node that says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.core.cache.keep_rules import Effect
from prfaas.core.kv.blocks import BlockKey, Layout
from prfaas.core.kv.difference_limits import is_altered
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.wire.channel import Channel
from prfaas.wire.frames import Frame
from prfaas.wire.identity import identity_in, peer_name
from prfaas.wire.messages.base import Message, Unsupported
from prfaas.wire.messages.codec import OfGateway, decode, tags_of
from prfaas.wire.messages.comparing import Altered, Compare, Compared
from prfaas.wire.messages.gateway import (
    Evicted,
    LinkTelemetry,
    Order,
    OrderDone,
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    Subscribe,
    TierUse,
    TransferEnded,
)
from prfaas.wire.messages.layouts import LayoutFacts, layout_spec
from prfaas.wire.messages.link import Abort, Pull, Release


@dataclass
class ScriptedPool:
    name: str
    identities: Path
    layouts: dict[str, Layout] = field(default_factory=dict)
    links: dict[str, bool] = field(default_factory=dict)
    facts: list[LayoutFacts] = field(default_factory=list)
    """Said with every state; none, as of an older pool node."""
    telemetry: dict[str, LinkTelemetry] = field(default_factory=dict)
    tiers: dict[str, TierUse] = field(default_factory=dict)
    num_leased: int = 0
    leased_bytes: int = 0
    blocks: list[tuple[bytes, BlockKey]] = field(default_factory=list)
    """What the next snapshot holds."""
    next_seq: int = 7
    aborts: list[Abort] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    on_purge: Callable[[ScriptedPool, Order], None] | None = None
    """Told of purges."""
    worst: dict[str, float] | None = None
    """Said when blocks are compared; without it all are missing."""
    compares: list[Compare] = field(default_factory=list)
    pins: list[Order] = field(default_factory=list)
    is_barred: bool = True
    """Said at the end of a purge."""
    num_subscriptions: int = 0
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)
    """As the last subscription announced them."""
    takes: list[str] = field(default_factory=lambda: tags_of(OfGateway))
    """Messages that it says it takes; without any it is an older version, and knows no pins."""
    is_mute: bool = False
    """Subscribed to, but says nothing."""
    gateways: frozenset[str] = frozenset({"gateway"})
    port: int = 0
    _server: asyncio.Server | None = None
    _channels: list[Channel] = field(default_factory=list)

    async def start(self) -> None:
        identity = identity_in(self.identities, self.name)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Channel(self._on_frame, self._on_close, self._on_open),
            "127.0.0.1",
            self.port,
            ssl=identity.server_context(),
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self.disconnect()
            await self._server.wait_closed()
            self._server = None

    def disconnect(self) -> None:
        for channel in list(self._channels):
            channel.close("test")

    def _on_open(self, channel: Channel) -> None:
        channel.peer = peer_name(channel.ssl_object, self.gateways)
        self._channels.append(channel)

    def _on_close(self, channel: Channel, reason: str) -> None:
        if channel in self._channels:
            self._channels.remove(channel)

    def _on_frame(self, channel: Channel, frame: Frame) -> None:
        match decode(frame.payload):
            case Subscribe() as subscription:
                self.num_subscriptions += 1
                self.shares = subscription.shares
                if not self.is_mute:
                    self._snapshot(channel)
            case Abort() as abort:
                self.aborts.append(abort)
            case Release() as release:
                self.releases.append(release)
            case Pull() as pull:
                self.pulls.append(pull)
            case Compare() as message:
                self.compares.append(message)
                count = len(message.pairs)
                self.send(
                    Compared(
                        job=message.job,
                        num_equal=0,
                        num_different=0 if self.worst is None else count,
                        num_missing=count if self.worst is None else 0,
                        worst=self.worst or {},
                        altered=[
                            Altered(n, "prfaas-pool", is_inherited=False)
                            for n in range(count)
                            if is_altered(self.worst or {}, message.limits)
                        ],
                    )
                )
            case Order() as message if "order" not in self.takes:
                self.send(Unsupported(kind="order", job=message.job))
            case Order(effect=Effect.PIN) as message:
                self.pins.append(message)
                self.send(OrderDone(job=message.job, num_blocks=3, host_bytes=3072))
            case Order(for_ns=0) as message:
                if self.on_purge is not None:
                    self.on_purge(self, message)
                self.send(OrderDone(job=message.job, was_in_force=self.is_barred))
            case Order() as message if self.on_purge is not None:
                self.on_purge(self, message)

    def _snapshot(self, channel: Channel) -> None:
        for layout_id, key in self.blocks:
            channel.send(
                Snapshot(epoch="e", next_seq=self.next_seq, layout_id=layout_id, keys=[key])
            )
        channel.send(SnapshotEnd(epoch="e", next_seq=self.next_seq, takes=self.takes))
        self.tell_state()

    # --- events ---

    def send(self, message: Message) -> None:
        for channel in self._channels:
            channel.send(message)

    def seq(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1

    def tell_state(self) -> None:
        layouts = {name: layout_spec(layout) for name, layout in self.layouts.items()}
        self.send(
            PoolState(
                seq=self.seq(),
                layouts=layouts,
                links=self.links,
                telemetry=self.telemetry,
                tiers=self.tiers,
                num_leased=self.num_leased,
                leased_bytes=self.leased_bytes,
                facts=self.facts,
            )
        )

    def store(self, layout: Layout, keys: list[BlockKey]) -> None:
        wire = [(key.group, key.block_hash) for key in keys]
        self.send(Stored(seq=self.seq(), layout_id=layout.layout_id, keys=wire))

    def evict(self, layout: Layout, keys: list[BlockKey]) -> None:
        wire = [(key.group, key.block_hash) for key in keys]
        self.send(Evicted(seq=self.seq(), layout_id=layout.layout_id, keys=wire))

    def end_transfer(
        self, transfer: str, kind: str = "committed", reason: str = "", num_bytes: int = 1000
    ) -> None:
        self.send(
            TransferEnded(
                seq=self.seq(),
                transfer_id=bytes.fromhex(transfer),
                direction="in",
                peer="x",
                kind=TransferEnd(kind),
                reason=reason,
                num_blocks=2,
                num_bytes=num_bytes,
                duration_ns=5_000_000,
                last_block_age_ns=2_000_000,
            )
        )
