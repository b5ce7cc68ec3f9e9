"""Transfers that arrive at this pool: what the machine of `core/transfer/receiver.py` decides.

Pulls fetch blocks by name from another pool, which keeps a link to this one:

    gateway or engine ──Pull──► destination ──Pull──► source
                                destination ◄──Offer, blocks, Commit── source
    gateway or engine ◄─Missing or Refused─ destination

With `Ahead.COMPUTING` the source sends blocks as an engine stores them (`send/block_sender.py`),
until the asker's second message, which takes the same path. It is repeated when a broken link is
back, since it may be lost with the old connection. From the offer on a pull is a transfer like any
other. The request travels against the direction of the link: no port has to be opened for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.cache.eviction import born_in
from prfaas.core.facts import FactStream
from prfaas.core.invariants import check_invariants
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.tenant_salts import tag_in
from prfaas.core.transfer import actions as do
from prfaas.core.transfer import events as on
from prfaas.core.transfer.facts import RECEIVED, TransferDone
from prfaas.core.transfer.receiver import Receiver
from prfaas.core.transfer.residency import Regions
from prfaas.core.transfer.tickets import TicketRefusal, TicketRefusedError
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.pool.net.link_end import LinkEnd
from prfaas.pool.receive.block_assembly import Assembly
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.origins import received
from prfaas.pool.tickets.ticket_checks import DESTINATION, TicketChecks
from prfaas.records import methods_of
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


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """Limits of the receiving end of a link."""

    transfers_max: int = 10_000
    """Transfers known at once. Ended ones make room for new ones; where all are open, new ones are
    refused."""
    peer_bytes_min: int = 64 << 20
    """Memory that the unfinished blocks of a peer may take in any case, bytes."""
    unfinished_blocks_max: int = 16_384
    """Unfinished blocks of a peer. A sender starts the next block when it has handed out all
    fragments of the one before; each fragment that a slow connection still holds, in its window or
    in the buffers at either end, leaves a block unfinished. With fragments of 32 KiB the default is
    half a gigabyte of them."""
    turn_bytes: int = 512 << 10
    """Bytes that a data connection reads before the others are served."""
    connections_max: int = 1024
    """Data connections over all peers. Each link may have an equal part of them, at least one, and
    is told how many (`Connections`)."""


DEFAULTS = ReceiveLimits()


class PeerChannels:
    """Connections for messages, of pools and gateways."""

    def __init__(self) -> None:
        self.tasks: dict[Channel, asyncio.Task[None]] = {}
        """The task that serves each of them, and keeps it alive."""
        self.from_sources: set[Channel] = set()
        """Those of pools that may push."""

    def of(self, peer: str) -> Channel | None:
        """The connection of a peer; None without one."""
        return next((c for c in self.tasks if c.peer == peer and c.is_open), None)

    def is_connected(self, source: str) -> bool:
        """Return True if a link from the pool `source` stands."""
        return any(channel.peer == source and channel.is_open for channel in self.from_sources)

    def send(self, peer: str, message: Message) -> bool:
        """Send a message; False without a connection."""
        channel = self.of(peer)
        if channel is not None:
            channel.send(message)
        return channel is not None


class InboundTransfers:
    """Reports what happens to transfers that arrive, and does what the machine says.

    Args:
        store: Where blocks go.
        facts: Gets an `TransferDone` for each.
        engines: Local engines: blocks of other layouts are refused.
        limits: Limits on what peers may have this pool receive.
        hosts: Pools of other hosts of the site: what is pulled from them is a copy.
    """

    def __init__(
        self,
        end: LinkEnd,
        store: BlockStore,
        facts: FactStream,
        tickets: TicketChecks,
        engines: Mapping[str, HasLayout],
        limits: ReceiveLimits = DEFAULTS,
        hosts: Set[str] = frozenset(),
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.store, self.limits = store, limits
        self._metrics, self._facts, self._tickets = end.metrics, facts, tickets
        self._engines, self._hosts = engines, hosts
        self._clock_ns, self._wall_s = time.monotonic_ns, wall_s
        self.machine = Receiver(limits.transfers_max, self.peer_bytes_max, end.grace_ns)
        self.known = self.machine.known
        self.channels = PeerChannels()
        self.links: dict[str, tuple[str, Assembly]] = {}
        """By peer: the word of its present link, and its unfinished blocks."""

    def validate(self) -> None:
        """Check what has to hold between two events; AssertionError if it does not."""
        self.machine.validate()
        are_known = self.channels.from_sources <= self.channels.tasks.keys()
        check_invariants([("connections of sources are connections", are_known)])

    def report(self, event: on.TransferInput) -> bool:
        """Report what happened, and do what follows; return False if nothing does."""
        actions = self.machine.step(event, self._clock_ns())
        for action in actions:
            _METHODS[type(action)](self, action)
        return bool(actions)

    # --- questions ---

    def is_on_its_way(self, transfer_id: bytes, source: str) -> bool:
        """Return True if a block that is not here may still come with this transfer.

        One that nobody has announced yet is in transit only while the link stands.
        """
        known = self.known.get(transfer_id)
        return self.channels.is_connected(source) if known is None else known.is_open

    @property
    def peer_bytes_max(self) -> int:
        """Memory limit of one peer for blocks that are not in the store yet."""
        return max(self.limits.peer_bytes_min, self.store.room.capacity_bytes // PEER_SHARE)

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
        num_open = len(self.known.open_from(source))
        self.report(on.PeerLost(source, kind=TransferEnd.PURGED))
        return num_open

    def met(self, peer: str, regions: Regions) -> None:
        """A pool that may push has connected: if its certificate names other regions than before,
        what is open with it ends."""
        if self._tickets.met(peer, regions):
            self.report(on.PeerLost(peer))

    def expire(self) -> None:
        """End transfers that are open, or wait for their peer, for too long."""
        self.report(on.Ticked())

    # --- actions ---

    def _check_ticket(self, action: do.CheckTicket) -> None:
        request: Offer | Pull = action.request
        peer, transfer_id = action.peer, action.transfer_id
        try:
            if not self.store.rules.may_keep(received(peer, transfer_id, is_inherited=False)):
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
                free_bytes=self.store.room.capacity_bytes - self.known.promised_bytes,
            )
        except TicketRefusedError as error:
            reason = error.reason
            self.report(on.NotGranted(peer, transfer_id, reason=reason, asker=action.asker))
            return
        ticket, lacking = grant.ticket, None
        if isinstance(request, Pull):
            keys, layout_id = dict.fromkeys(keys_of(request.keys)), ticket.layout_id
            lacking = tuple(key for key in keys if (layout_id, key) not in self.store)
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

    def _tell(self, action: do.Tell) -> None:
        transfer_id, reason = action.transfer_id, action.reason
        message: Message
        match action.news:
            case do.PeerNews.ACCEPTED:
                message = Accepted(transfer_id=transfer_id)
            case do.PeerNews.REFUSED:
                message = Refused(transfer_id=transfer_id, reason=reason)
            case do.PeerNews.COMPUTED:
                message = all_computed(transfer_id, action.peer)
            case do.PeerNews.COMMITTED:
                message = Committed(transfer_id=transfer_id)
            case do.PeerNews.ABORTED:
                message = Abort(transfer_id=transfer_id, kind=action.kind, reason=reason)
        self.channels.send(action.peer, message)

    def _acknowledge(self, action: do.Acknowledge) -> None:
        channel = self.channels.of(action.peer)
        if channel is None:
            return
        layout_id, keys = action.names[0][0], [key for _, key in action.names]
        for start in range(0, len(keys), KEYS_AT_ONCE):
            part = wire_keys(keys[start : start + KEYS_AT_ONCE])
            channel.send(Arrived(transfer_id=action.transfer_id, layout_id=layout_id, keys=part))

    def _ask_source(self, action: do.AskSource) -> None:
        pull: Pull = action.request
        transfer_id = pull.transfer_id
        asked = Pull(
            transfer_id=transfer_id,
            source=pull.source,
            keys=wire_keys(action.lacking),
            ticket=pull.ticket,
            blocks=pull.blocks,
            ahead=pull.ahead,
        )
        if not self.channels.send(pull.source, asked):
            lost = on.GivenUp("", transfer_id, kind=TransferEnd.LINK_LOST, reason="link_down")
            self.report(lost)

    def _answer(self, action: do.Answer) -> None:
        transfer_id, keys = action.transfer_id, wire_keys(action.missing)
        if action.refusal:
            action.asker(Refused(transfer_id=transfer_id, reason=action.refusal))
        else:
            action.asker(Missing(transfer_id=transfer_id, keys=keys))

    def _keep(self, action: do.Keep) -> None:
        block: ReceivedBlock = action.payload[0]
        peer, transfer_id, num_bytes = action.peer, block.transfer_id, len(block.data)
        born_s = born_in(block.age, self._wall_s())
        tenant, is_inherited = tag_in(action.ticket.tenant), block.is_inherited
        origin = received(peer, transfer_id, tenant, born_s, is_inherited=is_inherited)
        failure = None
        if not self.store.rules.may_keep(origin):
            failure = TransferEnd.PURGED
        elif not self.store.put(
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
            self.store.release(name)

    def _count_dropped(self, action: do.CountDropped) -> None:
        self._metrics.blocks_dropped.labels(reason=action.reason).inc()

    def _make_room(self, _action: do.MakeRoom) -> None:
        self.store.room.keep_room()

    def _ended(self, action: do.Ended) -> None:
        for _, assembly in self.links.values():
            assembly.forget(action.transfer.transfer_id)
        self._facts.report(TransferDone(RECEIVED, action.transfer, self._clock_ns()))


_METHODS = methods_of(InboundTransfers, do.RECEIVED)
