"""Transfers that a receiving pool knows, and blocks that came before the offers of theirs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.kv.shipping import NamedBlocks
from prfaas.core.transfer import events as on
from prfaas.core.transfer.tickets import Ticket
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd


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
    """When it was told last."""
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
