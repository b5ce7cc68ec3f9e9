"""Gateway and pool, over TLS: contents of a pool, and every change."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX
from prfaas.core.transfer.transfer_state import TransferEnd, TransferState
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import (
    SHARES_MAX,
    TENANTS_HELD_MAX,
    TENANTS_SHOWN_MAX,
    TIERS_MAX,
    Count,
    Key,
    LayoutId,
    MaxAge,
    Name,
    Nanoseconds,
    PurgedSource,
    Ratio,
    Tag,
    Takes,
    Text,
    TransferId,
)
from prfaas.wire.messages.layouts import LAYOUTS_MAX, LayoutFacts, LayoutSpec

RATE_MAX = 10**14


class Subscribe(Message, tag="subscribe"):
    """Subscription to the contents of a pool, and to every later change."""

    gateway: Name
    shares: Annotated[dict[Tag, tuple[Ratio, Ratio]], msgspec.Meta(max_length=SHARES_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    """Reserve and limit of tenants with a share of memory and disk, by their tags."""
    ages: Annotated[dict[Tag, MaxAge], msgspec.Meta(max_length=SHARES_MAX + 1)] = msgspec.field(
        default_factory=dict
    )
    """Largest ages of blocks by the tags of tenants, seconds; that of the empty tag is for all
    others."""


class Snapshot(Message, tag="snapshot"):
    """Part of a snapshot of a pool. The last part is followed by events from `next_seq` on."""

    epoch: Text
    next_seq: Count
    layout_id: LayoutId
    keys: list[Key]


class SnapshotEnd(Message, tag="snapshot_end"):
    """The snapshot is complete. `takes` has the messages that gateways may send."""

    epoch: Text
    next_seq: Count
    takes: Takes = msgspec.field(default_factory=list)


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
    kind: TransferEnd
    reason: Text
    """Text for people."""
    num_blocks: Count
    num_bytes: Count
    duration_ns: Count
    last_block_age_ns: Count
    """Time between the last change of a block and this event."""
    num_missing: Count = 0
    """Blocks of a pull that the source did not have."""

    @property
    def state(self) -> TransferState:
        """The final state of the transfer at this pool."""
        return self.kind.state


class LinkLease(Message, tag="link_lease"):
    """The rate that all links of a pool node to other sites may send together, for a time.

    Part of the budget of its site (`core/transfer/site_budget.py`); a pool node without such a
    budget ignores it.
    """

    bits_per_s: Annotated[int, msgspec.Meta(ge=1, le=RATE_MAX)]
    for_ns: Nanoseconds


class Order(Message, tag="order"):
    """An order on the blocks of a source, a tenant or a prompt (`core/cache/keep_rules.py`).

    "purge" drops the blocks in all tiers; of a tenant its keys are destroyed. None is taken until
    the end, two minutes at most. "pin" keeps the blocks of a prompt in memory until the end, also
    those that come later. A repetition replaces the order of the same gateway on the same scope.
    """

    job: Count
    effect: Name
    """A value of `Effect`; others are answered in words."""
    source: PurgedSource = ""
    """Name of a pool."""
    tenant: Tag | None = None
    """Tag of a tenant, empty for blocks without one; None for a source."""
    hashes: Annotated[bytes, msgspec.Meta(max_length=MANIFEST_BYTES_MAX)] | None = None
    """Of the blocks of a prompt, one behind the other; None for all of the source or tenant."""
    for_ns: Nanoseconds = 0
    """0 ends the order."""
    is_dry: bool = False
    """Only count the blocks."""


class OrderDone(Message, tag="order_done"):
    """Answer to `Order`."""

    job: Count
    num_blocks: Count = 0
    """Names that no tier has any more; of a pin, blocks that are pinned. With `is_dry`, that are in
    a tier."""
    host_bytes: Count = 0
    """Bytes of these in memory; of a pin in any tier."""
    disk_bytes: Count = 0
    shared_bytes: Count = 0
    """In the tier of the site: every pool node of the site reports them."""
    num_transfers: Count = 0
    """Open transfers that were ended for a purge."""
    num_left_out: Count = 0
    """Blocks that are here and not pinned: no more of the memory may be pinned."""
    was_in_force: bool = False
    """Of the end of an order: False if it had ended before, as after a restart of the pool node.
    Purged blocks may have been taken since."""
    problem: Text = ""
    """Reason why nothing was done, or some blocks remain; otherwise empty."""

    @property
    def num_bytes(self) -> int:
        """Bytes in all tiers."""
        return self.host_bytes + self.disk_bytes + self.shared_bytes


RATIO_MAX = 1e6


class LinkTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """State of a link `age_ns` before the message was created. Zero is unknown."""

    age_ns: Nanoseconds
    goodput_bits_per_s: Count
    """Throughput of the link while it is busy (`core/transfer/link_goodput.py`). 0 if it was never
    filled, or only while it had a smaller part of a site's budget than it would have now."""
    rtt_ns: Nanoseconds
    """Round trip of the last ping."""
    queued_bytes: Count
    """Waiting for a connection."""
    in_flight_bytes: Count
    """Sent, and not known to have arrived."""
    retransmits: Count
    """Segments sent again since the connections were opened."""
    delivery_bits_per_s: Count
    """Sum over all connections, from the kernel."""
    window_segments: Count
    """Congestion windows of all connections together."""
    num_connections: Count
    budget_bits_per_s: Count = 0
    """Limit of the rate; of an idle link, what it would be with something to send. 0 is none."""
    open_arrived_bytes: Count = 0
    """Bytes of open transfers that have arrived."""
    arrived_bytes: Count = 0
    """Acknowledged since the connections were opened, headers and TLS included."""
    coding_ratio: Annotated[float, msgspec.Meta(ge=1, le=RATIO_MAX)] = 1.0
    """Bytes of blocks for a byte that the link carries, of what was sent last. The rates above are
    of bytes that the link carries."""
    encryption: Annotated[str, msgspec.Meta(max_length=32)] = "tls"
    """Protection of its data connections: a value of `LinkEncryption`."""
    busy_ns: Nanoseconds = 0
    """Time in which bytes waited for a connection, since the pool node was started."""
    queued_by_tenant: Annotated[dict[str, Count], msgspec.Meta(max_length=TENANTS_SHOWN_MAX)] = {}
    """Waiting for a connection, by the class of the tenant; those with the most."""


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of one tier of a pool."""

    used_bytes: Count
    capacity_bytes: Count
    num_blocks: Count


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a tenant's blocks in a pool."""

    host_bytes: Count
    disk_bytes: Count


