"""The machine of all transfers that arrive at a pool.

How it works. The pool's link room reports events (`events.py`) with the time and carries out the
actions (`actions.py`) that a step returns, in order. The machine holds no clock and does no I/O; it
sees whole blocks and no fragments. Each transfer goes through the table of `transfer_state.py`.

    before an offer   blocks that overtake it are held, up to a limit, for `EARLY_NS`
    open              each block is checked against its ticket, and stored; the first one is
                      acknowledged at once, others together, which costs both ends less
    commit            once every block is here that the sender has counted
    end               leases end, or with the last wait for a committed transfer; late blocks are
                      answered with the end for as long as it is remembered

An event for a transfer of another peer, or one that is over, changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prfaas.core.codec.codecs import allows
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.kv.shipping import NamedBlocks
from prfaas.core.transfer import actions as do
from prfaas.core.transfer import events as on
from prfaas.core.transfer.actions import PeerNews
from prfaas.core.transfer.machine import Machine
from prfaas.core.transfer.tickets import Ticket, TicketRefusal, TicketRefusedError, unnamed
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd, TransferEvent, TransferState

GIVEN_UP = (TransferState.ABORTED, TransferState.EXPIRED)
"""An offer that comes after these is late; after the other ends it is a replay."""
LANDED_MAX = 1024
"""Committed transfers whose leases can still be ended; those of older ones end with their time."""
EARLY_NS = 5 * 10**9
"""A connection for messages that is later than this is dead."""
ACKNOWLEDGE_NS = 50_000_000
"""Time for which blocks are acknowledged together. The last of a transfer need none: its commit
says that all are here."""
LATE, NO_ROOM = "late", "no_room"


@dataclass(eq=False, slots=True)
class Incoming:
    """An open transfer, and what it may bring."""

    transfer: Transfer
    ticket: Ticket
    named: NamedBlocks
    asked: frozenset[BlockKey] | None
    """Blocks of a pull; others are refused. None for an offer."""
    asker: Any
    arrived: set[BlockName] = field(default_factory=set)
    untold: list[BlockName] = field(default_factory=list)
    """Those of them that its sender does not know to be here."""
    told_at_ns: int | None = None
    """Time when it was told last."""
    is_awaited: bool = True
    is_computed: bool = False
    """The second message of a pull has come."""
    num_announced: int | None = None


class KnownTransfers:
    """Transfers that are open, that have ended, or that were refused; the oldest go first.

    `wants` and `has` may be called from any thread.

    Args:
        transfers_max: Limit of those that are open or ended, and of refusals.
    """

    def __init__(self, transfers_max: int) -> None:
        self.transfers_max = transfers_max
        self.open: dict[bytes, Incoming] = {}
        self.ended: OrderedDict[bytes, Transfer] = OrderedDict()
        self.refused: OrderedDict[tuple[str, bytes], TransferEnd] = OrderedDict()

    def get(self, transfer_id: bytes) -> Transfer | None:
        """A transfer, open or over; None if it is not known, or not any more."""
        incoming = self.open.get(transfer_id)
        return self.ended.get(transfer_id) if incoming is None else incoming.transfer

    def open_of(self, event: on.TransferInput) -> Incoming | None:
        """The open transfer of an event, if it is one of its peer."""
        incoming = self.open.get(event.transfer_id)
        return incoming if incoming and incoming.transfer.peer == event.peer else None

    def open_from(self, peer: str) -> list[Transfer]:
        """Open transfers from a peer, the oldest first."""
        return [one.transfer for one in self.open.values() if one.transfer.peer == peer]

    def is_open(self, transfer_id: bytes) -> bool:
        """Return True if blocks of this transfer may still come."""
        return transfer_id in self.open

    def is_offered(self, transfer_id: bytes, peer: str) -> bool:
        """Return True if an offer of this transfer was answered."""
        return self.get(transfer_id) is not None or (peer, transfer_id) in self.refused

    def wants(self, transfer_id: bytes, peer: str) -> bool:
        """Return True if fragments of this transfer are taken from this peer.

        They may overtake its offer, which comes over another connection.
        """
        incoming = self.open.get(transfer_id)
        if incoming is not None:
            return incoming.transfer.peer == peer
        return transfer_id not in self.ended and (peer, transfer_id) not in self.refused

    def has(self, transfer_id: bytes, name: BlockName) -> bool:
        """Return True if a block has arrived with this open transfer."""
        incoming = self.open.get(transfer_id)
        return incoming is not None and name in incoming.arrived

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self.open)

    @property
    def is_full(self) -> bool:
        """Return True if no further transfer may be opened."""
        return len(self.open) >= self.transfers_max

    @property
    def promised_bytes(self) -> int:
        """Bytes that open transfers may still bring."""
        open_ones = [incoming.transfer for incoming in self.open.values()]
        return sum(transfer.bytes_max - transfer.num_bytes for transfer in open_ones)

    def begin(self, incoming: Incoming) -> None:
        """Open a transfer."""
        self.open[incoming.transfer.transfer_id] = incoming
        self.ended.pop(incoming.transfer.transfer_id, None)
        self._forget_oldest()

    def end(self, transfer: Transfer) -> None:
        """Record a transfer that is over; it need not have been open."""
        self.open.pop(transfer.transfer_id, None)
        self.ended[transfer.transfer_id] = transfer
        self._forget_oldest()

    def refuse(self, peer: str, transfer_id: bytes, end: TransferEnd) -> None:
        """Record that blocks of a transfer that was never open are dropped."""
        self.refused[peer, transfer_id] = end
        while len(self.refused) > self.transfers_max:
            self.refused.popitem(last=False)

    def _forget_oldest(self) -> None:
        while self.ended and len(self.open) + len(self.ended) > self.transfers_max:
            self.ended.popitem(last=False)

    def invariants(self) -> Iterator[tuple[str, bool]]:
        """Name what has to hold, and return whether it does."""
        for transfer_id, incoming in self.open.items():
            transfer, arrived, asked = incoming.transfer, incoming.arrived, incoming.asked
            yield "open ones are open", transfer.is_open and transfer.transfer_id == transfer_id
            yield "blocks are counted", transfer.num_blocks == len(arrived)
            yield "untold blocks are here", arrived.issuperset(incoming.untold)
            yield "bytes keep to the ticket", 0 <= transfer.num_bytes <= transfer.bytes_max
            announced = incoming.num_announced
            yield "whole ones are committed", announced is None or announced > len(arrived)
            are_named = all(key in incoming.named for _, key in arrived)
            yield "blocks are of the ticket", are_named
            yield "or asked for", asked is None or asked.issuperset(key for _, key in arrived)
        yield "ended ones are over", not any(each.is_open for each in self.ended.values())
        yield "no transfer is both", not self.open.keys() & self.ended.keys()
        remembered = max(len(self.open), len(self.refused))
        yield "memory is bounded", remembered <= self.transfers_max


@dataclass(eq=False, slots=True)
class Early:
    """Blocks that came before the offer of their transfer, over another connection."""

    since_ns: int
    num_bytes: int = 0
    blocks: list[on.BlockCame] = field(default_factory=list)


class EarlyBlocks(dict[tuple[str, bytes], Early]):
    """Blocks that came before their offers, by peer and transfer.

    Args:
        bytes_max: Limit of the blocks of one peer; one may be larger.
    """

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self._bytes_max = bytes_max

    def of(self, peer: str) -> list[tuple[str, bytes]]:
        """Keys of those of a peer, or of all if it is ""."""
        return [key for key in self if peer in (key[0], "")]

    def hold(self, block: on.BlockCame, now_ns: int) -> bool:
        """Hold a block; False if its peer has too many bytes here."""
        held = sum(self[key].num_bytes for key in self.of(block.peer))
        if held and held + block.num_bytes > self._bytes_max:
            return False
        early = self.setdefault((block.peer, block.transfer_id), Early(now_ns))
        early.num_bytes += block.num_bytes
        early.blocks.append(block)
        return True

    def invariants(self) -> Iterator[tuple[str, bool]]:
        """Name what has to hold, and return whether it does."""
        for peer in {peer for peer, _ in self}:
            sizes = [block.num_bytes for key in self.of(peer) for block in self[key].blocks]
            yield "early bytes", sum(sizes) <= self._bytes_max or len(sizes) == 1


class Receiver(Machine, kinds=on.RECEIVED):
    """All transfers that arrive at a pool.

    Args:
        transfers_max: Transfers known at once, and refusals; the oldest end is forgotten first.
        early_bytes_max: Blocks of one peer that came before their offer; one may be larger.
        grace_ns: Wait of transfers for a link that broke.
    """

    def __init__(self, transfers_max: int, early_bytes_max: int, grace_ns: int = 0) -> None:
        super().__init__()
        self.grace_ns = grace_ns
        self.known = KnownTransfers(transfers_max)
        self._early = EarlyBlocks(early_bytes_max)
        self._landed: OrderedDict[bytes, set[BlockName]] = OrderedDict()
        """Blocks of recently committed transfers: their leases end with the last wait."""
        self._broken_since_ns: dict[str, int] = {}
        self._is_closed = False

    def _take(self, event: Any) -> str:
        self._handlers[type(event)](self, event)
        known = self.known.get(event.transfer_id)
        return "" if known is None else known.state

    def _invariants(self) -> Iterator[tuple[str, bool]]:
        yield from self.known.invariants()
        yield from self._early.invariants()
        are_early = not any(self.known.is_offered(t, p) for p, t in self._early)
        yield "early ones have no offer", are_early
        yield "closed: none is held", not (self._is_closed and self._early)
        yield "landed ones are few", len(self._landed) <= LANDED_MAX
        yield "landed ones are committed", not self._landed.keys() & self.known.open.keys()

    # --- offers and pulls ---

    def _offered(self, event: on.Offered) -> None:
        peer, transfer_id = event.peer, event.transfer_id
        known = self.known.get(transfer_id)
        if known is not None and known.is_open and known.peer == peer:
            known.apply(TransferEvent.ACCEPT)
            self._do(do.Tell(peer, transfer_id, PeerNews.ACCEPTED))
        elif known is not None and known.peer in (peer, "") and known.state in GIVEN_UP:
            self._do(_abort_of(known, peer))
        elif self.known.refused.get((peer, transfer_id)) is TransferEnd.NO_ROOM:
            self._tell_end(peer, transfer_id, TransferEnd.NO_ROOM)
        elif self._is_full(transfer_id):
            self._refuse(peer, transfer_id, TicketRefusal.NO_ROOM)
        else:
            self._do(do.CheckTicket(peer, transfer_id, event.request))
            return
        self._redeliver(peer, transfer_id)

    def _pull_asked(self, event: on.PullAsked) -> None:
        peer, transfer_id = event.peer, event.transfer_id
        incoming = self.known.open.get(transfer_id)
        if event.is_computed or incoming is not None:
            if event.is_computed and incoming is not None:
                incoming.is_computed = True
                self._do(do.Tell(peer, transfer_id, PeerNews.COMPUTED))
            return
        known = self.known.ended.get(transfer_id)
        if known is not None and known.peer in (peer, "") and known.state in GIVEN_UP:
            self._do(do.Answer(transfer_id, event.asker, refusal=known.reason))
        elif self._is_full(transfer_id):
            self._do(do.Answer(transfer_id, event.asker, refusal=TicketRefusal.NO_ROOM))
        else:
            self._do(do.CheckTicket(peer, transfer_id, event.request, event.asker))

    def _is_full(self, transfer_id: bytes) -> bool:
        is_full = self.known.is_full
        if is_full:
            why = f"{self.known.transfers_max} transfers are open, which is the limit"
            error = TicketRefusedError(TicketRefusal.NO_ROOM, why)
            self._do(do.RecordRefusal(transfer_id, error))
        return is_full

    def _granted(self, event: on.Granted) -> None:
        peer, transfer_id, ticket = event.peer, event.transfer_id, event.ticket
        if self.known.is_open(transfer_id) or self.known.is_full:
            return
        transfer = Transfer(
            transfer_id,
            peer,
            self._now_ns,
            self._now_ns + event.lifetime_ns,
            ticket.layout_id,
            ticket.bytes_max,
            trace=ticket.trace,
        )
        lacking = event.lacking
        asked = None if lacking is None else frozenset(lacking)
        incoming = Incoming(transfer, ticket, event.named, asked, event.asker)
        self.known.begin(incoming)
        self._end_leases(self._landed.pop(transfer_id, ()))
        if lacking is None:
            transfer.apply(TransferEvent.ACCEPT)
            self._do(do.Tell(peer, transfer_id, PeerNews.ACCEPTED))
        elif lacking:
            self._do(do.AskSource(event.request, lacking))
        else:
            transfer.apply(TransferEvent.SEND)
            self._end(incoming, TransferEnd.COMMITTED)
        self._redeliver("", transfer_id)

    def _not_granted(self, event: on.NotGranted) -> None:
        if event.asker is not None:
            self._do(do.Answer(event.transfer_id, event.asker, refusal=event.reason))
            return
        self._refuse(event.peer, event.transfer_id, event.reason)
        self._redeliver(event.peer, event.transfer_id)

    def _refuse(self, peer: str, transfer_id: bytes, reason: TicketRefusal) -> None:
        """Its blocks may be in transit: they are dropped without waiting for another offer."""
        self.known.refuse(peer, transfer_id, TransferEnd.REFUSED)
        self._do(do.Tell(peer, transfer_id, PeerNews.REFUSED, reason))

    # --- blocks ---

    def _block_came(self, event: on.BlockCame) -> None:
        peer, transfer_id = event.peer, event.transfer_id
        incoming = self.known.open_of(event)
        if incoming is None:
            if self.known.is_offered(transfer_id, peer):
                self._unwanted(event)
            elif self._is_closed:
                self._do(do.CountDropped(LATE))
            elif not self._early.hold(event, self._now_ns):
                self._no_room(event)
            return
        if event.name in incoming.arrived:
            self._do(do.Acknowledge(peer, transfer_id, (event.name,)))
            return
        transfer = incoming.transfer
        beyond = _beyond_ticket(incoming, event)
        if beyond is not None:
            self._do(do.RecordRefusal(transfer_id, beyond))
            self._end(incoming, TransferEnd.REFUSED, beyond.reason)
            self._do(self._not_wanted(peer, transfer_id))
            return
        lease_until_ns = transfer.deadline_ns if incoming.is_awaited else None
        is_pulled = incoming.asked is not None
        self._do(do.Keep(peer, event.payload, incoming.ticket, lease_until_ns, is_pulled))

    def _block_kept(self, event: on.BlockKept) -> None:
        incoming = self.known.open_of(event)
        if incoming is None:
            return
        if event.failure is not None:
            self._do(do.CountDropped(event.failure))
            self._end(incoming, event.failure)
            self._do(self._not_wanted(event.peer, event.transfer_id))
        elif event.name not in incoming.arrived:
            incoming.arrived.add(event.name)
            incoming.transfer.moved(event.num_bytes, self._now_ns)
            incoming.untold.append(event.name)
            self._settle(incoming)
            self._acknowledge(incoming)

    def _acknowledge(self, incoming: Incoming) -> None:
        """Acknowledge what has arrived, unless that was done just now."""
        transfer, told_at_ns = incoming.transfer, incoming.told_at_ns
        is_due = told_at_ns is None or self._now_ns - told_at_ns >= ACKNOWLEDGE_NS
        if incoming.untold and is_due and transfer.is_open:
            names, incoming.untold = tuple(incoming.untold), []
            incoming.told_at_ns = self._now_ns
            self._do(do.Acknowledge(transfer.peer, transfer.transfer_id, names))

    def _unwanted(self, event: on.TransferInput) -> None:
        self._do(do.CountDropped(LATE), self._not_wanted(event.peer, event.transfer_id))

    def _no_room(self, event: on.TransferInput) -> None:
        """A transfer without memory for a block ends, also if it is offered later."""
        peer, transfer_id = event.peer, event.transfer_id
        self._let_go(peer, transfer_id)
        self._do(do.CountDropped(NO_ROOM), do.MakeRoom())
        incoming = self.known.open_of(event)
        if incoming is not None:
            self._end(incoming, TransferEnd.NO_ROOM)
        elif self.known.get(transfer_id) is None:
            self.known.refuse(peer, transfer_id, TransferEnd.NO_ROOM)
        self._tell_end(peer, transfer_id, TransferEnd.NO_ROOM)

    # --- ends ---

    def _commit_came(self, event: on.CommitCame) -> None:
        incoming = self.known.open_of(event)
        if incoming is None:
            known = self.known.ended.get(event.transfer_id)
            if known is not None and known.peer == event.peer and known.end is _COMMITTED:
                self._do(do.Tell(event.peer, event.transfer_id, PeerNews.COMMITTED))
            return
        transfer = incoming.transfer
        if not transfer.apply(TransferEvent.SEND):
            return
        if event.missing and incoming.asked is not None:
            absent = tuple(sorted(incoming.asked.intersection(event.missing)))
            transfer.num_missing = len(absent)
            self._do(do.Answer(event.transfer_id, incoming.asker, absent))
        surplus = transfer.num_blocks - event.num_blocks
        if surplus > 0:
            why = f"{surplus} blocks too many"
            self._end(incoming, TransferEnd.MISCOUNTED, why)
        else:
            incoming.num_announced = event.num_blocks
            self._settle(incoming)

    def _settle(self, incoming: Incoming) -> None:
        """Commit a transfer if every block that was announced is here."""
        transfer = incoming.transfer
        if incoming.num_announced == transfer.num_blocks:
            self._end(incoming, TransferEnd.COMMITTED)
            self._do(do.Tell(transfer.peer, transfer.transfer_id, PeerNews.COMMITTED))

    def _abort_came(self, event: on.AbortCame) -> None:
        incoming = self.known.open_of(event)
        if incoming is not None:
            self._end(incoming, event.kind, event.reason)
            if event.kind is TransferEnd.REFUSED and incoming.asker is not None:
                refused = do.Answer(event.transfer_id, incoming.asker, refusal=event.reason)
                self._do(refused)

    def _given_up(self, event: on.GivenUp) -> None:
        """Blocks that arrived are kept: each is valid by itself."""
        transfer_id = event.transfer_id
        incoming = self.known.open.get(transfer_id)
        if incoming is not None:
            self._end(incoming, event.kind, event.reason)
        elif transfer_id not in self.known.ended:
            transfer = Transfer(transfer_id, "", self._now_ns, self._now_ns)
            transfer.apply(event.kind, event.reason)
            self.known.end(transfer)
            self._do(do.Ended(transfer))
            self._redeliver("", transfer_id)
        self._end_leases(self._landed.pop(transfer_id, ()))

    def _released(self, event: on.Released) -> None:
        incoming = self.known.open.get(event.transfer_id)
        if incoming is not None:
            incoming.is_awaited = False
            self._end_leases(incoming.arrived)
        self._end_leases(self._landed.pop(event.transfer_id, ()))

    def _peer_lost(self, event: on.PeerLost) -> None:
        self._broken_since_ns.pop(event.peer, None)
        self._end_all(event.peer, event.kind)

    def _link_broke(self, event: on.LinkBroke) -> None:
        self._broken_since_ns.setdefault(event.peer, self._now_ns)
        self._ticked(event)

    def _ticked(self, _event: on.TransferInput) -> None:
        for peer, since_ns in list(self._broken_since_ns.items()):
            if self._now_ns - since_ns >= self.grace_ns:
                self._peer_lost(on.PeerLost(peer))
        for incoming in list(self.known.open.values()):
            if self._now_ns >= incoming.transfer.deadline_ns:
                self._end(incoming, TransferEnd.EXPIRED, "lifetime")
            self._acknowledge(incoming)
        for (peer, transfer_id), early in list(self._early.items()):
            if early.since_ns < self._now_ns - EARLY_NS:
                self._let_go(peer, transfer_id)
                self._do(do.CountDropped(LATE), self._not_wanted(peer, transfer_id))

    # --- links ---

    def _link_came(self, event: on.LinkCame) -> None:
        """Go on with the transfers that the peer resumes. It offers unknown ones again."""
        peer, resumes = event.peer, dict.fromkeys(event.resumes)
        self._broken_since_ns.pop(peer, None)
        self._end_all(peer, TransferEnd.LINK_LOST, resumes)
        for transfer_id in resumes:
            incoming = self.known.open.get(transfer_id)
            known = self.known.get(transfer_id)
            if known is None or known.peer not in (peer, ""):
                continue
            if incoming is None:
                is_whole = known.end is _COMMITTED
                committed = do.Tell(peer, transfer_id, PeerNews.COMMITTED)
                self._do(committed if is_whole else _abort_of(known, peer))
                continue
            if incoming.arrived:
                incoming.untold = list(incoming.arrived)
                incoming.told_at_ns = None
                self._acknowledge(incoming)
            if incoming.is_computed:
                self._do(do.Tell(peer, transfer_id, PeerNews.COMPUTED))

    def _data_dropped(self, event: on.DataDropped) -> None:
        self._is_closed = self._is_closed or event.is_final
        for peer, transfer_id in self._early.of(event.peer):
            self._let_go(peer, transfer_id)

    # --- steps ---

    def _end_all(self, peer: str, end: TransferEnd, kept: Iterable[bytes] = ()) -> None:
        for transfer in self.known.open_from(peer):
            if transfer.transfer_id not in kept:
                self._end(self.known.open[transfer.transfer_id], end)

    def _end(self, incoming: Incoming, end: TransferEnd, detail: str = "") -> None:
        transfer = incoming.transfer
        if not transfer.apply(end, detail):
            return
        self.known.end(transfer)
        if incoming.is_awaited and end is TransferEnd.COMMITTED:
            self._landed[transfer.transfer_id] = incoming.arrived
            while len(self._landed) > LANDED_MAX:
                self._landed.popitem(last=False)
        else:
            self._end_leases(incoming.arrived)
        self._do(do.Ended(transfer))

    def _end_leases(self, names: Iterable[BlockName]) -> None:
        if names:
            self._do(do.EndLeases(tuple(names)))

    def _not_wanted(self, peer: str, transfer_id: bytes) -> do.Tell:
        """Answer to blocks of a transfer that is not open: how it ended here, if that is known."""
        known = self.known.ended.get(transfer_id)
        if known is not None and known.peer in (peer, "") and known.end is not _COMMITTED:
            return _abort_of(known, peer)
        end = self.known.refused.get((peer, transfer_id), TransferEnd.NOT_WANTED)
        return do.Tell(peer, transfer_id, PeerNews.ABORTED, kind=end)

    def _redeliver(self, peer: str, transfer_id: bytes) -> None:
        """Deliver early blocks of a transfer again, those of all peers if `peer` is ""."""
        for key in [key for key in self._early.of(peer) if key[1] == transfer_id]:
            self._do(do.Redeliver(self._early.pop(key).blocks))

    def _let_go(self, peer: str, transfer_id: bytes) -> None:
        early = self._early.pop((peer, transfer_id), None)
        if early is not None:
            self._do(do.LetGo([block.payload for block in early.blocks]))


_COMMITTED = TransferEnd.COMMITTED


def _abort_of(transfer: Transfer, peer: str) -> do.Tell:
    """Report the end of a transfer without commit."""
    end = transfer.end or TransferEnd.ABORTED
    return do.Tell(peer, transfer.transfer_id, PeerNews.ABORTED, transfer.detail, end)


def _beyond_ticket(incoming: Incoming, block: on.BlockCame) -> TicketRefusedError | None:
    """Limit that a block exceeds if its ticket does not cover it."""
    transfer, (layout_id, key) = incoming.transfer, block.name
    if key not in incoming.named:
        return unnamed(key)
    if incoming.asked is not None and key not in incoming.asked:
        return TicketRefusedError(TicketRefusal.FOREIGN, "a block arrived that was not requested")
    if layout_id != transfer.layout_id:
        return TicketRefusedError(TicketRefusal.LAYOUT, "a block of another layout arrived")
    quality = incoming.ticket.quality
    if not allows(quality, block.modes):
        how = ", ".join(sorted(mode.name.lower() for mode in block.modes))
        return TicketRefusedError(
            TicketRefusal.QUALITY, f"a block came rounded ({how}); it is for {quality} blocks"
        )
    num_bytes = transfer.num_bytes + block.num_bytes
    if num_bytes > transfer.bytes_max:
        return TicketRefusedError(
            TicketRefusal.OVERSIZED, f"{num_bytes} bytes came, it allows {transfer.bytes_max}"
        )
    return None
