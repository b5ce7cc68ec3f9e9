"""The machine of the transfers that a pool sends over one link.

How it works. It is run like the machine of the receiving end (`receiver.py`), and each transfer
goes through the same table.

    open      blocks are queued as they are ready, and are pinned until the peer has them
    listed    no more blocks will come: the peer is told how many there are
    resumed   of a link that is back, what the peer did not acknowledge goes on; offers and lists
              are repeated. A peer that has lost its state has lost all transfers with it
    end       the peer has all blocks or one of the two gave up: what is queued is withdrawn
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prfaas.core.kv.blocks import HASH_BYTES, BlockKey, BlockName
from prfaas.core.kv.shipping import NamedBlocks
from prfaas.core.transfer import actions as do
from prfaas.core.transfer import events as on
from prfaas.core.transfer.link_scheduler import TenantShare
from prfaas.core.transfer.machine import Machine
from prfaas.core.transfer.tickets import Ticket, TicketRefusal, TicketRefusedError, unnamed
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd, TransferEvent, TransferState


@dataclass(eq=False, slots=True)
class Outgoing:
    """An open transfer, and its blocks."""

    transfer: Transfer
    ticket: Ticket
    sealed: bytes
    named: NamedBlocks
    tenant: TenantShare
    blocks: dict[BlockName, on.BlockReady] = field(default_factory=dict)
    """Queued and not known to have arrived; pinned."""
    names: set[BlockName] = field(default_factory=set)
    """All that were queued."""
    num_bytes: int = 0
    missing: tuple[BlockKey, ...] = ()
    """Blocks that the peer requested and that are missing here."""


class Sender(Machine, kinds=on.SENT):
    """The transfers that a pool sends to one peer.

    Args:
        grace_ns: Wait of transfers for a link that broke. One that never was up is not waited for.
    """

    def __init__(self, peer: str, grace_ns: int) -> None:
        super().__init__()
        self.peer, self._grace_ns = peer, grace_ns
        self.open: dict[bytes, Outgoing] = {}
        """Transfers that have not ended."""
        self._epoch = ""
        self._down_since_ns: int | None = -grace_ns

    def _take(self, event: Any) -> str:
        outgoing = self.open.get(event.transfer_id)
        if outgoing is not None or type(event) in _WITHOUT:
            self._handlers[type(event)](self, outgoing, event)
        return "" if outgoing is None else outgoing.transfer.state

    @property
    def arrived_bytes(self) -> int:
        """Blocks of open transfers that the peer has."""
        return sum(outgoing.transfer.num_bytes for outgoing in self.open.values())

    def is_checkpoint(self, transfer_id: bytes, key: BlockKey) -> bool:
        """Return True if a transfer lists a state, and not as the last one of its group."""
        outgoing = self.open.get(transfer_id)
        if outgoing is None or key not in outgoing.named:
            return False
        return outgoing.named.manifest[key.group][-HASH_BYTES:] != key.block_hash

    def _invariants(self) -> Iterator[tuple[str, bool]]:
        for transfer_id, outgoing in self.open.items():
            transfer, blocks, names = outgoing.transfer, outgoing.blocks, outgoing.names
            yield "open ones are open", transfer.is_open and transfer.transfer_id == transfer_id
            yield "pinned ones were queued", blocks.keys() <= names
            yield "what is not pinned has arrived", len(blocks) + transfer.num_blocks == len(names)
            left_bytes = sum(block.num_bytes for block in blocks.values())
            yield "bytes are counted", left_bytes + transfer.num_bytes == outgoing.num_bytes
            yield "bytes keep to the ticket", outgoing.num_bytes <= transfer.bytes_max
            yield "blocks are of the ticket", all(key in outgoing.named for _, key in names)

    # --- this pool ---

    def _granted(self, known: Outgoing | None, event: Any) -> None:
        if known is not None:
            return
        ticket: Ticket = event.ticket
        transfer = Transfer(
            event.transfer_id,
            self.peer,
            self._now_ns,
            self._now_ns + event.lifetime_ns,
            ticket.layout_id,
            ticket.bytes_max,
            trace=ticket.trace,
        )
        tenant = TenantShare(ticket.tenant, ticket.weight, ticket.bytes_per_s)
        outgoing = Outgoing(transfer, ticket, event.request, event.named, tenant)
        self.open[event.transfer_id] = outgoing
        if self._is_given_up():
            self._end(outgoing, TransferEnd.LINK_LOST, "link_down")
        else:
            self._do(do.SendOffer(event.transfer_id, outgoing.sealed, outgoing.named))

    def _block_ready(self, outgoing: Outgoing, event: Any) -> None:
        layout_and_key: BlockName = event.name
        if layout_and_key in outgoing.names:
            return
        transfer, key = outgoing.transfer, layout_and_key[1]
        if key not in outgoing.named:
            self._beyond_ticket(outgoing, unnamed(key))
        elif outgoing.num_bytes + event.num_bytes > transfer.bytes_max:
            why = f"more than the {transfer.bytes_max} bytes it allows were pushed"
            self._beyond_ticket(outgoing, TicketRefusedError(TicketRefusal.OVERSIZED, why))
        else:
            outgoing.num_bytes += event.num_bytes
            outgoing.names.add(event.name)
            outgoing.blocks[event.name] = event
            self._do(do.SendBlock(event, outgoing.tenant, outgoing.ticket.quality))

    def _beyond_ticket(self, outgoing: Outgoing, error: TicketRefusedError) -> None:
        """An engine pushes blocks that the gateway did not allow."""
        self._tell_end(self.peer, outgoing.transfer.transfer_id, TransferEnd.REFUSED, error.reason)
        self._do(do.RecordRefusal(outgoing.transfer.transfer_id, error))
        self._end(outgoing, TransferEnd.REFUSED, error.reason)

    def _list_closed(self, outgoing: Outgoing, event: Any) -> None:
        transfer = outgoing.transfer
        if transfer.apply(TransferEvent.SEND):
            outgoing.missing, transfer.num_missing = event.missing, len(event.missing)
            self._do(do.CloseQueue(transfer.transfer_id), self._commit_of(outgoing))

    def _given_up(self, outgoing: Outgoing, event: Any) -> None:
        self._give_up(outgoing, event.kind, event.reason)

    # --- the peer ---

    def _accepted_came(self, outgoing: Outgoing, _event: Any) -> None:
        outgoing.transfer.apply(TransferEvent.ACCEPT)

    def _abort_came(self, outgoing: Outgoing, event: Any) -> None:
        self._end(outgoing, event.kind, event.reason)

    def _arrived_came(self, outgoing: Outgoing, event: Any) -> None:
        landed = [block for name in event.names if (block := outgoing.blocks.pop(name, None))]
        for block in landed:
            outgoing.transfer.moved(block.num_bytes, self._now_ns)
        if landed:
            self._do(do.Landed(event.transfer_id, landed))

    def _committed_came(self, outgoing: Outgoing, event: Any) -> None:
        if outgoing.transfer.state is not TransferState.SENT:
            why = f"transfer {event.transfer_id.hex()} is committed before it is complete"
            self._do(do.Distrust(why))
            return
        # What the peer said of its last blocks may be lost with a connection that broke.
        rest = on.ArrivedCame(event.peer, event.transfer_id, names=tuple(outgoing.blocks))
        self._arrived_came(outgoing, rest)
        self._end(outgoing, TransferEnd.COMMITTED)

    # --- the link ---

    def _link_came(self, _: Any, event: on.LinkCame) -> None:
        if self._epoch not in ("", event.epoch):
            self._give_up_all(TransferEnd.PEER_RESTARTED)
        self._epoch = event.epoch
        for outgoing in self.open.values():
            transfer = outgoing.transfer
            self._do(do.SendOffer(transfer.transfer_id, outgoing.sealed, outgoing.named))
            if transfer.state is TransferState.SENT:
                self._do(self._commit_of(outgoing))

    def _link_up(self, _: Any, _event: Any) -> None:
        self._down_since_ns = None
        self._ticked(_, _event)

    def _link_broke(self, _: Any, _event: Any) -> None:
        self._down_since_ns = self._now_ns
        self._ticked(_, _event)

    def _peer_lost(self, _: Any, event: on.PeerLost) -> None:
        self._give_up_all(event.kind)

    def _ticked(self, _: Any, _event: Any) -> None:
        for outgoing in list(self.open.values()):
            if self._now_ns >= outgoing.transfer.deadline_ns:
                self._end(outgoing, TransferEnd.EXPIRED, "lifetime")
        if self._is_given_up():
            self._give_up_all(TransferEnd.LINK_LOST)

    # --- steps ---

    def _is_given_up(self) -> bool:
        since_ns = self._down_since_ns
        return since_ns is not None and self._now_ns - since_ns >= self._grace_ns

    def _give_up_all(self, kind: TransferEnd) -> None:
        for outgoing in list(self.open.values()):
            self._give_up(outgoing, kind)

    def _give_up(self, outgoing: Outgoing, kind: TransferEnd, reason: str = "") -> None:
        self._tell_end(self.peer, outgoing.transfer.transfer_id, kind, reason)
        self._end(outgoing, kind, reason)

    @staticmethod
    def _commit_of(outgoing: Outgoing) -> do.SendCommit:
        transfer_id = outgoing.transfer.transfer_id
        return do.SendCommit(transfer_id, len(outgoing.names), outgoing.missing)

    def _end(self, outgoing: Outgoing, end: TransferEnd, detail: str = "") -> None:
        transfer = outgoing.transfer
        if transfer.apply(end, detail):
            del self.open[transfer.transfer_id]
            self._do(do.Withdraw(transfer.transfer_id, list(outgoing.blocks.values())))
            self._do(do.Ended(transfer))


_WITHOUT = {on.Granted, on.LinkCame, on.LinkUp, on.LinkBroke, on.PeerLost, on.Ticked}
"""Events that are not of an open transfer."""
