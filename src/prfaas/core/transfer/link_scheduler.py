"""Send order of a link, and retransmissions.

Blocks are cut into fragments, and every connection of a link takes the next fragment from here
when it has room, so a block crosses the link at the rate of all connections together. Transfers
share the link by bytes, first between tenants and then between the transfers of one: who has been
given least, in proportion to the tenant's weight, continues. Two things go before the others'
bulk: the first block of a transfer, because decode cannot plan before, and the rest of a finished
transfer once it is small, because decode waits for nothing else. A started block is finished first,
so a receiver holds few unfinished ones. A tenant that is ahead of its rate goes when nobody else
has anything to send: the link is never idle for it, and how much it sends in all is for whoever
signs tickets.

A fragment stays in flight until the other side has said that its block arrived. When a connection
is lost, what was in flight on it is queued again, before everything else of its transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prfaas.core.codec.codecs import Form
from prfaas.core.kv.blocks import BlockName
from prfaas.units import NS_PER_S

URGENT_BYTES = 8 * 2**20
"""The rest of a finished transfer is urgent from here on."""
URGENT_RUN_BYTES = 16 * 2**20
"""After that many urgent bytes one block of the others goes: a stream of small transfers cannot
keep a large one waiting for ever."""


BURST_NS = 50_000_000
"""Burst of a tenant: connections are not served with nanosecond precision."""


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Weight and rate of a tenant on a link."""

    name: str = ""
    weight: float = 1.0
    """Its share against the others'."""
    bytes_per_s: int = 0
    """Beyond it the others go first; 0 is no limit."""


