"""Metrics of a pool node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prfaas.core.codec.gain import CodecSpeed
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.core.transfer.tickets import TicketRefusal
from prfaas.membership.views import MemberMetrics, PartRegistry
from prfaas.series import Families, at_zero
from prfaas.units import NS_PER_S
from prfaas.wire.messages.gateway import LinkTelemetry
from prfaas.wire.renewal import identity_gauge

_BYTES, _SECONDS = 1 / 8, 1 / NS_PER_S
LINK_GAUGES = {
    "goodput_bits_per_s": (
        "goodput_bytes_per_second",
        _BYTES,
        "Throughput of a link while it is busy.",
    ),
    "rtt_ns": ("rtt_seconds", _SECONDS, "Round trip of the last ping over a link."),
    "queued_bytes": ("queued_bytes", 1, "Bytes of KV blocks that wait for a connection of a link."),
    "in_flight_bytes": (
        "in_flight_bytes",
        1,
        "Bytes of KV blocks sent over a link and not acknowledged.",
    ),
    "retransmits": (
        "retransmitted_segments",
        1,
        "Retransmitted segments since the connections of a link were opened.",
    ),
    "delivery_bits_per_s": (
        "delivery_bytes_per_second",
        _BYTES,
        "Delivery rate of a link, from the kernel.",
    ),
    "window_segments": (
        "window_segments",
        1,
        "Congestion windows of a link's connections together.",
    ),
    "num_connections": ("connections", 1, "Data connections of a link."),
    "coding_ratio": (
        "coding_ratio",
        1,
        "Bytes of KV blocks per byte sent over a link, for the latest blocks.",
    ),
}
"""Metrics of a link's telemetry: by field, the name, factor to the base unit, and help."""


class ByteCounter(Protocol):
    """A counter of bytes on links by transfer. Any thread may call it."""

    def add(
        self,
        direction: str,
        peer: str,
        transfer_id: bytes,
        *,
        link_bytes: int = 0,
        wire_bytes: int = 0,
    ) -> None:
        """Count bytes of a transfer."""


