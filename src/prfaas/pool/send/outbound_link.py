"""The transfers of a link at its sending end, and their messages.

A transfer outlives its connections (`dialer.py`): what the peer has not said to have goes again
when the link is back, and only when it stays away for longer than the grace time are transfers
given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.kv.blocks import HASH_BYTES, BlockKey, BlockName
from prfaas.core.kv.shipping import NamedBlocks
from prfaas.core.transfer.link_encryption import LinkEncryption, offered
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock, TenantShare
from prfaas.core.transfer.residency import Regions
from prfaas.core.transfer.tickets import TicketRefusedError
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd, TransferEvent, TransferState
from prfaas.errors import PeerError
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.send.dialer import Dialer
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.pool.send.send_limits import DEFAULTS, SendLimits
from prfaas.pool.send.send_queue import SendQueue
from prfaas.pool.store.origins import Matches
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.pool.tickets.ticket_checks import Grant, oversized, unnamed
from prfaas.wire.allow_list import AllowList
from prfaas.wire.channel import Channel
from prfaas.wire.frames import Frame
from prfaas.wire.identity import LinkContexts
from prfaas.wire.messages.base import Goodbye, Ping, Pong, Unsupported
from prfaas.wire.messages.codec import ToSender, decode, tags_of
from prfaas.wire.messages.fields import keys_of, wire_keys
from prfaas.wire.messages.gateway import LinkTelemetry
from prfaas.wire.messages.link import (
    Abort,
    Accepted,
    Arrived,
    Commit,
    Committed,
    Connections,
    Decodes,
    Offer,
    PoolHello,
    Pull,
    Refused,
    Resumed,
)
from prfaas.wire.regions import peer_regions


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A transfer and its blocks."""

    transfer: Transfer
    sealed: bytes
    """Its ticket."""
    named: NamedBlocks
    """The blocks that its ticket allows."""
    tenant: TenantShare
    quality: Quality = Quality.LOSSLESS
    blocks: dict[BlockName, StoredBlock] = field(default_factory=dict)
    """Pushed and not known to have arrived; pinned."""
    names: set[BlockName] = field(default_factory=set)
    """All that were pushed."""
    pushed_bytes: int = 0
    missing: list[BlockKey] = field(default_factory=list)
    """Blocks that the peer requested and that are missing here."""

    @property
    def is_finished(self) -> bool:
        """Return True if nothing more will be pushed."""
        return self.transfer.state is TransferState.SENT


