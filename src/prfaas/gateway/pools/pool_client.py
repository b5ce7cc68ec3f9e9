"""Connections to the pool nodes: subscribed while they last, made anew when they break."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from msgspec.structs import replace

from prfaas.config.addresses import Endpoints, join_address
from prfaas.core.invariants import check_invariants
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.errors import PeerError, words_of
from prfaas.gateway.pools.subscription import Subscription
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.part_states import PoolView
from prfaas.gateway.routing.transfer_tracker import Transfers, TransferView
from prfaas.logs import log_event
from prfaas.tasks import Backoff, cancel_all
from prfaas.wire.channel import Channel, keep_alive
from prfaas.wire.frames import Frame
from prfaas.wire.identity import peer_name
from prfaas.wire.messages.base import Message, Pong, Unsupported
from prfaas.wire.messages.codec import decode, tag_of
from prfaas.wire.messages.comparing import Compare, Compared
from prfaas.wire.messages.fields import Key
from prfaas.wire.messages.gateway import (
    LinkTelemetry,
    Order,
    OrderDone,
    Subscribe,
)
from prfaas.wire.messages.link import Abort, Release
from prfaas.wire.sockets import happy_eyeballs_s

_REASON_CHARS_MAX = 200
ORDER_S = 60.0
"""Limit for an order at one pool: records on its disk are marked one by one."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolTiming:
    """Times of a connection, seconds."""

    backoff_s: float = 0.1
    """Wait before the first attempt to reconnect; doubles from there."""
    backoff_max_s: float = 2.0
    connect_s: float = 5.0
    """Limit for connection and TLS handshake."""


Answer = OrderDone | Compared
A = TypeVar("A", OrderDone, Compared)


class PoolTransfer(Protocol):
    """A transfer between two pools."""

    transfer_id: bytes
    source: str
    destination: str


