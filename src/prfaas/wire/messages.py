"""The messages that control frames carry, as typed structs in msgpack.

Three conversations use them: engine and pool on a unix socket, pool and pool, gateway and pool.
Unknown message types and missing fields are a `PeerError`; unknown fields are ignored, so that one
side can be newer than the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from prfaas.core.blocks import (
    HASH_BYTES,
    LAYOUT_ID_BYTES,
    BlockKey,
    CacheGroup,
    GroupKind,
    Layout,
)
from prfaas.errors import PeerError
from prfaas.wire.frames import TRANSFER_ID_BYTES, encode_control

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
LayoutId = Annotated[bytes, msgspec.Meta(min_length=LAYOUT_ID_BYTES, max_length=LAYOUT_ID_BYTES)]
TransferId = Annotated[
    bytes, msgspec.Meta(min_length=TRANSFER_ID_BYTES, max_length=TRANSFER_ID_BYTES)
]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Of a monotonic clock, too: after 104 days without a restart of the host it is beyond 2**53."""
PULL_KEYS_MAX = 16_384
"""Blocks of one pull: under a megabyte of names."""
TENANTS_SHOWN_MAX = 32
TIERS_MAX = 8
TICKET_BYTES_MAX = 16 << 10
TicketBytes = Annotated[bytes, msgspec.Meta(max_length=TICKET_BYTES_MAX)]
"""A sealed ticket (`wire/tickets.py`). An empty one is refused where it is checked."""
BlockHash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Key = tuple[Count, BlockHash]
PullKeys = Annotated[list[Key], msgspec.Meta(max_length=PULL_KEYS_MAX)]
Extent = tuple[Count, Count]
"""Offset and length, bytes, within a row of the engine's shared memory."""


class Message(msgspec.Struct, tag_field="t", kw_only=True):
    """Base of all messages."""


# --- both ways, first ---------------------------------------------------------------------------


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A cache group as it is announced."""

    index: Count
    kind: GroupKind
    tokens_per_block: Annotated[int, msgspec.Meta(ge=1)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    window_tokens: Count = 0


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layout as it is announced."""

    layout_id: LayoutId
    tokens_per_hash: Annotated[int, msgspec.Meta(ge=1)]
    hash_seed: Text
    groups: Annotated[list[GroupSpec], msgspec.Meta(min_length=1, max_length=256)]

    def __post_init__(self) -> None:
        """Refuse blocks that end between two hashes: nothing names them."""
        for group in self.groups:
            if group.tokens_per_block % self.tokens_per_hash:
                raise ValueError(
                    f"cache group {group.index}: tokens_per_block is {group.tokens_per_block}, "
                    f"no multiple of tokens_per_hash, {self.tokens_per_hash}"
                )

    def layout(self) -> Layout:
        """The same, as the core knows it."""
        groups = tuple(
            CacheGroup(g.index, g.kind, g.tokens_per_block, g.block_bytes, g.window_tokens)
            for g in self.groups
        )
        return Layout(self.layout_id, self.tokens_per_hash, self.hash_seed, groups)


def layout_spec(layout: Layout) -> LayoutSpec:
    """A layout, ready to announce."""
    groups = [
        GroupSpec(
            index=g.index,
            kind=g.kind,
            tokens_per_block=g.tokens_per_block,
            block_bytes=g.block_bytes,
            window_tokens=g.window_tokens,
        )
        for g in layout.groups
    ]
    return LayoutSpec(
        layout_id=layout.layout_id,
        tokens_per_hash=layout.tokens_per_hash,
        hash_seed=layout.hash_seed,
        groups=groups,
    )


class Ping(Message, tag="ping"):
    """Nothing to say for a while: still here. With a time, the peer answers with `Pong`.

    `connections` are the numbers of the sender's data connections; older ones are gone.
    """

    at_ns: Nanoseconds = 0
    connections: Annotated[list[Count], msgspec.Meta(max_length=256)] = []


class Pong(Message, tag="pong"):
    """Answer to a `Ping` that carried a time, with that time.

    `received` says how many bytes came so far over each data connection, by its number.
    """

    at_ns: Nanoseconds
    received: dict[int, int] = {}


class Goodbye(Message, tag="goodbye"):
    """The last message on a connection that is closed for what the peer did, or is."""

    reason: Text


# --- engine to pool, on a unix socket -----------------------------------------------------------


