"""Tickets: what may move between two pools, and the rules they are checked by.

A gateway signs a ticket for every transfer. The pool that sends checks it before it serves a block,
the pool that receives checks it before it accepts one. The transfer id is the ticket's nonce: a
ticket starts one transfer, once at either end.

The beginning of a prompt as blocks with names.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import overload

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.blocks import BlockKey, Layout, block_key
from prfaas.core.kv.shipping import is_worth_sending
from prfaas.errors import PeerError

CLOCK_SKEW_NS = 30 * 10**9
"""Maximum difference of the clocks of two sites. Any time service keeps them within a second."""
LIFETIME_MAX_NS = 3600 * 10**9
"""Longest time from now to expiry: bounds how long a used ticket has to be remembered."""
USED_MAX = 100_000
"""Used tickets remembered at once; more are refused rather than old ones forgotten."""


class TicketRefusal(StrEnum):
    """Reason for the refusal of a ticket; labels a metric."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN_SIGNER = "unknown_signer"
    """It is not signed by a listed gateway, or the signature is invalid."""
    EXPIRED = "expired"
    TOO_LONG = "too_long"
    """Valid for longer than any ticket may be."""
    FOREIGN = "foreign"
    """It is for another transfer, source or destination."""
    LAYOUT = "layout"
    """It is for a layout that no local engine has."""
    REGION = "region"
    """It does not allow the region of an end, or its signer may not allow one that it names."""
    SITE = "site"
    """It is for a part, a tenant or a block of another site than its signer's."""
    NO_REGION = "no_region"
    """It, or a certificate, names no region, and this pool has one."""
    REPLAYED = "replayed"
    OTHER_BLOCKS = "other_blocks"
    """The list of blocks that came with it is not the one it was signed for."""
    UNNAMED = "unnamed"
    """A block came that is not on its list."""
    QUALITY = "quality"
    """A block came that was rounded in a way that it does not allow."""
    OVERSIZED = "oversized"
    """More bytes came than it allows."""
    NO_ROOM = "no_room"
    """It allows more bytes than the free memory."""
    BUSY = "busy"
    """Too many tickets are in use."""
    PURGING = "purging"
    """Blocks of its source are being purged."""
    DRAINING = "draining"
    """The pool is about to stop."""
    NOT_AUDITED = "not_audited"
    """The pool's audit log cannot be written."""


