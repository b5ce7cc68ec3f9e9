"""Send queue of a link, shared by all its data connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prfaas.core.kv.blocks import BlockName
from prfaas.core.transfer.link_scheduler import Fragment, LinkShare, OutgoingBlock
from prfaas.errors import check_invariants

FRAGMENT_BYTES = 128 << 10
"""Until something is known of the path."""


class SendQueue:
    """A `LinkShare` between the node's loop, which fills it, and the lanes, which empty it."""

    def __init__(self) -> None:
        self._share = LinkShare(FRAGMENT_BYTES)
        self._lock = threading.Lock()
        self.on_more: Callable[[], object] = lambda: None
        """Called when there is something to send."""

    def add(self, block: OutgoingBlock) -> None:
        """Queue a block."""
        with self._lock:
            self._share.add(block)
        self.on_more()

    def finish(self, transfer_id: bytes) -> None:
        """Close the queue of a transfer."""
        with self._lock:
            self._share.finish(transfer_id)

    def drop(self, transfer_id: bytes) -> None:
        """Forget a transfer."""
        with self._lock:
            self._share.drop(transfer_id)

    def arrived(self, transfer_id: bytes, name: BlockName) -> None:
        """The receiver has this block."""
        with self._lock:
            self._share.arrived(transfer_id, name)

    def cut(self, fragment_bytes: int) -> None:
        """Divide blocks into fragments of this size from now on."""
        with self._lock:
            self._share.fragment_bytes = fragment_bytes

    def lost(self, connection: int) -> None:
        """Send unacknowledged fragments of this connection again."""
        with self._lock:
            self._share.lost(connection)
        self.on_more()

    def take(self, connection: int) -> Fragment | None:
        """Return the next fragment of this connection; None if the queue is empty."""
        now_ns = time.monotonic_ns()
        with self._lock:
            return self._share.take(connection, now_ns)

    @property
    def queued_by_tenant(self) -> dict[str, int]:
        """Waiting for a connection, by the class of the tenant."""
        with self._lock:
            return self._share.queued_by_tenant

    @property
    def queued_bytes(self) -> int:
        """Waiting for a connection."""
        return self._share.queued_bytes

    def queued_beside(self, transfer_id: bytes) -> int:
        """Waiting for a connection, of all other transfers."""
        with self._lock:
            return self._share.queued_beside(transfer_id)

    @property
    def in_flight_bytes(self) -> int:
        """Sent, and not known to have arrived."""
        with self._lock:
            return self._share.in_flight_bytes

    def validate(self) -> None:
        """Check what has to hold at any time.

        Raises:
            AssertionError: It does not.
        """
        with self._lock:
            check_invariants(self._share.invariants())