class PoolSubscription:
    """The subscription to one pool, kept up."""

    def __init__(
        self,
        pool: str,
        address: tuple[str, int],
        hello: Subscribe,
        tls: ssl.SSLContext,
        subscription: Subscription,
        timing: PoolTiming,
    ) -> None:
        self._pool = pool
        self._address = address
        self._hello = hello
        self._tls = tls
        self._timing = timing
        self._channel: Channel | None = None
        self._closed = asyncio.Event()
        self._was_live = self._has_left = False
        self._said = self._unreached = ""
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._jobs = itertools.count(1)
        self.subscription, self.answered_ns = subscription, 0

    @property
    def why_down(self) -> str:
        """Reason why the last connection broke or could not be made; stale while there is one."""
        return self._unreached or self._said

    async def run(self) -> None:
        """Connect, follow, reconnect; until cancelled."""
        backoff = Backoff(self._timing.backoff_s, self._timing.backoff_max_s)
        try:
            while True:
                self._closed.clear()
                channel = await self._connect()
                if channel is not None:
                    await self._follow(channel)
                    if self._was_live:
                        backoff.reset()
                await backoff.pause()
        finally:
            if self._channel is not None:
                self._channel.close("the gateway stops")

    def leave(self) -> None:
        """Disconnect; what still comes over the connection is not applied."""
        if self._channel is not None:
            self._channel.close("the pool node has left the site")
        self._on_close(self._channel, "it has left the site")
        self._has_left = True

    def send(self, message: Message) -> bool:
        """Send a message to the pool; False without a connection, or if it does not know it."""
        if self._channel is None or not self.subscription.may_send(message):
            return False
        self._channel.send(message)
        return True

    async def order(self, order: Order) -> OrderDone:
        """Have the pool purge or pin blocks, count them, or end that; PeerError if it is not
        connected, or does not answer."""
        return await self._answer(replace(order, job=next(self._jobs)), OrderDone)

    async def compare(
        self, layout_id: bytes, pairs: Sequence[tuple[Key, Key]], limits: Mapping[str, float]
    ) -> Compared:
        """Have the pool compare blocks, and drop the second of each pair; PeerError if it is not
        connected, or does not answer."""
        message = Compare(
            job=next(self._jobs), layout_id=layout_id, pairs=list(pairs), limits=dict(limits)
        )
        return await self._answer(message, Compared)

    async def _answer(self, message: Order | Compare, kind: type[A]) -> A:
        if self._channel is None:
            raise PeerError("not connected")
        if not self.subscription.may_send(message):
            raise PeerError(_unsupported(tag_of(type(message))))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[message.job] = answer
        try:
            self._channel.send(message)
            async with asyncio.timeout(ORDER_S):
                found = await answer
        except TimeoutError:
            raise PeerError(f"no answer within {ORDER_S:g} s") from None
        finally:
            self._asked.pop(message.job, None)
        if not isinstance(found, kind):
            raise PeerError("it answers something else")
        return found

    async def _connect(self) -> Channel | None:
        host, port = self._address
        channel = Channel(self._on_frame, self._on_close, self._on_open)
        try:
            async with asyncio.timeout(self._timing.connect_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: channel,
                    host,
                    port,
                    ssl=self._tls,
                    happy_eyeballs_delay=await happy_eyeballs_s(host, port),
                )
        except (OSError, TimeoutError) as error:
            reason = f"{join_address(self._address)}: {words_of(error)}"
            if reason != self._unreached:
                fields = {"pool": self._pool, "why": reason}
                log_event(_log, logging.WARNING, "pool_disconnected", **fields)
            self._unreached = reason
            return None
        return channel

    async def _follow(self, channel: Channel) -> None:
        """Keep the connection alive until it is gone."""
        pings = asyncio.create_task(keep_alive(channel))
        try:
            await self._closed.wait()
        finally:
            pings.cancel()

    def _on_open(self, channel: Channel) -> None:
        channel.peer = peer_name(channel.ssl_object, frozenset({self._pool}))
        self._channel = channel
        self.subscription.begin()
        channel.send(self._hello)
        if self._unreached or not self._said or self._was_live:
            log_event(_log, logging.INFO, "pool_connected", pool=self._pool)
        self._unreached = ""

    def _on_frame(self, channel: Channel, frame: Frame) -> None:
        if self._has_left:
            return
        message = decode(frame.payload)
        if isinstance(message, Pong):
            self.answered_ns = message.at_ns
            return
        if not isinstance(message, Answer | Unsupported):
            self.subscription.receive(message)
            return
        answer = self._asked.get(message.job)
        if answer is None or answer.done():
            return
        if isinstance(message, Unsupported):
            answer.set_exception(PeerError(_unsupported(message.kind)))
        else:
            answer.set_result(message)

    def _on_close(self, _: Channel | None, reason: str) -> None:
        if self._has_left:
            return
        self._channel = None
        self._was_live = self.subscription.is_live
        if self._was_live or reason != self._said:
            log_event(_log, logging.WARNING, "pool_disconnected", pool=self._pool, why=reason)
        self._said = reason
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(PeerError("the connection broke"))
        self.subscription.lose()
        self._closed.set()


