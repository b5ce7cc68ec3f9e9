"""Decoding of fragments at the receiving end of links."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from prometheus_client import Counter

from prfaas.core.codec.codecs import LOSSY, LOSSY_NUMBER, NUMBERS, LinkCodec
from prfaas.errors import PeerError
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.codec.loading import KERNELS, Kernels
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.units import NS_PER_S
from prfaas.wire.fragments import FragmentPrefix, ReceivedBlock

SCRATCH_BYTES_MAX = 16 << 20
"""Size of a rounded block up to which every thread for digests decodes at once. Decoding needs the
stream beside the block: a peer that claims blocks of 256 MiB of a group that nobody announced gets
that once, and not once a thread."""


class Decoding:
    """Negotiates codecs with peers, and decodes coded fragments.

    Args:
        metrics: Of this pool node.
    """

    def __init__(
        self,
        mode: LinkCodec,
        layouts: KnownLayouts,
        metrics: PoolMetrics,
        kernels: Kernels = KERNELS,
    ) -> None:
        self._is_allowed = mode is not LinkCodec.RAW
        self._layouts = layouts
        self._metrics = metrics
        self._kernels = kernels
        self._seconds = metrics.codec_seconds.labels(direction="received")
        self._moved = metrics.moved
        self._received: dict[str, Counter] = {}
        """By peer, its counter of transmitted bytes."""
        self._offers: dict[str, tuple[str, list[str], Callable[[list[str]], None]]] = {}
        """By peer, the word of the link whose hello named codecs that are known here, those codecs,
        and its `tell`."""
        self._agreed: dict[str, tuple[str, list[str]]] = {}
        """By peer, the word of the link on which it was told that it may code, and how."""
        self._large = threading.Lock()
        """Of rounded blocks that need much memory beside their own: one at a time has it."""
        self._may_round: set[str] = set()
        """Peers that were told so once: a block that is queued for rounding goes on like that over
        the next link."""

    def begin_link(
        self, peer: str, link: str, codecs: Sequence[str], tell: Callable[[list[str]], None]
    ) -> None:
        """Answer a hello, at once or with `kernels_ready`.

        Args:
            peer: Name of the pool.
            codecs: Those of the hello.
            tell: Called with the codecs that the link may use, at most once, while it stands.
        """
        self.end_link(peer)
        known = [codec for codec in codecs if codec in NUMBERS]
        if not self._is_allowed or not known:
            return
        if not self._kernels.names:
            tell([])
            return
        self._offers[peer] = link, known, tell
        if self._kernels.window is not None:
            self.kernels_ready()

    def end_link(self, peer: str) -> None:
        """The link of a peer is over."""
        self._offers.pop(peer, None)
        self._agreed.pop(peer, None)

    def kernels_ready(self) -> None:
        """Answer the hellos that wait for the kernels."""
        for peer, (link, codecs, tell) in self._offers.items():
            if self._agreed.get(peer) != (link, codecs):
                self._agreed[peer] = link, codecs
                if LOSSY in codecs:
                    self._may_round.add(peer)
                tell(codecs)

    # --- on any lane ---

    def check(self, peer: str, link: str, prefix: FragmentPrefix) -> None:
        """See that a coded fragment is one that was agreed on; PeerError if it is not."""
        agreed_link, codecs = self._agreed.get(peer, ("", []))
        numbers = [NUMBERS[codec] for codec in codecs] if agreed_link == link else []
        if peer in self._may_round:
            numbers.append(LOSSY_NUMBER)
        is_rounded = prefix.stream_bytes > 0
        if prefix.codec not in numbers or is_rounded != (prefix.codec == LOSSY_NUMBER):
            raise PeerError(
                f"a fragment has codec {prefix.codec}, which was not agreed on for this link"
            )
        group = self._layouts.group(prefix.layout_id, prefix.key.group)
        if group is not None and group.block_bytes != prefix.block_bytes:
            raise PeerError(
                f"a coded block of cache group {prefix.key.group} would have {prefix.block_bytes} "
                f"bytes; the engines here announced {group.block_bytes}"
            )

    def decode(self, coded: memoryview, into: memoryview) -> None:
        """Restore the bytes of a fragment that was checked; `into` holds anything after an error;
        PeerError if it cannot be decoded to exactly as many bytes."""
        window = self._kernels.window
        if window is None:
            raise PeerError("a fragment is coded before this side has accepted codecs")
        began = time.thread_time_ns()
        window.decode(coded, into)
        self._seconds.inc((time.thread_time_ns() - began) / NS_PER_S)

    def restored(self, block: ReceivedBlock) -> ReceivedBlock:
        """Return a block with its bytes, decoded if it came as a stream. On the thread for digests.

        Raises:
            PeerError: The stream does not decode to exactly the block.
        """
        if not block.stream_bytes:
            return block
        rounding = self._kernels.rounding
        if rounding is None:
            raise PeerError("a block is rounded before this side has accepted codecs")
        began = time.thread_time_ns()
        data = memoryview(block.data)
        is_large = len(data) > SCRATCH_BYTES_MAX
        with self._large if is_large else contextlib.nullcontext():
            stream = memoryview(bytes(data[: block.stream_bytes]))
            form = rounding.restore_block(stream, data)
        self._seconds.inc((time.thread_time_ns() - began) / NS_PER_S)
        return replace(block, modes=form.modes)

    def came(self, peer: str, prefix: FragmentPrefix) -> None:
        """Count a fragment."""
        num_bytes = prefix.payload_bytes
        received = self._received.get(peer)
        if received is None:
            labels = {"peer": peer, "direction": "received"}
            received = self._received[peer] = self._metrics.link_wire_bytes.labels(**labels)
        received.inc(num_bytes)
        if self._moved is not None:
            self._moved.add("received", peer, prefix.transfer_id, wire_bytes=num_bytes)
