"""Transfers that arrive at this pool."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set

from prfaas.core.cache.eviction import born_in
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.kv.shipping import Manifest
from prfaas.core.kv.tenant_salts import tag_in
from prfaas.core.transfer.tickets import TicketRefusal, TicketRefusedError
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd, TransferEvent, TransferState
from prfaas.errors import TransferError
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.receive.receive_limits import DEFAULTS, ReceiveLimits
from prfaas.pool.receive.transfer_registry import KnownTransfers
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.origins import PURGED, received
from prfaas.pool.tickets.ticket_checks import DESTINATION, Grant, TicketChecks, beyond_ticket
from prfaas.wire.fragments import ReceivedBlock
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import Abort, Accepted, Commit, Offer, Pull, Refused

GIVEN_UP = (TransferState.ABORTED, TransferState.EXPIRED)
"""An offer that comes after these is late; after the other ends it is a replay."""
NO_ROOM = "no_room"
"""Reason for the end of a transfer without memory for its blocks."""
PEER_SHARE = 4
"""One peer may hold that part of memory with blocks that are not in the store yet, or
`peer_bytes_min`: when a path flows again that stood still, every connection brings parts of other
blocks."""
LANDED_MAX = 1024
"""Committed transfers whose leases can still be ended; those of older ones end with their time."""


class InboundTransfers:
    """Receives blocks and knows which are still in transit.

    Args:
        store: Where blocks go.
        on_ended: Called once for every ended transfer.
        layouts: Ids of the layouts that local engines have.
        grace_ns: Time limit of transfers' wait for a broken link, ns.
        on_closed: Called once for every transfer that ended, before `on_ended`, to drop what is
            unfinished of it.
        on_missing: Called with the blocks of a pull that its source does not have.
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
        layouts: Callable[[], Set[bytes]],
        grace_ns: int = 0,
        on_closed: Callable[[bytes], None] = lambda _: None,
        on_missing: Callable[[bytes, list[BlockKey]], None] = lambda *_: None,
        limits: ReceiveLimits = DEFAULTS,
        hosts: Set[str] = frozenset(),
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s = wall_s
        self.limits, self._hosts = limits, hosts
        self._store = store
        self._metrics = metrics
        self._on_ended = on_ended
        self._clock_ns = clock_ns
        self._tickets = tickets
        self._layouts = layouts
        self._grace_ns = grace_ns
        self._on_closed = on_closed
        self._on_missing = on_missing
        self._transfers = KnownTransfers(limits.transfers_max)
        self._arrived: dict[bytes, set[BlockName]] = {}
        """Blocks that arrived with each open transfer."""
        self._landed: OrderedDict[bytes, set[BlockName]] = OrderedDict()
        """The same for recently committed transfers: their leases end with the last wait."""
        self._unawaited: set[bytes] = set()
        """Open transfers that no request waits for."""
        self._grants: dict[bytes, Grant] = {}
        """The checked ticket of each open transfer."""
        self._expected: dict[bytes, int] = {}
        """Blocks that a commit announced and that are not all here yet."""
        self._asked: dict[bytes, set[BlockKey]] = {}
        """Blocks of the open pulls of this pool; others are refused."""
        self._away_since_ns: dict[str, int] = {}
        """Peers with a broken link, and the time of the break."""

    def offered(self, offer: Offer, peer: str) -> Accepted | Refused | Abort:
        """A peer announced a transfer; announcing it twice is harmless.

        Returns:
            The answer.
        """
        transfer_id = offer.transfer_id
        known = self._transfers.get(transfer_id)
        if known is not None and known.is_open and known.peer == peer:
            known.apply(TransferEvent.ACCEPT)
            return Accepted(transfer_id=transfer_id)
        if known is not None and known.peer in (peer, "") and known.state in GIVEN_UP:
            return abort_of(known)
        if self._transfers.refusal(transfer_id, peer) is TransferEnd.NO_ROOM:
            return Abort(transfer_id=transfer_id, kind=TransferEnd.NO_ROOM)
        try:
            grant = self._grant(offer.ticket, offer.blocks, transfer_id, peer)
        except TicketRefusedError as error:
            # Its blocks may be in transit: they are dropped without waiting for another offer.
            self._transfers.refuse(transfer_id, peer, TransferEnd.REFUSED)
            return Refused(transfer_id=transfer_id, reason=error.reason.value)
        self._begin(grant, peer).apply(TransferEvent.ACCEPT)
        return Accepted(transfer_id=transfer_id)

    def expect(self, pull: Pull) -> list[BlockKey]:
        """Wait for the blocks of a pull; return immediately if all are present.

        Returns:
            Blocks to request from the source.

        Raises:
            TicketRefusedError: The ticket does not allow the pull, or was used before.
            TransferError: The pull was aborted.
        """
        known = self._transfers.get(pull.transfer_id)
        if known is not None and known.peer in (pull.source, "") and known.state in GIVEN_UP:
            raise TransferError(known.reason)
        grant = self._grant(pull.ticket, pull.blocks, pull.transfer_id, pull.source)
        transfer, layout_id = self._begin(grant, pull.source), grant.ticket.layout_id
        lacking = [
            key for key in dict.fromkeys(keys_of(pull.keys)) if (layout_id, key) not in self._store
        ]
        self._asked[pull.transfer_id] = set(lacking)
        if not lacking and transfer.apply(TransferEvent.SEND):
            self._end(transfer, TransferEnd.COMMITTED)
        return lacking

    def _grant(self, sealed: bytes, blocks: Manifest, transfer_id: bytes, source: str) -> Grant:
        if self._transfers.is_full:
            error = TicketRefusedError(
                TicketRefusal.NO_ROOM,
                f"{self.limits.transfers_max} transfers are open, which is the limit",
            )
            self._tickets.refused(DESTINATION, transfer_id, error)
            raise error
        if self._store.is_barred(received(source, transfer_id, is_inherited=False)):
            error = TicketRefusedError(
                TicketRefusal.PURGING,
                f"what came from {source} is being dropped; it is accepted again soon",
            )
            self._tickets.refused(DESTINATION, transfer_id, error)
            raise error
        return self._tickets.to_receive(
            sealed,
            blocks,
            transfer_id=transfer_id,
            source=source,
            layouts=self._layouts(),
            free_bytes=self._store.capacity_bytes - self.promised_bytes,
        )

    def _begin(self, grant: Grant, peer: str) -> Transfer:
        ticket, now = grant.ticket, self._clock_ns()
        ends_at_ns = now + grant.lifetime_ns
        transfer = Transfer(
            ticket.transfer_id,
            peer,
            now,
            ends_at_ns,
            ticket.layout_id,
            ticket.bytes_max,
            trace=ticket.trace,
        )
        self._remember(transfer)
        self._grants[ticket.transfer_id] = grant
        return transfer

    @property
    def promised_bytes(self) -> int:
        """Bytes that open transfers may still bring."""
        return sum(t.bytes_max - t.num_bytes for t in self._transfers.open())

    def is_open(self, transfer_id: bytes) -> bool:
        """Return True if blocks of this transfer may still come."""
        transfer = self._transfers.get(transfer_id)
        return transfer is not None and transfer.is_open

    def is_offered(self, transfer_id: bytes, peer: str) -> bool:
        """Return True if an offer of this transfer was answered."""
        known = self._transfers.get(transfer_id) or self._transfers.refusal(transfer_id, peer)
        return known is not None

    def wants(self, transfer_id: bytes, peer: str) -> bool:
        """Return True if fragments of this transfer are taken from this peer. Any thread may ask.

        They may overtake its offer, which comes over another connection.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return self._transfers.refusal(transfer_id, peer) is None
        return transfer.is_open and transfer.peer == peer

    def has(self, transfer_id: bytes, name: BlockName) -> bool:
        """Return True if a block has arrived with this transfer. Any thread may ask."""
        return name in self._arrived.get(transfer_id, ())

    def buffer(self, num_bytes: int) -> bytearray | memoryview | None:
        """Memory to receive a block into; None if memory is full. Any thread may call it."""
        return self._store.receive_buffer(num_bytes)

    def make_room(self) -> None:
        """Free memory for a block: a link waits for it."""
        self._store.keep_room(is_waited=True)

    @property
    def peer_bytes_max(self) -> int:
        """Memory limit of one peer for blocks that are not in the store yet."""
        return max(self.limits.peer_bytes_min, self._store.capacity_bytes // PEER_SHARE)

    def no_room(self, transfer_id: bytes, peer: str) -> None:
        """There is no memory for a block of this transfer: it ends, also if it is offered later."""
        self._metrics.blocks_dropped.labels(reason=NO_ROOM).inc()
        self._store.keep_room()
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._transfers.refuse(transfer_id, peer, TransferEnd.NO_ROOM)
        elif transfer.peer == peer:
            self._end(transfer, TransferEnd.NO_ROOM)

    def block(self, block: ReceivedBlock, peer: str) -> bool:
        """Add a verified block. A repetition has no effect.

        Returns:
            True if more blocks of its transfer are wanted.
        """
        transfer = self._transfers.get(block.transfer_id)
        if transfer is None or not transfer.is_open or transfer.peer != peer:
            self._metrics.blocks_dropped.labels(reason="late").inc()
            return False
        arrived = self._arrived[block.transfer_id]
        name = block.layout_id, block.key
        if name in arrived:
            return True
        grant = self._grants[block.transfer_id]
        asked = self._asked.get(block.transfer_id)
        beyond = beyond_ticket(transfer, block, grant.named, asked, grant.ticket.quality)
        if beyond is not None:
            self._tickets.refused(DESTINATION, transfer.transfer_id, beyond)
            self._end(transfer, TransferEnd.REFUSED, beyond.reason.value)
            return False
        tenant = tag_in(grant.ticket.tenant)
        born_s = born_in(block.age, self._wall_s())
        is_inherited = block.is_inherited
        origin = received(peer, block.transfer_id, tenant, born_s, is_inherited=is_inherited)
        if self._store.is_barred(origin):
            self._metrics.blocks_dropped.labels(reason=PURGED).inc()
            self._end(transfer, TransferEnd.PURGED)
            return False
        lease_until_ns = None
        if block.transfer_id not in self._unawaited:
            lease_until_ns = transfer.deadline_ns
        if not self._store.put(
            block.layout_id,
            block.key,
            block.data,
            block.digest,
            origin,
            lease_until_ns,
            is_copy=peer in self._hosts and block.transfer_id in self._asked,
        ):
            self._metrics.blocks_dropped.labels(reason=NO_ROOM).inc()
            self._end(transfer, TransferEnd.NO_ROOM)
            return False
        arrived.add(name)
        transfer.moved(len(block.data), self._clock_ns())
        num_bytes = len(block.data)
        self._metrics.link_bytes.labels(peer=peer, direction="received").inc(num_bytes)
        self._metrics.moved.add("received", peer, block.transfer_id, link_bytes=num_bytes)
        return True

    def broken_block(self) -> None:
        """Count a block that failed its digest."""
        self._metrics.blocks_dropped.labels(reason="digest").inc()

    def committed(self, commit: Commit, peer: str) -> None:
        """Set the number of blocks of a transfer; some may still be in transit."""
        transfer = self._transfers.get(commit.transfer_id)
        if transfer is None or transfer.peer != peer or not transfer.apply(TransferEvent.SEND):
            return
        if commit.missing and commit.transfer_id in self._asked:
            absent = self._asked[commit.transfer_id].intersection(keys_of(commit.missing))
            transfer.num_missing = len(absent)
            self._on_missing(commit.transfer_id, sorted(absent))
        surplus = transfer.num_blocks - commit.num_blocks
        if surplus > 0:
            self._end(transfer, TransferEnd.MISCOUNTED, f"{surplus} blocks too many")
        else:
            self._expected[commit.transfer_id] = commit.num_blocks

    def settle(self, transfer_id: bytes) -> TransferState | None:
        """Commit a transfer if every block that was announced is here.

        Returns:
            Its state; None if it is unknown.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return None
        if self._expected.get(transfer_id) == transfer.num_blocks:
            self._end(transfer, TransferEnd.COMMITTED)
        return transfer.state

    def resumed(self, peer: str, transfer_ids: Iterable[bytes]) -> None:
        """Resume these transfers of a reconnected peer; end its others.

        It will offer unknown ones again.
        """
        self._away_since_ns.pop(peer, None)
        kept = set(transfer_ids)
        for transfer in self._transfers.open():
            if transfer.peer == peer and transfer.transfer_id not in kept:
                self._end(transfer, TransferEnd.LINK_LOST)

    def arrived(self, transfer_id: bytes) -> list[BlockName]:
        """Blocks that arrived with an open transfer."""
        return list(self._arrived.get(transfer_id, ()))

    def ending(self, transfer_id: bytes, peer: str) -> Transfer | None:
        """A transfer of this peer, open or ended; None if it is unknown or another's."""
        transfer = self._transfers.get(transfer_id)
        return transfer if transfer is not None and transfer.peer in (peer, "") else None

    def not_wanted(self, transfer_id: bytes, peer: str) -> Abort:
        """Answer to blocks of a transfer that is not open: how it ended here, if that is known."""
        known = self.ending(transfer_id, peer)
        if known is not None and not known.is_open and known.end is not TransferEnd.COMMITTED:
            return abort_of(known)
        refusal = self._transfers.refusal(transfer_id, peer)
        return Abort(transfer_id=transfer_id, kind=refusal or TransferEnd.NOT_WANTED)

    def aborted(
        self, transfer_id: bytes, reason: str, kind: TransferEnd = TransferEnd.ABORTED
    ) -> None:
        """Abort a transfer. Blocks that arrived are kept: each is valid by itself."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            now = self._clock_ns()
            transfer = Transfer(transfer_id, "", now, now)
            self._remember(transfer)
        self._end(transfer, kind, reason)
        self._end_leases(self._landed.pop(transfer_id, set()))

    def release(self, transfer_id: bytes) -> None:
        """End the leases of a transfer's blocks; an open transfer continues."""
        if self.is_open(transfer_id):
            self._unawaited.add(transfer_id)
        self._end_leases(self._arrived.get(transfer_id, set()))
        self._end_leases(self._landed.pop(transfer_id, set()))

    def aborted_by(self, abort: Abort, peer: str) -> None:
        """The sending pool gave one of its transfers up."""
        transfer = self._transfers.get(abort.transfer_id)
        if transfer is not None and transfer.peer == peer:
            self._end(transfer, abort.kind, abort.reason)

    def refused_by(self, transfer_id: bytes, peer: str, reason: str) -> bool:
        """The source of a pull will not serve it.

        Returns:
            True if that ended an open transfer.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.peer != peer or not transfer.is_open:
            return False
        self._end(transfer, TransferEnd.REFUSED, reason)
        return True

    def peer_away(self, peer: str) -> None:
        """Suspend the transfers of `peer`: they continue if the link is back in time."""
        self._away_since_ns.setdefault(peer, self._clock_ns())
        self.expire()

    def peer_lost(self, peer: str) -> None:
        """End the transfers of `peer`."""
        self._away_since_ns.pop(peer, None)
        for transfer in self._transfers.open():
            if transfer.peer == peer:
                self._end(transfer, TransferEnd.LINK_LOST)

    def purge(self, source: str) -> int:
        """End the open transfers from a pool; how many there were."""
        found = [transfer for transfer in self._transfers.open() if transfer.peer == source]
        for transfer in found:
            self._end(transfer, TransferEnd.PURGED)
        return len(found)

    def expire(self) -> None:
        """End transfers that are open, or wait for their peer, for too long."""
        now = self._clock_ns()
        for peer, since in list(self._away_since_ns.items()):
            if now - since >= self._grace_ns:
                self.peer_lost(peer)
        for transfer in self._transfers.open():
            if now >= transfer.deadline_ns:
                self._end(transfer, TransferEnd.EXPIRED, "lifetime")

    def num_open_from(self, peer: str) -> int:
        """Transfers from a peer that have not ended."""
        return sum(transfer.peer == peer for transfer in self._transfers.open())

    def is_on_its_way(self, transfer_id: bytes, peer_connected: bool) -> bool:
        """Return True if a block that is not here may still come with this transfer.

        Args:
            transfer_id: The transfer a decode request waits for.
            peer_connected: True if the link to its source stands: a transfer nobody has announced
                yet is in transit only then.
        """
        transfer = self._transfers.get(transfer_id)
        return peer_connected if transfer is None else transfer.is_open

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return self._transfers.num_open

    def _end(self, transfer: Transfer, end: TransferEnd, detail: str = "") -> None:
        if transfer.apply(end, detail):
            self._transfers.ended(transfer)
            arrived = self._arrived.pop(transfer.transfer_id, set())
            is_awaited = transfer.transfer_id not in self._unawaited
            self._unawaited.discard(transfer.transfer_id)
            if is_awaited and transfer.state is TransferState.COMMITTED:
                self._landed[transfer.transfer_id] = arrived
                while len(self._landed) > LANDED_MAX:
                    self._landed.popitem(last=False)
            else:
                self._end_leases(arrived)
            self._expected.pop(transfer.transfer_id, None)
            self._asked.pop(transfer.transfer_id, None)
            self._grants.pop(transfer.transfer_id, None)
            self._on_closed(transfer.transfer_id)
            self._on_ended(transfer)

    def _end_leases(self, names: Iterable[BlockName]) -> None:
        """End the leases of these blocks."""
        for name in names:
            self._store.release(name)

    def _remember(self, transfer: Transfer) -> None:
        self._transfers.began(transfer)
        self._arrived[transfer.transfer_id] = set()


def abort_of(transfer: Transfer) -> Abort:
    """Report the end of a transfer without commit to its peer."""
    kind = transfer.end or TransferEnd.ABORTED
    return Abort(transfer_id=transfer.transfer_id, kind=kind, reason=transfer.detail)
