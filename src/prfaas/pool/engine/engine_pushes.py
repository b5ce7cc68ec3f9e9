"""Transfers that local engines push to other pools, each with a ticket."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.facts import SENT, TransferDone
from prfaas.core.transfer.tickets import TicketRefusedError
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
from prfaas.pool.engine.engine_server import EngineSession
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.send.block_sender import Sending
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.pool.tickets.ticket_checks import TicketChecks
from prfaas.wire.messages.engine import Push, PushDone, Store
from prfaas.wire.messages.fields import keys_of


class EnginePushes:
    """The open pushes of local engines.

    Args:
        links: Links to peers, by name.
        sending: Sends blocks of a push that engines did not store for it.
        metrics: Count blocks that no link takes.
        facts: Told of transfers that their ticket does not allow.
        needs_grant: Keep only blocks of open pushes.
        is_shared: Sites share the pool node: keep blocks only of the tenant that a ticket names.
    """

    def __init__(
        self,
        links: Mapping[str, OutboundLink],
        tickets: TicketChecks,
        sending: Sending,
        metrics: PoolMetrics,
        facts: FactStream,
        clock_ns: Callable[[], int],
        *,
        needs_grant: bool = False,
        is_shared: bool = False,
    ) -> None:
        self._links, self._tickets, self.sending = links, tickets, sending
        self._metrics, self._facts, self._clock_ns = metrics, facts, clock_ns
        self._needs_grant, self._is_shared = needs_grant or is_shared, is_shared
        self._open: dict[bytes, tuple[EngineSession, OutboundLink]] = {}
        self._granted: dict[bytes, str] = {}
        """Tags in the tickets of open pushes."""

    def may_keep(self, message: Store) -> bool:
        """Return False if blocks of an engine may not rest here.

        The ticket of their request was refused, is for another tenant than the prompt, or there is
        none.
        """
        granted = self._granted.get(message.transfer_id or b"")
        is_other = self._is_shared and granted != message.tenant
        return not self._needs_grant or not (granted is None or is_other)

    def open(self, engine: EngineSession, message: Push) -> None:
        """An engine begins a push."""
        if message.transfer_id in self._open:
            return
        link = self._links.get(message.peer)
        if link is None:
            self._metrics.blocks_dropped.labels(reason="unknown_peer").inc()
            return
        try:
            grant = self._tickets.to_send(
                message.ticket,
                message.blocks,
                transfer_id=message.transfer_id,
                destination=message.peer,
                layout_id=engine.layout.layout_id,
            )
        except TicketRefusedError as error:
            now_ns = self._clock_ns()
            refused = Transfer(message.transfer_id, message.peer, now_ns, now_ns)
            refused.apply(TransferEnd.REFUSED, error.reason.value)
            self._facts.report(TransferDone(SENT, refused, now_ns))
            return
        link.open(grant)
        self._open[message.transfer_id] = engine, link
        self._granted[message.transfer_id] = grant.ticket.tenant

    def push(
        self,
        engine: EngineSession,
        transfer_id: bytes,
        key: BlockKey,
        block: StoredBlock | None,
        *,
        is_barred: bool,
    ) -> None:
        """Send a block that an engine has stored for a push; without memory for it, None."""
        _, link = self._open.get(transfer_id, (engine, None))
        if link is None:
            return
        layout_id = engine.layout.layout_id
        if is_barred:
            link.abort(transfer_id, TransferEnd.PURGED)
        elif engine.has_state(key.group) and link.is_checkpoint(transfer_id, key):
            if block is not None:
                link.push_checkpoint(transfer_id, layout_id, key, block)
        elif block is None:
            link.abort(transfer_id, TransferEnd.NO_ROOM)
        else:
            link.push(transfer_id, layout_id, key, block)

    def close(self, engine: EngineSession, message: PushDone) -> None:
        """An engine has stored all blocks of a push."""
        _, link = self._open.pop(message.transfer_id, (engine, None))
        self._granted.pop(message.transfer_id, None)
        if link is not None:
            layout_id, rest = engine.layout.layout_id, keys_of(message.rest)
            self.sending.start(link, message.transfer_id, layout_id, rest, tell_missing=False)

    def left(self, engine: EngineSession) -> None:
        """An engine is gone: nothing more of its pushes will come."""
        for transfer_id, (owner, link) in list(self._open.items()):
            if owner is engine:
                del self._open[transfer_id], self._granted[transfer_id]
                link.abort(transfer_id, TransferEnd.ENGINE_LOST)

    def validate(self) -> None:
        """See that each open push has a ticket, and no other.

        Raises:
            AssertionError: One has none.
        """
        if self._open.keys() != self._granted.keys():
            raise AssertionError(f"{len(self._open)} pushes, {len(self._granted)} with a ticket")