class EngineHello(Message, tag="engine_hello"):
    """First message of an engine; its shared memory's descriptor travels with it.

    `extents` says, for every cache group, which parts of a row carry its bytes.
    """

    engine: Name
    layout: LayoutSpec
    row_bytes: Annotated[int, msgspec.Meta(ge=1)]
    num_rows: Annotated[int, msgspec.Meta(ge=1)]
    extents: dict[int, list[Extent]]


class Push(Message, tag="push"):
    """From now on, `Store`s that name this transfer are pushed to `peer` as well."""

    transfer_id: TransferId
    peer: Name
    ticket: TicketBytes = b""


class Store(Message, tag="store"):
    """Keep these rows as blocks; `pushed` are the ones that the transfer still needs."""

    job: Count
    keys: list[Key]
    rows: list[Count]
    transfer_id: TransferId | None = None
    pushed: list[bool] = []


class StoreDone(Message, tag="store_done"):
    """Answer to `Store`: the rows may be reused."""

    job: Count
    stored: bool


class PushDone(Message, tag="push_done"):
    """The engine finished the request of this transfer.

    `rest` are blocks that the transfer needs and that were not stored for it: the engine had them
    cached. What the pool node holds of them is pushed, then the transfer is committed.
    """

    transfer_id: TransferId
    rest: list[Key] = []


class Lookup(Message, tag="lookup"):
    """Which of these blocks are there? Asked anew until none is on its way."""

    job: Count
    keys: list[Key]
    transfer_id: TransferId | None = None
    source: Text = ""


class LookupDone(Message, tag="lookup_done"):
    """Answer to `Lookup`: one byte a key, `HIT`, `MISS` or `ON_ITS_WAY`."""

    job: Count
    found: bytes


MISS, HIT, ON_ITS_WAY = 0, 1, 2


class Load(Message, tag="load"):
    """Copy these blocks into these rows."""

    job: Count
    keys: list[Key]
    rows: list[Count]


class LoadDone(Message, tag="load_done"):
    """Answer to `Load`: one byte a key, 1 if the row now holds the block."""

    job: Count
    loaded: bytes


class Touch(Message, tag="touch"):
    """These blocks were used: they should be evicted later than others."""

    keys: list[Key]


# --- pool to pool, over TLS ---------------------------------------------------------------------


class PoolHello(Message, tag="pool_hello"):
    """First message on a link; the name has to be the one in the certificate.

    `resumes` are the sender's open transfers: what else was open over an earlier connection is
    over. `link` is a word of the sender's that its data connections repeat.
    """

    pool: Name
    epoch: Text
    link: Name
    resumes: list[TransferId] = []


class Join(Message, tag="join"):
    """First message on a data connection: which link it belongs to. Fragments follow."""

    pool: Name
    link: Text
    number: Count = 0


class Resumed(Message, tag="resumed"):
    """Answer to `PoolHello`, after an `Arrived`, `Committed` or `Abort` for what is resumed."""

    epoch: Text


class Arrived(Message, tag="arrived"):
    """These blocks of a transfer are in the receiver's store."""

    transfer_id: TransferId
    layout_id: LayoutId
    keys: list[Key]


class Committed(Message, tag="committed"):
    """Every block of the transfer arrived."""

    transfer_id: TransferId


class Offer(Message, tag="offer"):
    """Blocks of this transfer follow, if the ticket allows it. They need not wait for the answer.

    Saying it again, as after a lost connection, changes nothing while the transfer is open.
    """

    transfer_id: TransferId
    ticket: TicketBytes = b""


class Accepted(Message, tag="accepted"):
    """Answer to `Offer`: blocks of this transfer are taken."""

    transfer_id: TransferId


class Refused(Message, tag="refused"):
    """Answer to `Offer`: blocks of this transfer are dropped."""

    transfer_id: TransferId
    reason: Text


class Commit(Message, tag="commit"):
    """This transfer has that many blocks; it is committed when all of them arrived.

    `missing` were asked for by a `Pull`, and are not there.
    """

    transfer_id: TransferId
    num_blocks: Count
    missing: PullKeys = []


class Abort(Message, tag="abort"):
    """This transfer is over without a commit. Pools and gateways send it."""

    transfer_id: TransferId
    reason: Text


# --- pulls: gateway or engine to pool, and pool to pool against the direction of the link --------


class Pull(Message, tag="pull"):
    """Fetch these blocks from `source`, as a transfer that the ticket allows."""

    transfer_id: TransferId
    source: Name
    keys: PullKeys
    ticket: TicketBytes = b""


class Missing(Message, tag="missing"):
    """Answer to `Pull`: the source does not have these; it sends the others."""

    transfer_id: TransferId
    keys: PullKeys


