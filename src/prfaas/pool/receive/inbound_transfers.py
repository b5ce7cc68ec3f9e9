"""Transfers that arrive at this pool: what the machine of `core/transfer/receiver.py` decides.

Pulls fetch blocks by name from another pool, which keeps a link to this one:

    gateway or engine ──Pull──► destination ──Pull──► source
                                destination ◄──Offer, blocks, Commit── source
    gateway or engine ◄─Missing or Refused─ destination

With `Ahead.COMPUTING` the source sends blocks as an engine stores them (`send/ahead.py`), until the
asker's second message, which takes the same path. It is repeated when a broken link is back, since
it may be lost with the old connection. From the offer on a pull is a transfer like any other. The
request travels against the direction of the link: no port has to be opened for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Set
from typing import Protocol

from prfaas.core.cache.eviction import born_in
from prfaas.core.kv.blocks import BlockKey, Layout
from prfaas.core.kv.tenant_salts import tag_in
from prfaas.core.transfer import actions as do
from prfaas.core.transfer import events as on
from prfaas.core.transfer.machine import methods_of
from prfaas.core.transfer.receiver import Receiver
from prfaas.core.transfer.tickets import TicketRefusal, TicketRefusedError
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.receive.block_assembly import Assembly
from prfaas.pool.receive.receive_limits import DEFAULTS, ReceiveLimits
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.origins import received
from prfaas.pool.tickets.ticket_checks import DESTINATION, TicketChecks
from prfaas.wire.channel import Channel
from prfaas.wire.fragments import ReceivedBlock
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import keys_of, wire_keys
from prfaas.wire.messages.link import (
    Abort,
    Accepted,
    Ahead,
    Arrived,
    Committed,
    Missing,
    Offer,
    Pull,
    Refused,
    all_computed,
)

PEER_SHARE = 4
"""One peer may hold that part of memory with blocks that are not in the store yet, or
`peer_bytes_min`: when a path flows again that stood still, every connection brings parts of other
blocks."""
KEYS_AT_ONCE = 4096


class HasLayout(Protocol):
    """A connected engine."""

    @property
    def layout(self) -> Layout:
        """Of its blocks."""


class InboundTransfers:
    """Reports what happens to transfers that arrive, and does what the machine says.

    Args:
        store: Where blocks go.
        on_ended: Called once for every ended transfer.
        engines: Local engines: blocks of other layouts are refused.
        grace_ns: Time limit of transfers' wait for a broken link, ns.
        limits: Limits on what peers may have this pool receive.
        hosts: Pools of other hosts of the site: what is pulled from them is a copy.
    """

    def __init__(
        self,
        store: BlockStore,
        metrics: PoolMetrics,
        on_ended: Callable[[Transfer], None],
        clock_ns: Callable[[], int],
        tickets: TicketChecks,
        engines: Mapping[str, HasLayout],
        grace_ns: int = 0,
        limits: ReceiveLimits = DEFAULTS,
        hosts: Set[str] = frozenset(),
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._metrics, self._tickets = store, metrics, tickets
        self._on_ended, self._engines, self._hosts = on_ended, engines, hosts
        self._clock_ns, self._wall_s = clock_ns, wall_s
        self.limits = limits
        self.machine = Receiver(limits.transfers_max, self.peer_bytes_max, grace_ns)
        self.channels: dict[Channel, asyncio.Task[None]] = {}
        """Connections for messages, of pools and gateways."""
        self.from_sources: set[Channel] = set()
        """Those of pools that may push."""
        self.links: dict[str, tuple[str, Assembly]] = {}
        """By peer: the word of its present link, and its unfinished blocks."""

    def report(self, event: on.TransferInput) -> bool:
        """Report what happened, and do what follows; return False if nothing does."""
        actions = self.machine.step(event, self._clock_ns())
        for action in actions:
            _METHODS[type(action)](self, action)
        return bool(actions)

    # --- questions ---

    def channel_of(self, peer: str) -> Channel | None:
        """The connection for messages of a peer; None without one."""
        return next((c for c in self.channels if c.peer == peer and c.is_open), None)

    def is_connected(self, source: str) -> bool:
        """Return True if a link from the pool `source` stands."""
        return any(channel.peer == source and channel.is_open for channel in self.from_sources)

    def is_open(self, transfer_id: bytes) -> bool:
        """Return True if blocks of this transfer may still come."""
        return self.machine.is_open(transfer_id)

    def is_on_its_way(self, transfer_id: bytes, source: str) -> bool:
        """Return True if a block that is not here may still come with this transfer.

        One that nobody has announced yet is in transit only while the link stands.
        """
        known = self.machine.get(transfer_id)
        return self.is_connected(source) if known is None else known.is_open

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return self.machine.num_open

    @property
    def promised_bytes(self) -> int:
        """Bytes that open transfers may still bring."""
        return self.machine.promised_bytes

    @property
    def peer_bytes_max(self) -> int:
        """Memory limit of one peer for blocks that are not in the store yet."""
        return max(self.limits.peer_bytes_min, self._store.capacity_bytes // PEER_SHARE)

    def buffer(self, num_bytes: int) -> bytearray | memoryview | None:
        """Memory to receive a block into; None if memory is full. Any thread may call it."""
        return self._store.receive_buffer(num_bytes)

    def make_room(self) -> None:
        """Free memory for a block: a link waits for it."""
        self._store.keep_room(is_waited=True)

    # --- events ---

    def block(self, peer: str, block: ReceivedBlock, done: Callable[[], None]) -> None:
        """A block is complete and intact; `done` is called when it is dealt with."""
        self._take(
            on.BlockCame(
                peer,
                block.transfer_id,
                name=(block.layout_id, block.key),
                num_bytes=len(block.data),
                payload=(block, done),
                modes=block.modes,
            )
        )

    def _take(self, came: on.BlockCame) -> None:
        if self.report(came):
            came.payload[1]()

    def pull(self, pull: Pull, answer: Callable[[Message], None]) -> None:
        """Fetch missing blocks. A repetition during the fetch has no effect.

        Args:
            pull: What to fetch, and from which pool.
            answer: Called with what that pool does not have, and of a refusal. How the transfer
                ends is an event like that of any other.
        """
        is_computed = pull.ahead is Ahead.COMPUTED
        self.report(on.PullAsked(pull.source, pull.transfer_id, pull, answer, is_computed))

    def aborted(self, transfer_id: bytes, reason: str) -> None:
        """A gateway gives a transfer up."""
        self.report(on.GivenUp("", transfer_id, reason=reason))

    def release(self, transfer_id: bytes) -> None:
        """No request waits for the blocks of a transfer any more."""
        self.report(on.Released("", transfer_id))

    def purge(self, source: str) -> int:
        """End the open transfers from a pool; how many there were."""
        num_open = len(self.machine.open_from(source))
        self.report(on.Purged(source))
        return num_open

    def expire(self) -> None:
        """End transfers that are open, or wait for their peer, for too long."""
        self.report(on.Ticked())

    # --- actions ---

    def _send(self, peer: str, message: Message) -> None:
        channel = self.channel_of(peer)
        if channel is not None:
            channel.send(message)

    def _check_ticket(self, action: do.CheckTicket) -> None:
        request: Offer | Pull = action.request
        peer, transfer_id = action.peer, action.transfer_id
        try:
            if self._store.is_barred(received(peer, transfer_id, is_inherited=False)):
                why = f"what came from {peer} is being dropped; it is accepted again soon"
                error = TicketRefusedError(TicketRefusal.PURGING, why)
                self._tickets.refused(DESTINATION, transfer_id, error)
                raise error
            grant = self._tickets.to_receive(
                request.ticket,
                request.blocks,
                transfer_id=transfer_id,
                source=peer,
                layouts={engine.layout.layout_id for engine in self._engines.values()},
                free_bytes=self._store.capacity_bytes - self.promised_bytes,
            )
        except TicketRefusedError as error:
            reason = error.reason
            self.report(on.NotGranted(peer, transfer_id, reason=reason, asker=action.asker))
            return
        ticket, lacking = grant.ticket, None
        if isinstance(request, Pull):
            keys, layout_id = dict.fromkeys(keys_of(request.keys)), ticket.layout_id
            lacking = tuple(key for key in keys if (layout_id, key) not in self._store)
        self.report(
            on.Granted(
                peer,
                transfer_id,
                ticket=ticket,
                named=grant.named,
                lifetime_ns=grant.lifetime_ns,
                lacking=lacking,
                request=request,
                asker=action.asker,
            )
        )

    def _record_refusal(self, action: do.RecordRefusal) -> None:
        self._tickets.refused(DESTINATION, action.transfer_id, action.error)

    def _accept(self, action: do.Accept) -> None:
        self._send(action.peer, Accepted(transfer_id=action.transfer_id))

    def _refuse(self, action: do.Refuse) -> None:
        self._send(action.peer, Refused(transfer_id=action.transfer_id, reason=action.reason))

    def _tell_abort(self, action: do.TellAbort) -> None:
        transfer_id, kind, reason = action.transfer_id, action.kind, action.reason
        self._send(action.peer, Abort(transfer_id=transfer_id, kind=kind, reason=reason))

    def _acknowledge(self, action: do.Acknowledge) -> None:
        channel = self.channel_of(action.peer)
        if channel is None:
            return
        by_layout: dict[bytes, list[BlockKey]] = {}
        for layout_id, key in action.names:
            by_layout.setdefault(layout_id, []).append(key)
        for layout_id, keys in by_layout.items():
            for start in range(0, len(keys), KEYS_AT_ONCE):
                part = wire_keys(keys[start : start + KEYS_AT_ONCE])
                arrived = Arrived(transfer_id=action.transfer_id, layout_id=layout_id, keys=part)
                channel.send(arrived)

    def _tell_committed(self, action: do.TellCommitted) -> None:
        self._send(action.peer, Committed(transfer_id=action.transfer_id))

    def _ask_source(self, action: do.AskSource) -> None:
        pull: Pull = action.request
        channel, transfer_id = self.channel_of(pull.source), pull.transfer_id
        if channel is None:
            lost = on.GivenUp("", transfer_id, kind=TransferEnd.LINK_LOST, reason="link_down")
            self.report(lost)
            return
        channel.send(
            Pull(
                transfer_id=transfer_id,
                source=pull.source,
                keys=wire_keys(action.lacking),
                ticket=pull.ticket,
                blocks=pull.blocks,
                ahead=pull.ahead,
            )
        )

    def _tell_computed(self, action: do.TellComputed) -> None:
        self._send(action.peer, all_computed(action.transfer_id, action.peer))

    def _answer_missing(self, action: do.AnswerMissing) -> None:
        action.asker(Missing(transfer_id=action.transfer_id, keys=wire_keys(action.keys)))

    def _answer_refused(self, action: do.AnswerRefused) -> None:
        action.asker(Refused(transfer_id=action.transfer_id, reason=action.reason))

    def _keep(self, action: do.Keep) -> None:
        block: ReceivedBlock = action.payload[0]
        peer, transfer_id, num_bytes = action.peer, block.transfer_id, len(block.data)
        born_s = born_in(block.age, self._wall_s())
        tenant, is_inherited = tag_in(action.ticket.tenant), block.is_inherited
        origin = received(peer, transfer_id, tenant, born_s, is_inherited=is_inherited)
        failure = None
        if self._store.is_barred(origin):
            failure = TransferEnd.PURGED
        elif not self._store.put(
            block.layout_id,
            block.key,
            block.data,
            block.digest,
            origin,
            action.lease_until_ns,
            is_copy=action.is_pulled and peer in self._hosts,
        ):
            failure = TransferEnd.NO_ROOM
        else:
            self._metrics.link_bytes.labels(peer=peer, direction="received").inc(num_bytes)
            if (moved := self._metrics.moved) is not None:
                moved.add("received", peer, transfer_id, link_bytes=num_bytes)
        name = block.layout_id, block.key
        stored = on.BlockKept(peer, transfer_id, name=name, num_bytes=num_bytes, failure=failure)
        self.report(stored)

    def _redeliver(self, action: do.Redeliver) -> None:
        for came in action.blocks:
            self._take(came)

    def _let_go(self, action: do.LetGo) -> None:
        for _, done in action.payloads:
            done()

    def _end_leases(self, action: do.EndLeases) -> None:
        for name in action.names:
            self._store.release(name)

    def _count_dropped(self, action: do.CountDropped) -> None:
        self._metrics.blocks_dropped.labels(reason=action.reason).inc()

    def _make_room(self, _action: do.MakeRoom) -> None:
        self._store.keep_room()

    def _ended(self, action: do.Ended) -> None:
        for _, assembly in self.links.values():
            assembly.forget(action.transfer.transfer_id)
        self._on_ended(action.transfer)


_METHODS = methods_of(InboundTransfers, do.RECEIVED)