class Pools:
    """All pool nodes of a deployment.

    Args:
        hello: First message to each of them.
        tls: Our identity, for dialling.
        index: Index of their blocks.
        transfers: Tracker of their transfers.
        driver: Receives their state and that of their links.
        timing: Times of the subscriptions.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        hello: Subscribe,
        tls: ssl.SSLContext,
        index: PrefixIndex,
        transfers: Transfers,
        driver: Driver,
        timing: PoolTiming,
    ) -> None:
        self.on_change: Callable[[str], None] = lambda _: None
        """Called when a pool node has reported a change of its engines or links."""

        def tell(pool: str, view: PoolView) -> None:
            driver.pool_seen(pool, view, time.monotonic_ns())
            self.on_change(pool)

        def client(pool: str, address: tuple[str, int]) -> PoolSubscription:
            followed = Subscription(pool, index, transfers, partial(tell, pool))
            return PoolSubscription(pool, address, hello, tls, followed, timing)

        self._make = client
        self._clients = {pool: client(pool, where) for pool, where in endpoints.pools.items()}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def validate(self) -> None:
        """Check what has to hold whenever nothing is being done; AssertionError if it does not."""
        others = self._tasks.keys() - self._clients.keys()
        check_invariants([(f"pools {others} have left, and are followed", not others)])
        for client in self._clients.values():
            client.subscription.validate()

    def start(self) -> None:
        """Begin to connect."""
        for pool in self._clients:
            self._run(pool)

    def add(self, pool: str, address: tuple[str, int]) -> None:
        """A pool node joins: connect to it."""
        self._clients[pool] = self._make(pool, address)
        self._run(pool)

    def remove(self, pool: str) -> None:
        """A pool node that no request uses has left: disconnect."""
        self._clients.pop(pool).leave()
        self._tasks.pop(pool).cancel()

    def _run(self, pool: str) -> None:
        self._tasks[pool] = asyncio.create_task(self._clients[pool].run())

    async def close(self) -> None:
        """Close all connections."""
        await cancel_all(self._tasks.values())

    def names(self) -> list[str]:
        """Names of all pools."""
        return list(self._clients)

    def client(self, pool: str) -> PoolSubscription:
        """The connection to a pool."""
        return self._clients[pool]

    def subscription(self, pool: str) -> Subscription:
        """Reports of a pool."""
        return self._clients[pool].subscription

    def is_live(self, pool: str) -> bool:
        """Return True if the event stream of `pool` is connected."""
        return self.subscription(pool).is_live

    def answered_ns(self, pool: str) -> int:
        """Time of the last `Ping` that a pool answered; 0 is none, or that it is not connected."""
        return self._clients[pool].answered_ns if self.is_live(pool) else 0

    def layout(self, pool: str, engine: str) -> Layout | None:
        """Layout of an engine, as its pool announced it."""
        return self.subscription(pool).view.layouts.get(engine)

    def layouts(self, pool: str) -> Mapping[str, Layout]:
        """Layouts that a pool announced, by engine; empty for one that has left."""
        return self.subscription(pool).view.layouts if pool in self._clients else {}

    def lacks(self, pool: str, engine: str) -> bool:
        """Return True if `pool` is connected, and does not announce an engine."""
        return self.is_live(pool) and self.layout(pool, engine) is None

    def tenant_bytes(self, tag: str, tier: str) -> int:
        """Bytes of a tenant in all pools; `tier` is an attribute of `TenantUse`."""
        uses = (client.subscription.tenants.get(tag) for client in self._clients.values())
        return sum(getattr(use, tier) for use in uses if use is not None)

    def link_up(self, source: str, destination: str) -> bool:
        """Return True if a transfer between two pools can begin, and be followed."""
        reaches = self.subscription(source).view.links.get(destination, False)
        return reaches and self.is_live(source) and self.is_live(destination)

    def telemetry(self) -> dict[tuple[str, str], LinkTelemetry]:
        """Measurements of every link, by source and destination."""
        return {
            (source, destination): measured
            for source, client in self._clients.items()
            for destination, measured in client.subscription.view.telemetry.items()
        }

    def send(self, pool: str, message: Message) -> bool:
        """Send a message to a pool; False if it is not connected."""
        client = self._clients.get(pool)
        return client is not None and client.send(message)

    async def order(self, pool: str, order: Order) -> OrderDone:
        """Have a pool purge or pin blocks, count them, or end that; PeerError if it is not
        connected, does not answer, or has left."""
        if pool not in self._clients:
            raise PeerError("it has left the deployment")
        return await self._clients[pool].order(order)

    def abort(self, transfer: PoolTransfer, reason: str) -> None:
        """Report the end of a transfer to both pools."""
        shown = reason[:_REASON_CHARS_MAX]
        for pool in (transfer.source, transfer.destination):
            self.send(pool, Abort(transfer_id=transfer.transfer_id, reason=shown))

    def release(self, transfer: TransferView) -> None:
        """Report to a transfer's destination that no request waits for its blocks any more."""
        self.send(transfer.destination, Release(transfer_id=transfer.transfer_id))


def _unsupported(kind: str) -> str:
    return f"its version does not know the order {kind}; upgrade the pool node"
