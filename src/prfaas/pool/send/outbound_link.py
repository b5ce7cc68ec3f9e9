"""The transfers of a link at its sending end, and their messages.

A transfer outlives its connections (`dialer.py`): what the peer has not said to have goes again
when the link is back, and only when it stays away for longer than the grace time are transfers
given up.

`SiteShare` divides what the node may send among its links to other sites.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from prfaas.core.cache.keep_rules import Matches
from prfaas.core.facts import FactStream
from prfaas.core.invariants import check_invariants
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer import actions as do
from prfaas.core.transfer import events as on
from prfaas.core.transfer.facts import SENT, TransferDone
from prfaas.core.transfer.link_scheduler import OutgoingBlock
from prfaas.core.transfer.sender import Sender
from prfaas.core.transfer.site_budget import HeldLeases, Lease, allocate, demand
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import PeerError
from prfaas.pool.net.link_end import Destination, LinkEnd
from prfaas.pool.send.data_sender import SendQueue
from prfaas.pool.send.dialer import Dialer
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.pool.send.link_control import LinkControl
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.pool.tickets.ticket_checks import SOURCE, Grant, TicketChecks
from prfaas.records import methods_of
from prfaas.wire.identity import LinkContexts
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import LinkTelemetry
from prfaas.wire.messages.link import Abort, Commit, Offer, Pull, Refused


class Serves(Protocol):
    """Sends what peers request."""

    def serve(self, link: OutboundLink, pull: Pull) -> None:
        """Send requested blocks over a link, and report missing ones."""


class OutboundLink:
    """Pushes the blocks of transfers to one peer.

    Blocks are pinned in the store from the moment they are queued until the peer has them or their
    transfer ends.

    Args:
        tls: Our identity when we dial.
        coding: When blocks are coded, and how.
        tickets: Count blocks that a ticket does not allow, and know the regions of peers.
        serves: Sends the blocks that the peer requests.
        facts: Gets an `TransferDone` for each, and `LinksChanged` when the link has changed.
    """

    def __init__(
        self,
        end: LinkEnd,
        to: Destination,
        tls: LinkContexts,
        coding: LinkCoding,
        tickets: TicketChecks,
        serves: Serves,
        facts: FactStream,
    ) -> None:
        self.peer, self.coding = to.peer, coding
        self._clock_ns, self._tickets, self._facts = time.monotonic_ns, tickets, facts
        self._serves = serves
        self._checkpoint_bytes = end.metrics.checkpoint_bytes
        self.machine = Sender(to.peer, end.grace_ns)
        self.queue = SendQueue()
        self.control = LinkControl(end, to, self.machine, self.queue, coding, facts)
        self._dialer = Dialer(self, end, to, tls, tickets, facts)

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
    def telemetry(self) -> LinkTelemetry:
        """Latest measurements."""
        return self.control.telemetry

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        await self._dialer.run()

    def validate(self) -> None:
        """Check what has to hold between two events; AssertionError if it does not."""
        self.machine.validate()
        with self.queue as share:
            check_invariants(share.invariants())

    def report(self, event: on.TransferInput) -> None:
        """Report what happened, and do what follows; PeerError if the peer broke the protocol."""
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

    def push_checkpoint(
        self, transfer_id: bytes, layout_id: bytes, key: BlockKey, block: StoredBlock
    ) -> None:
        """Queue an intermediate state behind its attention blocks, if the link has room for it.

        It has none while another transfer has anything to send: nobody waits for a checkpoint.
        """
        with self.queue as share:
            has_room = not share.queued_beside(transfer_id)
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

    def asked(self, pull: Pull) -> None:
        """Send the blocks that the peer requests."""
        self._serves.serve(self, pull)

    def end(self) -> None:
        """End all transfers: the peer may not have more."""
        self.report(on.PeerLost(self.peer))

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

    def _tell(self, action: do.Tell) -> None:
        transfer_id, kind, reason = action.transfer_id, action.kind, action.reason
        self._dialer.send(Abort(transfer_id=transfer_id, kind=kind, reason=reason))

    def _record_refusal(self, action: do.RecordRefusal) -> None:
        self._tickets.refused(SOURCE, action.transfer_id, action.error)

    def _send_block(self, action: do.SendBlock) -> None:
        ready = action.block
        block, (layout_id, key) = ready.payload, ready.name
        block.pins += 1
        self.queue.add(
            OutgoingBlock(
                ready.transfer_id,
                ready.name,
                block.digest,
                block.data,
                action.tenant,
                bool(block.origin.sources),
                self.coding.form(action.quality, layout_id, key.group, ready.num_bytes),
                born_s=block.origin.born_s,
            )
        )

    def _close_queue(self, action: do.CloseQueue) -> None:
        with self.queue as share:
            share.finish(action.transfer_id)

    def _landed(self, action: do.Landed) -> None:
        with self.queue as share:
            for block in action.blocks:
                block.payload.pins -= 1
                share.arrived(action.transfer_id, block.name)

    def _withdraw(self, action: do.Withdraw) -> None:
        with self.queue as share:
            share.drop(action.transfer_id)
        for block in action.blocks:
            block.payload.pins -= 1

    def _distrust(self, action: do.Distrust) -> None:
        raise PeerError(action.why)

    def _ended(self, action: do.Ended) -> None:
        self._facts.report(TransferDone(SENT, action.transfer, self._clock_ns()))


_METHODS = methods_of(OutboundLink, do.SENT)


class SiteShare:
    """Limits links by the lease that stands, or by an equal share of the budget.

    A link whose own budget is less than its part keeps to its own.

    Args:
        budget_bits_per_s: Of the site; 0 limits nothing.
        site: Names of the pool nodes of the site, this one included.
    """

    def __init__(
        self,
        budget_bits_per_s: int,
        site: frozenset[str],
        links: Mapping[str, OutboundLink],
    ) -> None:
        self._is_limited = budget_bits_per_s > 0
        self._leases = HeldLeases(budget_bits_per_s, len(site))
        self._site, self._links = site, links
        self.apply()

    def take(self, gateway: str, lease: Lease) -> None:
        """Follow a lease that a gateway gave."""
        if self._is_limited:
            self._leases.take(gateway, lease, time.monotonic_ns())
            self.apply()

    def apply(self) -> None:
        """Divide what the node may send now by what waits for each link."""
        if not self._is_limited:
            return
        remote = {peer: link for peer, link in self._links.items() if peer not in self._site}
        wanted = {}
        for peer, link in remote.items():
            seen = link.telemetry
            wanted[peer] = demand(seen.queued_bytes + seen.in_flight_bytes, 0)
        held = self._leases.bits_per_s(time.monotonic_ns())
        most = max(held, self._leases.equal_bits_per_s)
        idle = next((peer for peer, rate in wanted.items() if not rate), "")
        # The same for each idle link: what it would have if it asked for all.
        asking = allocate(most, wanted | {idle: float(most)})[idle] if idle else 0
        for peer, rate in allocate(held, wanted).items():
            remote[peer].control.limit(max(1, rate), max(1, asking))
