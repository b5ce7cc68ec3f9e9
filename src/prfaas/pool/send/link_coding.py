"""Coding of fragments at the sending end of a link."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from prfaas.core.cache.eviction import age_code
from prfaas.core.codec.codecs import (
    EXPONENT_WINDOW,
    EXPONENT_WINDOW_NUMBER,
    LOSSY,
    LOSSY_NUMBER,
    TYPE_RATIOS,
    Form,
    LinkCodec,
    Quality,
    codec_of,
    form_of,
)
from prfaas.core.codec.gain import RATIO_WEIGHT
from prfaas.core.codec.switch import CodingSwitch, Trials
from prfaas.core.kv.blocks import Planes, part
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.logs import log_event
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.codec.loading import KERNELS, Kernels
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.units import NS_PER_S
from prfaas.wire.fragments import (
    block_digest,
    encode_coded_prefix,
    encode_prefix,
    encode_stream_prefix,
)

log = logging.getLogger(__name__)

REFUSED_MAX = 256
ROUNDED_AT_ONCE = 16
"""Blocks that lanes can round at the same time, if their names fall apart."""
CODED_BYTES_MIN = 4096
"""Smaller fragments, such as the end of a block of odd size, gain too little to be tried."""


class LinkCoding:
    """Decides the coding of one link, and counts it.

    A fragment is coded on the lane of the connection that takes it: nothing waits coded, and the
    order of blocks stays the scheduler's.

    Args:
        peer: Name of the other pool.
        metrics: Of this pool node.
    """

    def __init__(
        self,
        mode: LinkCodec,
        layouts: KnownLayouts,
        peer: str,
        metrics: PoolMetrics,
        kernels: Kernels = KERNELS,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s = wall_s
        self.takes_ages = False
        """True if the peer takes ages in fragments."""
        self._mode = mode
        self._layouts = layouts
        self._kernels = kernels
        self._switch: CodingSwitch | None = None
        self._trials = Trials()
        self._lock = threading.Lock()
        """Of trials and counts: connections on several lanes code at once."""
        self._rounding = [threading.Lock() for _ in range(ROUNDED_AT_ONCE)]
        """By block: one lane rounds a block, and others wait for it; other blocks go on."""
        self._plain = threading.local()
        """Memory of each lane for what a stream decodes to: new pages take as long as coding."""
        self._is_agreed = self._may_round = False
        self._refused: set[tuple[bytes, int, Quality]] = set()
        """Groups that were reported as staying as they are."""
        self._peer, self._moved = peer, metrics.moved
        self._sent_bytes = metrics.link_wire_bytes.labels(peer=peer, direction="sent")
        self._link_bytes = metrics.link_bytes.labels(peer=peer, direction="sent")
        self._seconds = metrics.codec_seconds.labels(direction="sent")
        self._block_bytes = self._wire_bytes = 0
        self._coded_from = self._coded_to = 0
        self._seen = 0, 0
        self.ratio = 1.0
        """Bytes of blocks for a byte sent, of the last samples in which something was sent."""

    @property
    def offered(self) -> list[str]:
        """Codecs for the hello."""
        return [] if self._mode is LinkCodec.RAW else self._kernels.names

    def agree(self, codecs: Iterable[str]) -> None:
        """Take the codecs that the peer decodes on the link that stands now; none at its end."""
        self._is_agreed = EXPONENT_WINDOW in codecs and bool(self.offered)
        self._may_round = LOSSY in codecs and bool(self.offered)

    def form(self, quality: Quality, layout_id: bytes, group: int, num_bytes: int) -> Form | None:
        """Return the rounded form in which a block goes now; None if no bit is lost.

        Args:
            quality: Class of its transfer.
        """
        if not quality.is_lossy or not self._may_round or self._kernels.rounding is None:
            return None
        known = self._layouts.group(layout_id, group)
        if known is None or known.block_bytes != num_bytes:
            return None
        form = form_of(known, quality)
        if isinstance(form, Form):
            return form
        name = layout_id, group, quality
        if not form.is_meant and name not in self._refused and len(self._refused) < REFUSED_MAX:
            self._refused.add(name)
            log_event(
                log,
                logging.WARNING,
                "group_not_rounded",
                peer=self._peer,
                group=group,
                quality=quality,
                why=form.reason,
            )
        return None

    @property
    def expansion(self) -> float:
        """Bytes of a block for a transmitted byte of a fragment that is coded now; 1 if none is.

        Fragments are cut larger by it: what costs time for each of them is paid for as many
        transmitted bytes as without coding.
        """
        is_on = self._is_agreed and self._switch is not None and self._switch.is_on
        return self._coded_from / self._coded_to if is_on and self._coded_to else 1.0

    def sample(
        self,
        wire_bytes_per_s: float,
        sender_busy: float,
        receiver_busy: float,
        network_share: float,
    ) -> None:
        """Add the measurements since the previous sample.

        Args:
            wire_bytes_per_s: Throughput of the link if it was busy all the time, else 0.
            sender_busy: Share of time in which the I/O thread ran or waited for a core.
            receiver_busy: The same of the peer; 0 if it is not known.
            network_share: Share of time in which the connections waited for the network.
        """
        block_bytes, wire_bytes = self._block_bytes, self._wire_bytes
        before, self._seen = self._seen, (block_bytes, wire_bytes)
        if wire_bytes > before[1]:
            fresh = (block_bytes - before[0]) / (wire_bytes - before[1])
            self.ratio = max(1.0, self.ratio + RATIO_WEIGHT * (fresh - self.ratio))
        if self._switch is not None and self._is_agreed:
            coded_ratio = (
                self._coded_from / self._coded_to if self._coded_to else TYPE_RATIOS["bfloat16"]
            )
            self._switch.sample(
                wire_bytes_per_s, coded_ratio, sender_busy, receiver_busy, network_share
            )

    # --- on any lane ---

    def parts(self, fragment: Fragment, scratch: Scratch) -> list[memoryview]:
        """Return what to send of a fragment: its prefix and its bytes, coded if that is worth
        it."""
        if fragment.block.form is not None:
            return self._part(fragment, fragment.block.form)
        coded = self._coded(fragment, scratch)
        data = fragment.data if coded is None else coded
        self._count(fragment, len(data))
        age = self._age(fragment.block)
        if coded is None:
            return [memoryview(encode_prefix(fragment, age)), data]
        prefix = encode_coded_prefix(fragment, EXPONENT_WINDOW_NUMBER, len(data), age)
        return [memoryview(prefix), data]

    def _age(self, block: OutgoingBlock) -> int:
        return age_code(block.born_s, self._wall_s()) if self.takes_ages else 0

    def _part(self, fragment: Fragment, form: Form) -> list[memoryview]:
        """Return a part of a rounded block, whose stream is made with its first part."""
        block = fragment.block
        with self._rounding[block.name[1].block_hash[0] % ROUNDED_AT_ONCE]:
            if block.stream is None:
                began = time.thread_time_ns()
                block.digest, block.stream = self._rounded(block, form)
                self._seconds.inc((time.thread_time_ns() - began) / NS_PER_S)
        self._count(fragment, fragment.num_bytes)
        prefix = encode_stream_prefix(fragment, LOSSY_NUMBER, self._age(block))
        return [memoryview(prefix), fragment.data]

    def _rounded(self, block: OutgoingBlock, form: Form) -> tuple[bytes, bytearray]:
        """Return the digest of a rounded block, and its stream."""
        rounding = self._kernels.rounding
        if rounding is None:  # Kernels that are loaded stay so.
            raise RuntimeError("a block has a rounded form, but there are no kernels")
        scratch: Scratch = self._plain.__dict__.setdefault("scratch", Scratch())
        result = scratch.room(len(block.data))
        stream = rounding.round_block(form, memoryview(block.data), result)
        return block_digest(*block.name, result), stream

    def _count(self, fragment: Fragment, wire_bytes: int) -> None:
        block_bytes = fragment.block_bytes
        with self._lock:
            self._block_bytes += block_bytes
            self._wire_bytes += wire_bytes
        self._link_bytes.inc(block_bytes)
        self._sent_bytes.inc(wire_bytes)
        if self._moved is not None:
            ends = "sent", self._peer, fragment.block.transfer_id
            self._moved.add(*ends, link_bytes=block_bytes, wire_bytes=wire_bytes)

    def _coded(self, fragment: Fragment, scratch: Scratch) -> memoryview | None:
        window = self._kernels.window
        if window is None or not self._is_agreed or not self._is_on():
            return None
        layout_id, key = fragment.block.name
        planes = self._planes(fragment)
        if codec_of(planes) is None:
            return None
        with self._lock:
            if not self._trials.should_try(layout_id, key.group):
                return None
        began = time.thread_time_ns()
        room = scratch.room(window.coded_bytes_max(fragment.num_bytes))
        coded = window.encode(fragment.data, planes, room)
        self._seconds.inc((time.thread_time_ns() - began) / NS_PER_S)
        with self._lock:
            self._trials.tried(layout_id, key.group, has_shrunk=coded is not None)
            if coded is not None:
                self._coded_from += fragment.num_bytes
                self._coded_to += len(coded)
        return coded

    def _planes(self, fragment: Fragment) -> Planes:
        """Return the dtype planes of a fragment; none if they are unknown or it is small."""
        layout_id, key = fragment.block.name
        group = self._layouts.group(layout_id, key.group)
        is_known = group is not None and group.block_bytes == len(fragment.block.data)
        if group is None or not is_known or fragment.num_bytes < CODED_BYTES_MIN:
            return ()
        return part(group.planes, fragment.offset, fragment.num_bytes)

    def _is_on(self) -> bool:
        if self._switch is None:
            self._switch = CodingSwitch(self._mode, self._kernels.speed)
        return self._switch.is_on


class Scratch:
    """Memory of a connection for the fragment that it sends, or of a lane."""

    def __init__(self) -> None:
        self._room = memoryview(bytearray())

    def room(self, num_bytes: int) -> memoryview:
        """Return so much memory; what was there before is overwritten."""
        if len(self._room) < num_bytes:
            self._room = memoryview(bytearray(num_bytes))
        return self._room[:num_bytes]