class TicketRefusedError(PeerError):
    """A ticket does not allow a request; `reason` has the reason."""

    def __init__(self, reason: TicketRefusal, message: str) -> None:
        super().__init__(f"ticket refused ({reason.value}): {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission for one transfer."""

    transfer_id: bytes
    """16 random bytes; also the nonce."""
    tenant: str
    """Opaque class of the tenant whose blocks move; nothing to reach them with."""
    layout_id: bytes
    """The layout of all blocks."""
    source: str
    """Name of the pool that sends."""
    destination: str
    """Name of the pool that receives."""
    blocks: bytes
    """Digest of the list of blocks that may move (`core/kv/shipping.py`), 32 bytes."""
    bytes_max: int
    """Payload bytes of all blocks together."""
    expires_at_ns: int
    """Time when it ends, nanoseconds of Unix time."""
    weight: float = 1.0
    """The tenant's share of a link against the others'."""
    bytes_per_s: int = 0
    """What the tenant's transfers may take of a link before they have to wait for the others'; 0 is
    no limit."""
    trace: str = ""
    """W3C context of the span that the transfer belongs to; empty if nobody records it."""
    regions: frozenset[str] = frozenset()
    """Regions that the tenant's blocks may be in; none in deployments without regions."""
    quality: Quality = Quality.LOSSLESS
    """Quality class of the blocks: what may be lost of them on the way."""
    signer: str = field(default="", compare=False)
    """Name of the gateway that signed it, once that was checked."""
    signer_regions: frozenset[str] = field(default=frozenset(), compare=False)
    """Regions that its certificate lets it sign for."""


def check_ticket(
    ticket: Ticket, *, transfer_id: bytes, source: str, destination: str, now_ns: int
) -> None:
    """See that a ticket allows a transfer now; TicketRefusedError if it does not.

    Args:
        ticket: Its signature was checked.
        source: Pool that would send.
        destination: Pool that would receive.
    """
    if ticket.transfer_id != transfer_id:
        raise TicketRefusedError(TicketRefusal.FOREIGN, "it is for another transfer")
    if (ticket.source, ticket.destination) != (source, destination):
        raise TicketRefusedError(
            TicketRefusal.FOREIGN,
            f"it is for {ticket.source} to {ticket.destination}, not {source} to {destination}",
        )
    if now_ns > ticket.expires_at_ns + CLOCK_SKEW_NS:
        late_s = (now_ns - ticket.expires_at_ns) / 1e9
        raise TicketRefusedError(
            TicketRefusal.EXPIRED,
            f"it ended {late_s:.0f} s ago, {CLOCK_SKEW_NS // 10**9} s are allowed; "
            "compare the clocks of the two sites",
        )
    if ticket.expires_at_ns > now_ns + LIFETIME_MAX_NS + CLOCK_SKEW_NS:
        raise TicketRefusedError(
            TicketRefusal.TOO_LONG, f"it is valid for more than {LIFETIME_MAX_NS // 10**9} s"
        )


class UsedTickets:
    """Transfer ids that a ticket was used for, each for as long as its ticket is valid."""

    def __init__(self, used_max: int = USED_MAX) -> None:
        self._used_max = used_max
        self._used: set[bytes] = set()
        self._ends: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._used)

    def use(self, ticket: Ticket, now_ns: int) -> None:
        """Use a checked ticket up; TicketRefusedError if it was used before, or too many are
        remembered."""
        while self._ends and self._ends[0][0] < now_ns:
            self._used.discard(heapq.heappop(self._ends)[1])
        if ticket.transfer_id in self._used:
            raise TicketRefusedError(TicketRefusal.REPLAYED, "it was used before")
        if len(self._used) >= self._used_max:
            raise TicketRefusedError(
                TicketRefusal.BUSY, f"{self._used_max} tickets are in use, which is the limit"
            )
        self._used.add(ticket.transfer_id)
        ends_ns = ticket.expires_at_ns + CLOCK_SKEW_NS
        heapq.heappush(self._ends, (ends_ns, ticket.transfer_id))


def unnamed(key: BlockKey) -> TicketRefusedError:
    """The refusal of a block that is not on the list of its ticket."""
    name = key.block_hash.hex()[:12]
    return TicketRefusedError(
        TicketRefusal.UNNAMED, f"block {name} of cache group {key.group} is not on its list"
    )


@dataclass(frozen=True)
class Prefix(Sequence[bytes]):
    """The beginning of a prompt: at every boundary the hash that names all before it."""

    layout: Layout
    """Of its blocks."""
    hashes: Sequence[bytes]
    """Hash chain, up to where it ends."""
    tenant: str
    """Name of the tenant of the prefix."""
    quality: Quality = Quality.LOSSLESS
    """Class of its blocks."""

    @property
    def step(self) -> int:
        """Hashes between two boundaries."""
        return self.layout.boundary_tokens // self.layout.tokens_per_hash

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self) * self.layout.boundary_tokens

    def __len__(self) -> int:
        return len(self.hashes) // self.step

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Prefix: ...
    def __getitem__(self, index: int | slice) -> bytes | Prefix:
        if isinstance(index, int):
            if not 0 <= index < len(self):
                raise IndexError(f"boundary {index} of {len(self)}")
            return self.hashes[(index + 1) * self.step - 1]
        end = index.indices(len(self))[1]
        return Prefix(self.layout, self.hashes[: end * self.step], self.tenant, self.quality)

    def keys(self, have_tokens: int) -> Iterator[BlockKey]:
        """Blocks of it that a pool with so much of it can use and lacks."""
        final = self.num_tokens
        for group in self.layout.groups:
            span = group.tokens_per_block
            for end in range(have_tokens + span, final + 1, span):
                if is_worth_sending(group, end, have_tokens=have_tokens, final_tokens=final):
                    yield block_key(self.layout, group, self.hashes, end)