class PoolMetrics:
    """Counters and gauges of one pool node, in a separate registry.

    Args:
        moved: Counts by transfer what the counters of links count; None counts nothing.
    """

    def __init__(self, moved: ByteCounter | None = None) -> None:
        self.registry = PartRegistry()
        make = Families(self.registry)
        self.on_read: Callable[[], None] = lambda: None
        """Called before the metrics are read."""
        self.members = MemberMetrics(self.registry, "pool_")
        self.moved = moved
        self.identity_ends = identity_gauge("pool", self.registry)
        self.used_bytes = make.gauge("pool_used_bytes", "Bytes of KV blocks held.", "tier")
        self.capacity_bytes = make.gauge("pool_capacity_bytes", "Limit on bytes held.", "tier")
        self.blocks = make.gauge("pool_blocks", "KV blocks held.", "tier")
        self.pinned_blocks = make.gauge(
            "pool_pinned_blocks", "KV blocks that are pinned by readers."
        )
        self.leased_blocks = make.gauge(
            "pool_leased_blocks", "KV blocks of transfers that are not loaded yet."
        )
        self.pinned_bytes = make.gauge(
            "pool_pinned_bytes", "Bytes of blocks that operators have pinned in memory."
        )
        self.leased_bytes = make.gauge(
            "pool_leased_bytes", "Bytes of blocks of transfers that are not loaded yet."
        )
        self.loose_bytes = make.gauge(
            "pool_loose_bytes",
            "Memory of blocks that are being received or dropped, not in the store.",
        )
        self.promised_bytes = make.gauge(
            "pool_promised_bytes", "Bytes that the tickets of open transfers still allow."
        )
        self.unfinished_bytes = make.gauge(
            "link_unfinished_bytes", "Memory of blocks that have arrived only in part."
        )
        self.open_transfers = make.gauge(
            "open_transfers", "Transfers that have not ended.", "direction"
        )
        self.tenant_keys = make.gauge(
            "pool_tenant_keys", "Keys of tenants that seal blocks on disk."
        )
        self.disk_up = make.gauge("pool_disk_up", "1 while the disk tier accepts blocks.")
        self.blocks_spilled = make.counter(
            "pool_blocks_spilled", "Blocks written to the disk tier."
        )
        self.blocks_promoted = make.counter(
            "pool_blocks_promoted", "Blocks read back from the disk tier."
        )
        self.shared_up = make.gauge(
            "pool_shared_up", "1 while blocks of the shared tier can be found; 0 without one."
        )
        self.shared_requests = make.counter(
            "pool_shared_requests",
            "Requests to the shared tier: ok, failed, late (beyond the deadline of a request), "
            "gone (the object was deleted) or altered.",
            "operation",
            "outcome",
        )
        self.shared_bytes = make.counter(
            "pool_shared_bytes",
            "Sealed bytes written to the shared tier, and read from it.",
            "direction",
        )
        self.shared_client_starts = make.counter(
            "pool_shared_client_starts",
            "Starts of the process of the Mooncake client; all but the first follow its end.",
        )
        self.shared_unreadable = make.counter(
            "pool_shared_unreadable",
            "Objects of the shared tier that were skipped: sealed with an unknown key, altered, or "
            "with blocks of before a purge (purged).",
            "reason",
        )
        at_zero(self.shared_unreadable, ("unknown_key", "altered"))
        self.hits = make.counter(
            "pool_hits", "Blocks that engines loaded, by storage tier.", "tier"
        )
        self.blocks_stored = make.counter(
            "pool_blocks_stored", "Blocks stored by local engines.", "group"
        )
        self.blocks_loaded = make.counter(
            "pool_blocks_loaded", "Blocks loaded by local engines.", "group"
        )
        self.blocks_dropped = make.counter(
            "pool_blocks_dropped", "Blocks that were not kept.", "reason"
        )
        self.checkpoint_bytes = make.counter(
            "pool_checkpoint_bytes",
            "Bytes of intermediate states of linear layers: sent beside the last state of a "
            "prompt, or withheld, since other transfers waited for the link.",
            "peer",
            "outcome",
        )
        self.link_bytes = make.counter(
            "link_bytes", "Bytes of KV blocks over a link.", "peer", "direction"
        )
        self.link_wire_bytes = make.counter(
            "link_wire_bytes",
            "The same as transmitted: coded fragments count with their coded size.",
            "peer",
            "direction",
        )
        self.codec_seconds = make.counter(
            "codec_seconds", "CPU time spent coding and decoding fragments.", "direction"
        )
        self._codec_rate = make.gauge(
            "codec_bytes_per_second",
            "Rate of coding or decoding of a core, measured at the start; 0 until the codec is "
            "ready.",
            "direction",
        )
        self.set_codec(None)
        self.link_up = make.gauge("link_up", "1 while a link is connected.", "peer")
        self._encryption = make.gauge(
            "link_encryption",
            "1 for the protection that the data connections of a link use.",
            "peer",
            "direction",
            "encryption",
        )
        self._link_gauges = {
            field: make.gauge(f"link_{name}", text, "peer")
            for field, (name, _, text) in LINK_GAUGES.items()
        }
        self.transfers = make.counter("transfers", "Transfers that ended.", "direction", "state")
        self.tickets_refused = make.counter(
            "tickets_refused",
            "Transfers refused or ended because of their ticket.",
            "end",
            "reason",
        )
        at_zero(self.tickets_refused, ("source", "destination"), TicketRefusal)
        self.refused = make.counter(
            "connections_refused", "Connections closed for their identity or their data.", "port"
        )
        self.link_refused = self.refused.labels(port="link")

    def count_shared(self, operation: str, outcome: str) -> None:
        """Count a request to the shared tier."""
        self.shared_requests.labels(operation=operation, outcome=outcome).inc()

    def set_codec(self, speed: CodecSpeed | None) -> None:
        """Show how fast the codec is; None while it is not ready."""
        rates = (speed.encode, speed.decode) if speed is not None else (0.0, 0.0)
        for direction, rate in zip(("sent", "received"), rates, strict=True):
            self._codec_rate.labels(direction=direction).set(rate)

    def set_encryption(self, peer: str, direction: str, encryption: LinkEncryption) -> None:
        """Show how the blocks of a link are protected."""
        for other in LinkEncryption:
            gauge = self._encryption.labels(peer=peer, direction=direction, encryption=other.value)
            gauge.set(other is encryption)

    def set_link(self, peer: str, telemetry: LinkTelemetry) -> None:
        """Set the measurements of a link."""
        for field, gauge in self._link_gauges.items():
            gauge.labels(peer=peer).set(getattr(telemetry, field) * LINK_GAUGES[field][1])