@dataclass(eq=False, slots=True)
class OutgoingBlock:
    """A block to be sent for a transfer."""

    transfer_id: bytes
    name: BlockName
    """Layout id and key."""
    digest: bytes
    """Over name and bytes."""
    data: bytes | bytearray | memoryview
    """Its bytes."""
    tenant: TenantShare = TenantShare()
    is_inherited: bool = False
    """True if it came here from elsewhere, or was computed from such a block."""
    form: Form | None = None
    """Rounded form in which it goes; None if no bit may be lost."""
    stream: bytes | bytearray | None = None
    """That form, once its first fragment was taken."""
    has_arrived: bool = False
    """True if it is acknowledged, or not wanted any more."""
    born_s: int = 0
    """Unix time at which it was computed (`core/cache/eviction.py`)."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that are cut into fragments."""
        return len(self.data) if self.form is None else self.form.coded_bytes


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a block, for one connection."""

    block: OutgoingBlock
    offset: int
    num_bytes: int
    is_cut: bool = False
    """It was sent like this once, and has to be the same if it goes again."""

    @property
    def data(self) -> memoryview:
        """Its bytes; of a rounded block, which has to have its stream, those of the stream."""
        block = self.block
        whole = block.data if block.stream is None else block.stream
        return memoryview(whole)[self.offset : self.offset + self.num_bytes]

    @property
    def block_bytes(self) -> int:
        """Bytes of the block that it stands for."""
        whole, wire = len(self.block.data), self.block.wire_bytes
        if whole == wire:
            return self.num_bytes
        return (self.offset + self.num_bytes) * whole // wire - self.offset * whole // wire


@dataclass(eq=False, slots=True)
class _Lane:
    """Send state of a transfer."""

    tenant: TenantShare
    waiting: deque[Fragment] = field(default_factory=deque)
    blocks: dict[BlockName, OutgoingBlock] = field(default_factory=dict)
    """Bytes that have not arrived."""
    share: int = 0
    """Bytes given so far, from where the least served transfer stood when this one came."""
    first_bytes: int = 0
    """Rest of its first block."""
    waiting_bytes: int = 0
    is_finished: bool = False

    @property
    def is_urgent(self) -> bool:
        return self.first_bytes > 0 or (self.is_finished and self.waiting_bytes <= URGENT_BYTES)


class LinkShare:
    """Shares a link between transfers, and remembers what is in flight.

    A take costs time in proportion to the transfers that have something to send.

    Args:
        fragment_bytes: Largest fragment; may be changed at any time.
    """

    def __init__(self, fragment_bytes: int) -> None:
        self.fragment_bytes = self.first_fragment_bytes = fragment_bytes
        """Largest fragment, and that of first blocks: connections that are free early carry more of
        them."""
        self._lanes: dict[bytes, _Lane] = {}
        self._in_flight: dict[int, dict[OutgoingBlock, list[Fragment]]] = {}
        self._started: dict[bool, OutgoingBlock | None] = {True: None, False: None}
        """The block that is being sent, by whether it is urgent."""
        self._urgent_run = 0
        self._served: dict[str, float] = {}
        """By tenant that has something to send, bytes by weight."""
        self._due_ns: dict[str, int] = {}
        """By tenant with a rate, when it is no longer ahead of that."""
        self.queued_bytes = 0
        """Fragments that no connection has taken."""
        self.in_flight_bytes = 0
        """Taken by a connection and not known to have arrived."""

    def add(self, block: OutgoingBlock) -> None:
        """Queue a block behind the others of its transfer."""
        lane = self._lanes.get(block.transfer_id)
        if lane is None:
            lane = self._lanes[block.transfer_id] = _Lane(
                block.tenant, share=self._least_share(block.tenant)
            )
            lane.first_bytes = block.wire_bytes
        if not lane.waiting:
            lane.share = max(lane.share, self._least_share(block.tenant))
            self._rejoin(block.tenant)
        lane.blocks[block.name] = block
        self._put(lane, Fragment(block, 0, block.wire_bytes), is_first=False)

    def finish(self, transfer_id: bytes) -> None:
        """Close the queue of a transfer."""
        if transfer_id in self._lanes:
            self._lanes[transfer_id].is_finished = True

    def drop(self, transfer_id: bytes) -> None:
        """Forget a transfer; harmless if it is unknown."""
        lane = self._lanes.pop(transfer_id, None)
        if lane is None:
            return
        self.queued_bytes -= lane.waiting_bytes
        for block in lane.blocks.values():
            self._settle(block)

    def arrived(self, transfer_id: bytes, name: BlockName) -> None:
        """The receiver has this block: what is left of it need not go."""
        lane = self._lanes.get(transfer_id)
        block = lane.blocks.pop(name, None) if lane else None
        if block is not None:
            self._settle(block)

    @property
    def queued_by_tenant(self) -> dict[str, int]:
        """Bytes that no connection has taken yet, by the class of their tenant."""
        queued: dict[str, int] = {}
        for lane in list(self._lanes.values()):
            if lane.waiting_bytes:
                name = lane.tenant.name
                queued[name] = queued.get(name, 0) + lane.waiting_bytes
        return queued

    def queued_beside(self, transfer_id: bytes) -> int:
        """Bytes of all other transfers that no connection has taken yet."""
        lane = self._lanes.get(transfer_id)
        return self.queued_bytes - (lane.waiting_bytes if lane is not None else 0)

    def take(self, connection: int, now_ns: int = 0) -> Fragment | None:
        """Return the next fragment of a connection; it counts as in flight; returns none if there
        is nothing to send.

        Args:
            now_ns: Monotonic; what tenants' rates are measured by.
        """
        while (lane := self._next_lane(now_ns)) is not None:
            fragment = self._cut(lane)
            lane.waiting_bytes -= fragment.num_bytes
            self.queued_bytes -= fragment.num_bytes
            if fragment.block.has_arrived:
                continue
            self._charge(lane, fragment, now_ns)
            blocks = self._in_flight.setdefault(connection, {})
            blocks.setdefault(fragment.block, []).append(fragment)
            self.in_flight_bytes += fragment.num_bytes
            return fragment
        return None

    def lost(self, connection: int) -> None:
        """A connection is gone: what was in flight on it goes again."""
        for block, fragments in self._in_flight.pop(connection, {}).items():
            self._landed(fragments)
            lane = self._lanes.get(block.transfer_id)
            if lane is not None and not block.has_arrived:
                if not lane.waiting:
                    self._rejoin(lane.tenant)
                for fragment in reversed(fragments):
                    self._put(lane, fragment, is_first=True)

    def invariants(self) -> Iterator[tuple[str, bool]]:
        """Name what has to hold between two calls, and return whether it does."""
        waiting = {
            id(lane): sum(one.num_bytes for one in lane.waiting) for lane in self._lanes.values()
        }
        yield "queued bytes are counted", self.queued_bytes == sum(waiting.values())
        for lane in self._lanes.values():
            yield "bytes of a transfer are counted", lane.waiting_bytes == waiting[id(lane)]
        blocks = {block for lane in self._lanes.values() for block in lane.blocks.values()}
        in_flight = {block for found in self._in_flight.values() for block in found}
        yield "blocks in flight have not arrived", in_flight <= blocks
        sent = [
            part for found in self._in_flight.values() for parts in found.values() for part in parts
        ]
        yield "bytes in flight are counted", self.in_flight_bytes == sum(p.num_bytes for p in sent)

    def _cut(self, lane: _Lane) -> Fragment:
        """The next fragment; what is left of its block stays where it was."""
        whole = lane.waiting.popleft()
        if whole.is_cut or whole.block.has_arrived:
            return whole
        most = self.first_fragment_bytes if lane.first_bytes > 0 else self.fragment_bytes
        size = min(most, whole.num_bytes)
        if size < whole.num_bytes:
            rest = Fragment(whole.block, whole.offset + size, whole.num_bytes - size)
            lane.waiting.appendleft(rest)
        return Fragment(whole.block, whole.offset, size, is_cut=True)

    def _put(self, lane: _Lane, fragment: Fragment, *, is_first: bool) -> None:
        lane.waiting.appendleft(fragment) if is_first else lane.waiting.append(fragment)
        lane.waiting_bytes += fragment.num_bytes
        self.queued_bytes += fragment.num_bytes

    def _settle(self, block: OutgoingBlock) -> None:
        block.has_arrived = True
        for is_urgent, started in self._started.items():
            if started is block:
                self._started[is_urgent] = None
        for blocks in self._in_flight.values():
            self._landed(blocks.pop(block, ()))

    def _landed(self, fragments: Iterable[Fragment]) -> None:
        self.in_flight_bytes -= sum(fragment.num_bytes for fragment in fragments)

    def _active(self) -> Iterator[_Lane]:
        return (lane for lane in self._lanes.values() if lane.waiting)

    def _least_share(self, tenant: TenantShare) -> int:
        mine = (lane.share for lane in self._active() if lane.tenant.name == tenant.name)
        return min(mine, default=0)

    def _rejoin(self, tenant: TenantShare) -> None:
        """A tenant that sent nothing for a while has not saved anything up."""
        active = {lane.tenant.name for lane in self._active()}
        if tenant.name not in active:
            least = min((self._served[other] for other in active), default=0)
            self._served = {other: self._served[other] for other in active}
            self._served[tenant.name] = least

    def _ready(self, now_ns: int) -> list[_Lane]:
        """Transfers that may send; those above their rate only if there is no other."""
        if self._due_ns:
            self._due_ns = {name: at for name, at in self._due_ns.items() if at > now_ns - BURST_NS}
        lanes = list(self._active())
        due = [lane for lane in lanes if self._due_ns.get(lane.tenant.name, now_ns) <= now_ns]
        return due or lanes

    def _next_lane(self, now_ns: int) -> _Lane | None:
        ready = self._ready(now_ns)
        urgent = [lane for lane in ready if lane.is_urgent]
        others = [lane for lane in ready if not lane.is_urgent]
        if urgent and others and self._urgent_run > URGENT_RUN_BYTES:
            urgent = []
        lanes = urgent or others
        if not lanes:
            return None
        started = self._started[bool(urgent)]
        for lane in lanes:
            if lane.waiting[0].block is started:
                return lane
        return min(lanes, key=lambda lane: (self._served[lane.tenant.name], lane.share))

    def _charge(self, lane: _Lane, fragment: Fragment, now_ns: int) -> None:
        is_urgent = lane.is_urgent
        ends = fragment.offset + fragment.num_bytes == fragment.block.wire_bytes
        self._started[is_urgent] = None if ends else fragment.block
        self._urgent_run = self._urgent_run + fragment.num_bytes if is_urgent else 0
        lane.share += fragment.num_bytes
        tenant = lane.tenant
        self._served[tenant.name] += fragment.num_bytes / tenant.weight
        if tenant.bytes_per_s:
            began_ns = max(self._due_ns.get(tenant.name, 0), now_ns - BURST_NS)
            took_ns = fragment.num_bytes * NS_PER_S // tenant.bytes_per_s
            self._due_ns[tenant.name] = began_ns + took_ns
        lane.first_bytes = max(0, lane.first_bytes - fragment.num_bytes)