# --- gateway to pool, over TLS ------------------------------------------------------------------


class Subscribe(Message, tag="subscribe"):
    """Tell me what you hold, and every change from then on."""

    gateway: Name


class Snapshot(Message, tag="snapshot"):
    """Part of what a pool holds. The last part is followed by events from `next_seq` on."""

    epoch: Text
    next_seq: Count
    layout_id: LayoutId
    keys: list[Key]


class SnapshotEnd(Message, tag="snapshot_end"):
    """The snapshot is complete."""

    epoch: Text
    next_seq: Count


class Stored(Message, tag="stored"):
    """Event: blocks were stored."""

    seq: Count
    layout_id: LayoutId
    keys: list[Key]


class Evicted(Message, tag="evicted"):
    """Event: blocks were dropped."""

    seq: Count
    layout_id: LayoutId
    keys: list[Key]


class TransferEnded(Message, tag="transfer_ended"):
    """Event: a transfer ended at this pool. Durations in nanoseconds."""

    seq: Count
    transfer_id: TransferId
    direction: Name
    peer: Text
    state: Name
    reason: Text
    num_blocks: Count
    num_bytes: Count
    duration_ns: Count
    last_block_age_ns: Count
    """How long before this event the last block arrived or left."""
    num_missing: Count = 0
    """Blocks of a pull that the source did not have."""


class LinkTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a link, as of `age_ns` before the message was made. Zero is unknown."""

    age_ns: Nanoseconds
    goodput_bits_per_s: Count
    """Of the last busy half second."""
    rtt_ns: Nanoseconds
    """Of the last ping."""
    queued_bytes: Count
    """Waiting for a connection."""
    in_flight_bytes: Count
    """Sent, and not known to have arrived."""
    retransmits: Count
    """Segments sent again since the connections were opened."""
    delivery_bits_per_s: Count
    """Of the kernel, all connections together."""
    window_segments: Count
    """Congestion windows of all connections together."""
    num_connections: Count
    budget_bits_per_s: Count = 0
    open_arrived_bytes: Count = 0
    """What has arrived of transfers that have not ended."""
    arrived_bytes: Count = 0
    """Acknowledged since the connections were opened, headers and TLS included."""
    queued_by_tenant: Annotated[dict[str, Count], msgspec.Meta(max_length=TENANTS_SHOWN_MAX)] = {}
    """Waiting for a connection, by the class of the tenant; those with the most."""


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier of a pool holds."""

    used_bytes: Count
    capacity_bytes: Count
    num_blocks: Count


class PoolState(Message, tag="pool_state"):
    """Event: engines, links and tiers of this pool.

    Sent when an engine or a link changes, while a link is busy, and once in half a second at most
    when what the tiers hold has changed.
    """

    seq: Count
    layouts: dict[str, LayoutSpec]
    """By engine name."""
    links: dict[str, bool]
    """By peer name: whether the link is up."""
    telemetry: dict[str, LinkTelemetry] = {}
    """By peer name."""
    is_draining: bool = False
    """Whether it takes no new transfers, being about to stop."""
    tiers: Annotated[dict[Name, TierUse], msgspec.Meta(max_length=TIERS_MAX)] = {}
    """By name, "host" or "disk"."""
    num_leased: Count = 0
    """Blocks of transfers that nobody has loaded yet."""


AnyMessage = (
    Ping
    | Pong
    | Goodbye
    | EngineHello
    | Push
    | Store
    | StoreDone
    | PushDone
    | Lookup
    | LookupDone
    | Load
    | LoadDone
    | Touch
    | PoolHello
    | Join
    | Resumed
    | Arrived
    | Committed
    | Offer
    | Accepted
    | Refused
    | Commit
    | Abort
    | Pull
    | Missing
    | Subscribe
    | Snapshot
    | SnapshotEnd
    | Stored
    | Evicted
    | TransferEnded
    | PoolState
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """A whole control frame."""
    return encode_control(_encoder.encode(message))


def decode(payload: bytes) -> AnyMessage:
    """The message in a control frame.

    Raises:
        PeerError: The payload is no known message.
    """
    try:
        message: AnyMessage = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"not a prfaas message: {error}") from None
    return message


def keys_of(keys: list[Key]) -> list[BlockKey]:
    """Wire keys as the core knows them."""
    return [BlockKey(group, block_hash) for group, block_hash in keys]


def wire_keys(keys: Iterable[BlockKey]) -> list[Key]:
    """Keys of the core, ready for the wire."""
    return [(key.group, key.block_hash) for key in keys]