class OutboundLink:
    """Pushes the blocks of transfers to one peer.

    Blocks are pinned in the store from the moment they are queued until the peer has them or their
    transfer ends.

    Args:
        epoch: Our event epoch, for the hello.
        peer: Name of the other pool; its certificate has to have this name.
        address: Its host and port.
        io: Where the data connections live.
        on_change: Called when the link comes up or goes down.
        on_ended: Called once for every transfer that ended here.
        on_over: Called for a transfer that was aborted because its ticket does not allow a block.
        on_pull: Called with this link and the blocks that the peer requests.
        grace_ns: How long transfers wait for a link that broke.
        budget_bits_per_s: What all data connections together may send; 0 is no limit.
        connections: Data connections; 0 is as many as budget and round trip ask for.
        codec: When blocks are coded.
        layouts: What engines announced; blocks of others go raw.
        encryption: Protection of the data connections.
        limits: Of the data connections.
        on_met: Called with the regions in the peer's certificate; True if they have changed.
        prove: Called with the name and the certificate of the peer; see `AllowList`.
    """

    def __init__(
        self,
        *,
        pool: str,
        epoch: str,
        peer: str,
        address: tuple[str, int],
        tls: LinkContexts,
        metrics: PoolMetrics,
        io: IoThread,
        on_change: Callable[[], None],
        on_ended: Callable[[Transfer], None],
        clock_ns: Callable[[], int],
        on_over: Callable[[Transfer, TicketRefusedError], None],
        on_pull: Callable[[OutboundLink, Pull], None],
        grace_ns: int,
        budget_bits_per_s: int = 0,
        connections: int = 0,
        codec: LinkCodec = LinkCodec.RAW,
        layouts: KnownLayouts | None = None,
        encryption: LinkEncryption = LinkEncryption.TLS,
        limits: SendLimits = DEFAULTS,
        on_met: Callable[[str, Regions], bool] = lambda *_: False,
        prove: Callable[[str, bytes | None], object] = lambda *_: None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.peer = peer
        self._pool = pool
        self._epoch = epoch
        self._on_change = on_change
        self._on_ended = on_ended
        self._clock_ns = clock_ns
        self._on_over = on_over
        self._on_pull, self._on_met = on_pull, on_met
        self._grace_ns = grace_ns
        self._encryptions = offered(encryption)
        self._peer_epoch = ""
        self._down_since_ns: int | None = -grace_ns
        """Time since which the link has been reported as down, ns; None while it is up."""
        self._transfers: dict[bytes, _Outgoing] = {}
        self._moved = metrics.moved
        self._link_bytes = metrics.link_bytes.labels(peer=peer, direction="sent")
        self._checkpoint_bytes = metrics.checkpoint_bytes
        self._queue = SendQueue(self._taken, clock_ns)
        self._coding = LinkCoding(codec, layouts or KnownLayouts(), peer, metrics, wall_s=wall_s)
        self._dialer = Dialer(
            self,
            pool=pool,
            peer=peer,
            address=address,
            tls=tls,
            metrics=metrics,
            io=io,
            queue=self._queue,
            coding=self._coding,
            clock_ns=clock_ns,
            budget_bits_per_s=budget_bits_per_s,
            connections=connections,
            limits=limits,
            expected=AllowList({peer}, prove),
        )

    # --- requests of the node ---

    @property
    def is_up(self) -> bool:
        """Return True if blocks can be sent to the peer, and it is the expected one."""
        return self._dialer.is_up

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    @property
    def open_arrived_bytes(self) -> int:
        """Blocks of open transfers that the peer has."""
        return sum(outgoing.transfer.num_bytes for outgoing in self._transfers.values())

    @property
    def telemetry(self) -> LinkTelemetry:
        """Latest measurements."""
        return self._dialer.telemetry

    def limit(self, bits_per_s: int, idle_bits_per_s: int) -> None:
        """Send no more than that from now on, over all data connections together.

        Args:
            bits_per_s: Limit of the rate.
            idle_bits_per_s: Limit that an idle link would have with something to send.
        """
        self._dialer.limit(bits_per_s, idle_bits_per_s)

    def set_budget(self, bits_per_s: int) -> None:
        """Change the budget of the link itself; transfers go on."""
        self._dialer.set_budget(bits_per_s)

    def seconds_to_send(self, num_bytes: int) -> float | None:
        """Expected time of a transfer of that many bytes; None if unknown."""
        return self._dialer.seconds_to_send(num_bytes)

    def open(self, grant: Grant) -> None:
        """Start a transfer; it is aborted immediately if no link is expected."""
        ticket, now = grant.ticket, self._clock_ns()
        if ticket.transfer_id in self._transfers:
            return
        transfer = Transfer(
            ticket.transfer_id,
            self.peer,
            now,
            now + grant.lifetime_ns,
            ticket.layout_id,
            ticket.bytes_max,
            trace=ticket.trace,
        )
        outgoing = self._transfers[ticket.transfer_id] = _Outgoing(
            transfer,
            grant.sealed,
            grant.named,
            TenantShare(ticket.tenant, ticket.weight, ticket.bytes_per_s),
            ticket.quality,
        )
        if not self.is_up and self._is_given_up():
            self._end(transfer, TransferEnd.LINK_LOST, "link_down")
        elif self._dialer.is_welcome:
            self._offer(outgoing)

    def push(self, transfer_id: bytes, layout_id: bytes, key: BlockKey, block: StoredBlock) -> None:
        """Queue one block; ignored if the transfer has ended or has it already."""
        outgoing = self._transfers.get(transfer_id)
        name = layout_id, key
        if outgoing is None or name in outgoing.names:
            return
        if key not in outgoing.named:
            self._beyond_ticket(outgoing.transfer, unnamed(key))
            return
        outgoing.pushed_bytes += len(block.data)
        if outgoing.pushed_bytes > outgoing.transfer.bytes_max:
            self._beyond_ticket(outgoing.transfer, oversized(outgoing.transfer))
            return
        block.pins += 1
        outgoing.names.add(name)
        outgoing.blocks[name] = block
        is_inherited = bool(block.origin.sources)
        form = self._coding.form(outgoing.quality, layout_id, key.group, len(block.data))
        self._queue.add(
            OutgoingBlock(
                transfer_id,
                name,
                block.digest,
                block.data,
                outgoing.tenant,
                is_inherited,
                form,
                born_s=block.origin.born_s,
            )
        )

    def is_checkpoint(self, transfer_id: bytes, key: BlockKey) -> bool:
        """Return True if a transfer lists a state, and not as the last one of its group."""
        outgoing = self._transfers.get(transfer_id)
        if outgoing is None or key not in outgoing.named:
            return False
        return outgoing.named.manifest[key.group][-HASH_BYTES:] != key.block_hash

    def push_checkpoint(
        self, transfer_id: bytes, layout_id: bytes, key: BlockKey, block: StoredBlock
    ) -> None:
        """Queue an intermediate state behind its attention blocks, if the link has room for it.

        It has none while another transfer has anything to send: nobody waits for a checkpoint.
        """
        has_room = not self._queue.queued_beside(transfer_id)
        outcome = "sent" if has_room else "withheld"
        self._checkpoint_bytes.labels(peer=self.peer, outcome=outcome).inc(len(block.data))
        if has_room:
            self.push(transfer_id, layout_id, key, block)

    def finish(self, transfer_id: bytes, missing: Iterable[BlockKey] = ()) -> None:
        """Close the list of blocks: the peer commits once all have arrived.

        Args:
            missing: Requested blocks that are missing here.
        """
        outgoing = self._transfers.get(transfer_id)
        if outgoing is not None and outgoing.transfer.apply(TransferEvent.SEND):
            outgoing.missing = list(missing)
            outgoing.transfer.num_missing = len(outgoing.missing)
            self._queue.finish(transfer_id)
            if self._dialer.is_welcome:
                self._announce_end(outgoing)

    def has(self, transfer_id: bytes) -> bool:
        """Return True if this transfer is open here."""
        return transfer_id in self._transfers

    def refuse(self, transfer_id: bytes, reason: str) -> None:
        """Report to the peer that its requested blocks will not be sent."""
        self._dialer.send(Refused(transfer_id=transfer_id, reason=reason))

    def abort(
        self, transfer_id: bytes, kind: TransferEnd, reason: str = "", *, tell_peer: bool
    ) -> None:
        """Give a transfer up; harmless if it has ended."""
        outgoing = self._transfers.get(transfer_id)
        if outgoing is None:
            return
        if tell_peer:
            self._dialer.send(Abort(transfer_id=transfer_id, kind=kind, reason=reason))
        self._end(outgoing.transfer, kind, reason)

    def purge(self, matches: Matches) -> int:
        """Give up transfers that have a block of such an origin to send; how many there were."""
        found = [
            transfer_id
            for transfer_id, outgoing in self._transfers.items()
            if any(matches(block.origin) for block in outgoing.blocks.values())
        ]
        for transfer_id in found:
            self.abort(transfer_id, TransferEnd.PURGED, tell_peer=True)
        return len(found)

    def expire(self) -> None:
        """End transfers that are open, or wait for the link, for too long."""
        now = self._clock_ns()
        for outgoing in list(self._transfers.values()):
            if now >= outgoing.transfer.deadline_ns:
                self._end(outgoing.transfer, TransferEnd.EXPIRED, "lifetime")
        if not self.is_up and self._is_given_up():
            self._give_up(TransferEnd.LINK_LOST)

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        await self._dialer.run()

    # --- callbacks of the connections ---

    def met(self, channel: Channel) -> None:
        """End open transfers if the peer's certificate names other regions than before."""
        if self._on_met(self.peer, peer_regions(channel.ssl_object)):
            self._give_up(TransferEnd.LINK_LOST)

    def hello(self, link: str) -> PoolHello:
        """First message of a new connection."""
        resumes = list(self._transfers)
        return PoolHello(
            pool=self._pool,
            epoch=self._epoch,
            resumes=resumes,
            link=link,
            codecs=self._coding.offered,
            encryptions=self._encryptions,
            takes=tags_of(ToSender),
        )

    def on_state(self) -> None:
        """The link came up or went down."""
        self._down_since_ns = None if self.is_up else self._clock_ns()
        self._on_change()
        self.expire()

    def on_report(self) -> None:
        """Handle a new measurement of a busy link."""
        self._on_change()

    def end(self) -> None:
        """End all transfers: the peer may not have more."""
        self._give_up(TransferEnd.LINK_LOST)

    def _is_given_up(self) -> bool:
        since_ns = self._down_since_ns
        return since_ns is not None and self._clock_ns() - since_ns >= self._grace_ns

    def _taken(self, fragment: Fragment) -> None:
        """Count a fragment that goes out. On a lane."""
        transfer_id, num_bytes = fragment.block.transfer_id, fragment.block_bytes
        self._link_bytes.inc(num_bytes)
        if self._moved.is_on:
            self._moved.add("sent", self.peer, transfer_id, link_bytes=num_bytes)

    # --- messages of the peer ---

    def on_frame(self, channel: Channel, frame: Frame) -> None:
        """Handle a message of the peer."""
        message = decode(frame.payload)
        match message:
            case Ping() | Unsupported():
                return
            case Goodbye():
                self._dialer.refused(message.reason)
                channel.close(message.reason)
            case Pong():
                self._dialer.heard(message)
            case Resumed():
                self._resume(message)
            case Connections():
                self._dialer.allowed(message.num_max)
            case Decodes():
                self._coding.agree(message.codecs)
            case Arrived():
                for key in keys_of(message.keys):
                    self._arrived(message.transfer_id, (message.layout_id, key))
            case Pull():
                self._on_pull(self, message)
            case Accepted() | Refused() | Committed() | Abort():
                self._on_progress(message)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning on a link")

    def _on_progress(self, message: Accepted | Refused | Committed | Abort) -> None:
        match message:
            case Accepted():
                self._answered(message.transfer_id, TransferEvent.ACCEPT)
            case Refused():
                self._answered(message.transfer_id, TransferEnd.REFUSED, message.reason)
            case Committed():
                self._committed(message.transfer_id)
            case Abort():
                self.abort(message.transfer_id, message.kind, message.reason, tell_peer=False)

    def _resume(self, resumed: Resumed) -> None:
        """Continue with the blocks that the peer does not have."""
        if resumed.encryption and resumed.encryption not in self._encryptions:
            raise PeerError(f"{self.peer} selects protection {resumed.encryption!r}, not offered")
        if self._peer_epoch not in ("", resumed.epoch):
            self._give_up(TransferEnd.PEER_RESTARTED)
        self._peer_epoch = resumed.epoch
        self._coding.takes_ages = resumed.takes_ages
        self._dialer.welcomed(resumed)
        for outgoing in self._transfers.values():
            self._offer(outgoing)
            if outgoing.is_finished:
                self._announce_end(outgoing)

    def _offer(self, outgoing: _Outgoing) -> None:
        self._dialer.send(
            Offer(
                transfer_id=outgoing.transfer.transfer_id,
                ticket=outgoing.sealed,
                blocks=dict(outgoing.named.manifest),
            )
        )

    def _answered(
        self, transfer_id: bytes, event: TransferEvent | TransferEnd, reason: str = ""
    ) -> None:
        outgoing = self._transfers.get(transfer_id)
        if outgoing is not None:
            self._end(outgoing.transfer, event, reason)

    def _arrived(self, transfer_id: bytes, name: BlockName) -> None:
        outgoing = self._transfers.get(transfer_id)
        block = outgoing.blocks.pop(name, None) if outgoing is not None else None
        if outgoing is None or block is None:
            return
        block.pins -= 1
        self._queue.arrived(transfer_id, name)
        outgoing.transfer.moved(len(block.data), self._clock_ns())

    def _committed(self, transfer_id: bytes) -> None:
        outgoing = self._transfers.get(transfer_id)
        if outgoing is None:
            return
        if not outgoing.is_finished:
            raise PeerError(f"transfer {transfer_id.hex()} is committed before it is complete")
        # What the peer said of its last blocks may be lost with a connection that broke.
        for name in list(outgoing.blocks):
            self._arrived(transfer_id, name)
        self._end(outgoing.transfer, TransferEnd.COMMITTED)

    def _announce_end(self, outgoing: _Outgoing) -> None:
        transfer_id = outgoing.transfer.transfer_id
        num_blocks, missing = len(outgoing.names), wire_keys(outgoing.missing)
        self._dialer.send(Commit(transfer_id=transfer_id, num_blocks=num_blocks, missing=missing))

    # --- ends ---

    def _beyond_ticket(self, transfer: Transfer, error: TicketRefusedError) -> None:
        """The engine pushes blocks that the gateway did not allow."""
        reason = error.reason.value
        refused = TransferEnd.REFUSED
        self._dialer.send(Abort(transfer_id=transfer.transfer_id, kind=refused, reason=reason))
        self._on_over(transfer, error)
        self._end(transfer, refused, reason)

    def _give_up(self, kind: TransferEnd) -> None:
        for transfer_id in list(self._transfers):
            self.abort(transfer_id, kind, tell_peer=True)

    def _end(
        self, transfer: Transfer, event: TransferEvent | TransferEnd, detail: str = ""
    ) -> None:
        if not transfer.apply(event, detail) or transfer.is_open:
            return
        outgoing = self._transfers.pop(transfer.transfer_id)
        self._queue.drop(transfer.transfer_id)
        for block in outgoing.blocks.values():
            block.pins -= 1
        self._on_ended(transfer)
