"""Pulls: a pool fetches blocks by name from another one that keeps a link to it.

    gateway or engine ──Pull──► destination ──Pull──► source
                                destination ◄──Offer, blocks, Commit── source
    gateway or engine ◄─Missing or Refused─ destination

With `Ahead.COMPUTING` the source sends blocks as an engine stores them (`send/ahead.py`), until the
asker's second message, which takes the same path. The destination repeats it when a broken link is
back, since it may be lost with the old connection.

From the offer on a pull is a transfer like any other: ticket, budget, digests, resume. The request
travels against the direction of the link, so nothing has to be dialled, and no port opened, for it.
"""

from __future__ import annotations

from collections.abc import Callable

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.tickets import TicketRefusedError
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import TransferError
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.pool.send.block_sender import Sending
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.tickets.ticket_checks import TicketChecks
from prfaas.wire.channel import Channel
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import keys_of, wire_keys
from prfaas.wire.messages.link import Ahead, Missing, Pull, Refused, all_computed


class Pulls:
    """Both ends of pulls.

    Args:
        sending: Sends blocks of this pool.
        inbound: Knows what this pool waits for.
        tickets: Check what this pool is asked to send.
        channel_of: The connection for messages from a source; None while it has no link to us.
    """

    def __init__(
        self,
        sending: Sending,
        inbound: InboundTransfers,
        tickets: TicketChecks,
        channel_of: Callable[[str], Channel | None],
    ) -> None:
        self._sending = sending
        self._inbound = inbound
        self._tickets = tickets
        self._channel_of = channel_of
        self._askers: dict[bytes, Callable[[Message], None]] = {}
        self._computed: set[bytes] = set()
        """Open pulls whose second message has come."""

    # --- the destination ---

    def fetch(self, pull: Pull, answer: Callable[[Message], None]) -> None:
        """Fetch missing blocks. A repetition during the fetch has no effect.

        Args:
            pull: What to fetch, and from which pool.
            answer: Called with what that pool does not have, and of a refusal. How the transfer
                ends is an event like that of any other.
        """
        channel = self._channel_of(pull.source)
        if self._inbound.is_open(pull.transfer_id):
            if pull.ahead is Ahead.COMPUTED:
                self._computed.add(pull.transfer_id)
                if channel is not None:
                    channel.send(all_computed(pull.transfer_id, pull.source))
            return
        if pull.ahead is Ahead.COMPUTED:
            return
        self._askers[pull.transfer_id] = answer
        try:
            lacking = self._inbound.expect(pull)
        except TicketRefusedError as error:
            self._askers.pop(pull.transfer_id)
            answer(Refused(transfer_id=pull.transfer_id, reason=error.reason.value))
            return
        except TransferError as error:
            self._askers.pop(pull.transfer_id)
            answer(Refused(transfer_id=pull.transfer_id, reason=str(error)))
            return
        if channel is None:
            self._inbound.aborted(pull.transfer_id, "link_down", TransferEnd.LINK_LOST)
        elif lacking:
            channel.send(
                Pull(
                    transfer_id=pull.transfer_id,
                    source=pull.source,
                    keys=wire_keys(lacking),
                    ticket=pull.ticket,
                    blocks=pull.blocks,
                    ahead=pull.ahead,
                )
            )

    def missing(self, transfer_id: bytes, keys: list[BlockKey]) -> None:
        """Handle the source's list of missing blocks."""
        answer = self._askers.get(transfer_id)
        if answer is not None:
            answer(Missing(transfer_id=transfer_id, keys=wire_keys(keys)))

    def refused(self, message: Refused, source: str) -> None:
        """The source will not serve this pull."""
        answer = self._askers.get(message.transfer_id)
        if self._inbound.refused_by(message.transfer_id, source, message.reason) and answer:
            answer(message)

    def resumed(self, transfer_id: bytes, channel: Channel) -> None:
        """Repeat the second message of an open pull to its source, which is connected again."""
        if transfer_id in self._computed:
            channel.send(all_computed(transfer_id, channel.peer))

    def ended(self, transfer_id: bytes) -> None:
        """A transfer is over."""
        self._askers.pop(transfer_id, None)
        self._computed.discard(transfer_id)

    # --- the source ---

    def sent(self, transfer_id: bytes) -> None:
        """A transfer from here is over."""
        self._sending.ended(transfer_id)

    def serve(self, link: OutboundLink, pull: Pull) -> None:
        """Send requested blocks to a peer, and report missing ones."""
        if pull.ahead is Ahead.COMPUTED:
            self._sending.computed(pull.transfer_id)
            return
        if link.has(pull.transfer_id):
            return
        try:
            grant = self._tickets.to_send(
                pull.ticket,
                pull.blocks,
                transfer_id=pull.transfer_id,
                destination=link.peer,
                layout_id=None,
            )
        except TicketRefusedError as error:
            link.refuse(pull.transfer_id, error.reason.value)
            return
        link.open(grant)
        keys = dict.fromkeys(keys_of(pull.keys))
        layout_id = grant.ticket.layout_id
        if pull.ahead is Ahead.COMPUTING:
            self._sending.start_ahead(link, pull.transfer_id, layout_id, keys)
        else:
            self._sending.start(link, pull.transfer_id, layout_id, keys, tell_missing=True)