class PoolState(Message, tag="pool_state"):
    """Event: engines, links and tiers of this pool.

    Sent when an engine or a link changes, while a link is busy, and once in half a second at most
    when the contents of the tiers have changed.
    """

    seq: Count
    layouts: dict[str, LayoutSpec]
    """By engine name."""
    links: dict[str, bool]
    """By peer name: whether the link is up."""
    telemetry: dict[str, LinkTelemetry] = msgspec.field(default_factory=dict)
    """By peer name."""
    is_draining: bool = False
    """True if it is stopping and takes no new transfers."""
    tiers: Annotated[dict[Name, TierUse], msgspec.Meta(max_length=TIERS_MAX)] = msgspec.field(
        default_factory=dict
    )
    """By name, "host" or "disk"."""
    tenants: Annotated[dict[Tag, TenantUse], msgspec.Meta(max_length=TENANTS_HELD_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    """By the tag of the tenant; those that hold the most."""
    num_leased: Count = 0
    """Blocks of transfers that are not loaded yet."""
    leased_bytes: Count = 0
    """Bytes of these."""
    facts: Annotated[list[LayoutFacts], msgspec.Meta(max_length=LAYOUTS_MAX)] = msgspec.field(
        default_factory=list
    )
    """Facts of the layouts in `layouts`; sent when a gateway subscribes and when an engine
    connects, and valid from then on. An older pool node sends none."""
