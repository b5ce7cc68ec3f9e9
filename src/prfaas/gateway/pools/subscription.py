"""One pool's events, checked for order and applied: a protocol without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prfaas.core.invariants import check_invariants
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.errors import PeerError
from prfaas.gateway.routing.part_states import PoolView
from prfaas.gateway.routing.transfer_tracker import Transfers
from prfaas.wire.messages.base import Goodbye, Message, Ping
from prfaas.wire.messages.codec import AnyMessage, tag_of
from prfaas.wire.messages.gateway import (
    Evicted,
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    TenantUse,
    TierUse,
    TransferEnded,
)
from prfaas.wire.messages.layouts import LayoutFacts
from prfaas.wire.messages.link import Missing, Refused


class Subscription:
    """Known blocks of one pool: a snapshot, then events without a gap.

    Args:
        index: Follows the pool's blocks.
        transfers: Observer of the transfers that end.
        on_change: Called with what is known of the pool whenever that has changed.
    """

    def __init__(
        self,
        pool: str,
        index: PrefixIndex,
        transfers: Transfers,
        on_change: Callable[[PoolView], None] = lambda _: None,
    ) -> None:
        self._on_change = on_change
        self._pool = pool
        self._index = index
        self._transfers = transfers
        self._next_seq = 0
        self.view = PoolView()
        """State of it that routing reads."""
        self.facts: dict[bytes, LayoutFacts] = {}
        """Facts of layouts by layout id, if the pool node has sent them."""
        self.tiers: dict[str, TierUse] = {}
        """Contents of its tiers, by name."""
        self.tenants: dict[str, TenantUse] = {}
        """Bytes of tenants there, by their tags."""
        self.num_leased = 0
        """Blocks of transfers there that nobody has loaded yet."""
        self.leased_bytes = 0
        """Bytes of these."""
        self.takes: frozenset[str] = frozenset()
        """Tags of the messages that it takes; empty before the end of the snapshot."""

    def may_send(self, message: Message) -> bool:
        """Return True if the pool node knows a kind of message."""
        return not self.takes or tag_of(type(message)) in self.takes

    @property
    def is_live(self) -> bool:
        """Return True if the snapshot is complete and no event was missed since."""
        return self._index.is_live(self._pool)

    def validate(self) -> None:
        """Check what has to hold whenever nothing is being done; AssertionError if it does not."""
        pool, view, is_live = self._pool, self.view, self.is_live
        contents = (self.tiers, self.tenants, self.takes, self.num_leased, self.leased_bytes)
        layouts = {layout.layout_id for layout in view.layouts.values()}
        check_invariants(
            [
                (f"{pool} is live for one of index and routing", view.is_live == is_live),
                (f"{pool} is not connected, and has contents", is_live or not any(contents)),
                (f"{pool} has facts of a layout of no engine", self.facts.keys() <= layouts),
            ]
        )

    def begin(self) -> None:
        """A connection stands; a snapshot comes next."""
        self._index.begin_snapshot(self._pool)

    def lose(self) -> None:
        """The connection is gone: nothing that was known holds any more."""
        self._index.lose(self._pool)
        self.facts, self.tiers, self.tenants, self.takes = {}, {}, {}, frozenset()
        self.num_leased, self.leased_bytes = 0, 0
        self._transfers.lost(self._pool)
        self._tell(PoolView())

    def receive(self, message: AnyMessage) -> None:
        """Apply the next message of the stream.

        Raises:
            PeerError: It may not come now: events before the snapshot's end, a gap, an unknown one.
        """
        match message:
            case Ping():
                return
            case Goodbye():
                raise PeerError(f"the pool node refuses us: {message.reason}")
            case Snapshot() | SnapshotEnd():
                self._snapshot(message)
            case Stored() | Evicted() | TransferEnded() | PoolState():
                self._in_order(message.seq)
                self._event(message)
            case Missing():
                # Somebody was faster: what a copy lacks is computed when it is asked for.
                return
            case Refused():
                self._transfers.refused(self._pool, message)
            case _:
                raise PeerError(f"{type(message).__name__} is no message for a gateway")

    def _snapshot(self, message: Snapshot | SnapshotEnd) -> None:
        if self.is_live:
            raise PeerError("a snapshot after its end")
        if isinstance(message, Snapshot):
            self._index.add(self._pool, message.layout_id, message.keys)
        else:
            self._next_seq, self.takes = message.next_seq, frozenset(message.takes)
            self._index.end_snapshot(self._pool)
            self._tell(PoolView(is_live=True))

    def _in_order(self, seq: int) -> None:
        if not self.is_live:
            raise PeerError(f"event {seq} before the end of the snapshot")
        if seq != self._next_seq:
            raise PeerError(f"event {seq}, expected {self._next_seq}: events were lost")
        self._next_seq += 1

    def _event(self, event: Stored | Evicted | TransferEnded | PoolState) -> None:
        match event:
            case Stored():
                self._index.add(self._pool, event.layout_id, event.keys)
            case Evicted():
                self._index.remove(self._pool, event.layout_id, event.keys)
            case TransferEnded():
                self._transfers.ended(self._pool, event)
            case PoolState():
                layouts = {n: s.layout() for n, s in event.layouts.items()}
                self._learn(event.facts, layouts)
                self.tiers, self.tenants = dict(event.tiers), event.tenants
                self.num_leased, self.leased_bytes = event.num_leased, event.leased_bytes
                room = self.tiers["host"].capacity_bytes if "host" in self.tiers else 0
                links, draining = dict(event.links), event.is_draining
                self._tell(PoolView(True, layouts, links, dict(event.telemetry), draining, room))

    def _learn(self, facts: list[LayoutFacts], layouts: Mapping[str, Layout]) -> None:
        """Keep facts for as long as an engine has their layout."""
        known = self.facts | {each.layout_id: each for each in facts}
        present = {layout.layout_id for layout in layouts.values()}
        self.facts = {layout_id: known[layout_id] for layout_id in present & known.keys()}

    def _tell(self, view: PoolView) -> None:
        self.view = view
        self._on_change(view)
