"""The transfers of a link at its sending end, and their messages.

A transfer outlives its connections (`dialer.py`): what the peer has not said to have goes again
when the link is back, and only when it stays away for longer than the grace time are transfers
given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer import actions as do
from prfaas.core.transfer import events as on
from prfaas.core.transfer.link_encryption import LinkEncryption, offered
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.core.transfer.machine import methods_of
from prfaas.core.transfer.sender import Sender
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
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
from prfaas.pool.tickets.ticket_checks import SOURCE, Grant, TicketChecks
from prfaas.wire.allow_list import AllowList, peer_regions
from prfaas.wire.channel import Channel
from prfaas.wire.frames import Frame
from prfaas.wire.identity import LinkContexts
from prfaas.wire.messages.base import Goodbye, Message, Ping, Pong, Unsupported
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


class Serves(Protocol):
    """Sends what peers request."""

    def serve(self, link: OutboundLink, pull: Pull) -> None:
        """Send requested blocks over a link, and report missing ones."""


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
        tickets: Count blocks that a ticket does not allow, and know the regions of peers.
        serves: Sends the blocks that the peer requests.
        grace_ns: How long transfers wait for a link that broke.
        budget_bits_per_s: What all data connections together may send; 0 is no limit.
        connections: Data connections; 0 is as many as budget and round trip ask for.
        codec: When blocks are coded.
        layouts: What engines announced; blocks of others go raw.
        encryption: Protection of the data connections.
        limits: Of the data connections.
        expected: Admits the peer alone.
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
        tickets: TicketChecks,
        serves: Serves,
        grace_ns: int,
        budget_bits_per_s: int = 0,
        connections: int = 0,
        codec: LinkCodec = LinkCodec.RAW,
        layouts: KnownLayouts | None = None,
        encryption: LinkEncryption = LinkEncryption.TLS,
        limits: SendLimits = DEFAULTS,
        expected: AllowList | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.peer = peer
        self._pool, self._epoch = pool, epoch
        self._on_change, self._on_ended = on_change, on_ended
        self._clock_ns, self._tickets, self._serves = clock_ns, tickets, serves
        self._encryptions = offered(encryption)
        self.machine = Sender(peer, grace_ns)
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
            expected=expected or AllowList({peer}),
        )

    # --- requests of the node ---

    @property
    def is_up(self) -> bool:
        """Return True if blocks can be sent to the peer, and it is the expected one."""
        return self._dialer.is_up

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self.machine.open)

    @property
    def open_arrived_bytes(self) -> int:
        """Blocks of open transfers that the peer has."""
        return self.machine.arrived_bytes

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

    def report(self, event: on.TransferInput) -> None:
        """Report what happened, and do what follows.

        Raises:
            PeerError: The peer broke the protocol.
        """
        for action in self.machine.step(event, self._clock_ns()):
            _METHODS[type(action)](self, action)

    def open(self, grant: Grant) -> None:
        """Start a transfer; it is aborted immediately if no link is expected."""
        ticket = grant.ticket
        self.report(
            on.Granted(
                self.peer,
                ticket.transfer_id,
                ticket=ticket,
                named=grant.named,
                lifetime_ns=grant.lifetime_ns,
                request=grant.sealed,
            )
        )

    def push(self, transfer_id: bytes, layout_id: bytes, key: BlockKey, block: StoredBlock) -> None:
        """Queue one block; ignored if the transfer has ended or has it already."""
        name, num_bytes = (layout_id, key), len(block.data)
        self.report(
            on.BlockReady(self.peer, transfer_id, name=name, num_bytes=num_bytes, payload=block)
        )

    def is_checkpoint(self, transfer_id: bytes, key: BlockKey) -> bool:
        """Return True if a transfer lists a state, and not as the last one of its group."""
        return self.machine.is_checkpoint(transfer_id, key)

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
        self.report(on.ListClosed(self.peer, transfer_id, missing=tuple(missing)))

    def has(self, transfer_id: bytes) -> bool:
        """Return True if this transfer is open here."""
        return transfer_id in self.machine.open

    def refuse(self, transfer_id: bytes, reason: str) -> None:
        """Report to the peer that its requested blocks will not be sent."""
        self._dialer.send(Refused(transfer_id=transfer_id, reason=reason))

    def abort(self, transfer_id: bytes, kind: TransferEnd, reason: str = "") -> None:
        """Give a transfer up, and tell the peer; harmless if it has ended."""
        self.report(on.GivenUp(self.peer, transfer_id, kind=kind, reason=reason))

    def purge(self, matches: Matches) -> int:
        """Give up transfers that have a block of such an origin to send; how many there were."""
        found = [
            transfer_id
            for transfer_id, outgoing in self.machine.open.items()
            if any(matches(block.payload.origin) for block in outgoing.blocks.values())
        ]
        for transfer_id in found:
            self.abort(transfer_id, TransferEnd.PURGED)
        return len(found)

    def expire(self) -> None:
        """End transfers that are open, or wait for the link, for too long."""
        self.report(on.Ticked(self.peer))

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        await self._dialer.run()

    # --- callbacks of the connections ---

    def met(self, channel: Channel) -> None:
        """End open transfers if the peer's certificate names other regions than before."""
        if self._tickets.met(self.peer, peer_regions(channel.ssl_object)):
            self.end()

    def hello(self, link: str) -> PoolHello:
        """First message of a new connection."""
        resumes = list(self.machine.open)
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
        self._on_change()
        self.report(on.LinkUp(self.peer) if self.is_up else on.LinkBroke(self.peer))

    def on_report(self) -> None:
        """Handle a new measurement of a busy link."""
        self._on_change()

    def end(self) -> None:
        """End all transfers: the peer may not have more."""
        self.report(on.PeerLost(self.peer))

    def _taken(self, fragment: Fragment) -> None:
        """Count a fragment that goes out. On a lane."""
        transfer_id, num_bytes = fragment.block.transfer_id, fragment.block_bytes
        self._link_bytes.inc(num_bytes)
        if self._moved is not None:
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
                names = tuple((message.layout_id, key) for key in keys_of(message.keys))
                self.report(on.ArrivedCame(self.peer, message.transfer_id, names=names))
            case Pull():
                self._serves.serve(self, message)
            case Accepted() | Refused() | Committed() | Abort():
                self._on_progress(message)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning on a link")

    def _on_progress(self, message: Accepted | Refused | Committed | Abort) -> None:
        match message:
            case Accepted():
                self.report(on.AcceptedCame(self.peer, message.transfer_id))
            case Refused():
                refused = on.RefusedCame(self.peer, message.transfer_id, reason=message.reason)
                self.report(refused)
            case Committed():
                self.report(on.CommittedCame(self.peer, message.transfer_id))
            case Abort():
                kind, why = message.kind, message.reason
                self.report(on.AbortCame(self.peer, message.transfer_id, kind=kind, reason=why))

    def _resume(self, resumed: Resumed) -> None:
        """Continue with the blocks that the peer does not have."""
        if resumed.encryption and resumed.encryption not in self._encryptions:
            raise PeerError(f"{self.peer} selects protection {resumed.encryption!r}, not offered")
        self._coding.takes_ages = resumed.takes_ages
        self._dialer.welcomed(resumed)
        self.report(on.LinkCame(self.peer, epoch=resumed.epoch))

    # --- actions ---

    def _send(self, message: Message) -> None:
        """Send a message about a transfer; without a welcome `LinkCame` repeats it."""
        if self._dialer.is_welcome:
            self._dialer.send(message)

    def _send_offer(self, action: do.SendOffer) -> None:
        transfer_id, blocks = action.transfer_id, dict(action.named.manifest)
        self._send(Offer(transfer_id=transfer_id, ticket=action.sealed, blocks=blocks))

    def _send_commit(self, action: do.SendCommit) -> None:
        transfer_id, missing = action.transfer_id, wire_keys(action.missing)
        num_blocks = action.num_blocks
        self._send(Commit(transfer_id=transfer_id, num_blocks=num_blocks, missing=missing))

    def _tell_abort(self, action: do.TellAbort) -> None:
        transfer_id, kind, reason = action.transfer_id, action.kind, action.reason
        self._dialer.send(Abort(transfer_id=transfer_id, kind=kind, reason=reason))

    def _record_refusal(self, action: do.RecordRefusal) -> None:
        self._tickets.refused(SOURCE, action.transfer_id, action.error)

    def _send_block(self, action: do.SendBlock) -> None:
        ready = action.block
        block, (layout_id, key) = ready.payload, ready.name
        block.pins += 1
        self._queue.add(
            OutgoingBlock(
                ready.transfer_id,
                ready.name,
                block.digest,
                block.data,
                action.tenant,
                bool(block.origin.sources),
                self._coding.form(action.quality, layout_id, key.group, ready.num_bytes),
                born_s=block.origin.born_s,
            )
        )

    def _close_queue(self, action: do.CloseQueue) -> None:
        self._queue.finish(action.transfer_id)

    def _landed(self, action: do.Landed) -> None:
        for block in action.blocks:
            block.payload.pins -= 1
            self._queue.arrived(action.transfer_id, block.name)

    def _withdraw(self, action: do.Withdraw) -> None:
        self._queue.drop(action.transfer_id)
        for block in action.blocks:
            block.payload.pins -= 1

    def _distrust(self, action: do.Distrust) -> None:
        raise PeerError(action.why)

    def _ended(self, action: do.Ended) -> None:
        self._on_ended(action.transfer)


_METHODS = methods_of(OutboundLink, do.SENT)
