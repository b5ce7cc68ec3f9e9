"""One direction of an emulated link: when a packet arrives, and which of its segments do not.

Plain code without a clock and without I/O. Packets are IPv4 with the 10-byte virtio header that a
TUN device with IFF_VNET_HDR speaks, so one packet may stand for many TCP segments (TSO). Loss and a
full queue hit segments, as they would on a wire; what is left of a packet travels on as runs of
consecutive segments.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

WIRE_OVERHEAD_BYTES = 38
"""Ethernet per segment: preamble 8, header 14, checksum 4, gap 12. Payload share 1448 / 1538."""
VNET_BYTES = 10
_VNET = struct.Struct("<BBHHHH")
_NEEDS_CSUM, _GSO_NONE = 1, 0
_GSO_TYPE = 1
_GSO_SIZE_AT = 4
_FIN_PSH, _SYN = 0x09, 0x02
_TCP = 6
_NS_PER_S = 10**9
JITTER_STEP_NS = 20_000_000


@dataclass(slots=True)
class PathSettings:
    """Effects of a direction on packets; can be changed at any time.

    Attributes:
        rate_bits_per_s: Bits a second on the wire, Ethernet included; 0 is unlimited.
        loss: Share of segments lost at random.
        queue_ns: Length of the queue before the bottleneck, as time at the present rate.
        jitter_ns: Largest addition to the delay, which drifts below it; packets keep their order.
        reorder: Share of segments that come later by `reorder_ns`, after those behind them.
        reorder_ns: See `reorder`.
        idle_ns: A connection that carries nothing for so long is forgotten, as by an address
            translator: what comes of it later is dropped without notice. 0 forgets none.
    """

    delay_ns: int = 0
    rate_bits_per_s: int = 0
    loss: float = 0.0
    queue_ns: int = 20_000_000
    jitter_ns: int = 0
    reorder: float = 0.0
    reorder_ns: int = 3_000_000
    is_down: bool = False
    idle_ns: int = 0


class TrackedConnections:
    """TCP connections that an address translator between both sides knows."""

    def __init__(self) -> None:
        self._used_at_ns: dict[bytes, int] = {}

    def has_forgotten(self, packet: bytes, now_ns: int, idle_ns: int) -> bool:
        """Return True if a packet is of a connection that was silent for `idle_ns`, or is unknown.

        Args:
            packet: Of TCP, of either direction, with its virtio header.
            idle_ns: Time after which a connection is forgotten.
        """
        header = packet[VNET_BYTES:]
        ports_at = (header[0] & 15) * 4
        if header[9] != _TCP:
            return False
        ends = header[12:16] + header[ports_at : ports_at + 2]
        others = header[16:20] + header[ports_at + 2 : ports_at + 4]
        key = min(ends, others) + max(ends, others)
        used_at_ns = self._used_at_ns.get(key)
        is_first = bool(header[ports_at + 13] & _SYN)
        if not is_first and (used_at_ns is None or now_ns - used_at_ns >= idle_ns):
            self._used_at_ns.pop(key, None)
            return True
        self._used_at_ns[key] = now_ns
        return False


@dataclass(slots=True)
class PathCounters:
    """Segments of a direction: `sent` includes dropped ones."""

    sent: int = 0
    lost: int = 0
    overflowed: int = 0
    blackholed: int = 0
    reordered: int = 0
    forgotten: int = 0
    """Packets of forgotten connections, dropped."""
    delivered_bytes: int = 0
    """On the wire, Ethernet included."""


@dataclass(slots=True)
class LabPath:
    """One direction.

    Attributes:
        counters: Counters of packets and bytes.
    """

    settings: PathSettings
    chance: random.Random
    counters: PathCounters = field(default_factory=PathCounters)
    _free_at_ns: int = 0
    _arrived_at_ns: int = 0
    _drift: tuple[int, int, int] = (0, 0, 0)
    """Start of a step, and jitter at its start and end."""

    def carry(self, packet: bytes, now_ns: int) -> list[tuple[int, bytes]]:
        """Take a packet in.

        Returns:
            What comes out at the other end, with the times.
        """
        segments = _Segments.of(packet)
        self.counters.sent += segments.count
        if self.settings.is_down:
            self.counters.blackholed += segments.count
            return []
        if self._pass_all(segments.all_wire_bytes, now_ns):
            self.counters.delivered_bytes += segments.all_wire_bytes
            passed = []
        else:
            passed = [self._pass(segments.wire_bytes(i), now_ns) for i in range(segments.count)]
        arrives_at = max(self._free_at_ns, now_ns) + self.settings.delay_ns
        if self.settings.jitter_ns:
            arrives_at = max(arrives_at + self._jitter(now_ns), self._arrived_at_ns)
        self._arrived_at_ns = arrives_at
        late = self._late(passed) if self.settings.reorder else []
        if not any(late):
            return [(arrives_at, run) for run in segments.runs(passed)]
        in_time = [ok and not is_late for ok, is_late in zip(passed, late, strict=True)]
        return [(arrives_at, run) for run in segments.runs(in_time)] + [
            (arrives_at + self.settings.reorder_ns, run) for run in segments.runs(late)
        ]

    def _jitter(self, now_ns: int) -> int:
        """Additional delay: from one random value to the next, in steps of JITTER_STEP_NS."""
        start_ns, first, last = self._drift
        if now_ns >= start_ns + JITTER_STEP_NS:
            drawn = round(self.chance.random() * self.settings.jitter_ns)
            start_ns, first, last = self._drift = now_ns, last, drawn
        return first + (last - first) * (now_ns - start_ns) // JITTER_STEP_NS

    def _late(self, passed: list[bool]) -> list[bool]:
        late = [ok and self.chance.random() < self.settings.reorder for ok in passed]
        self.counters.reordered += sum(late)
        return late

    def _pass_all(self, num_bytes: int, now_ns: int) -> bool:
        """Send a whole packet at once, which is quicker, if nothing can happen to it."""
        settings = self.settings
        if settings.loss or settings.reorder:
            return False
        if settings.rate_bits_per_s:
            takes_ns = num_bytes * 8 * _NS_PER_S // settings.rate_bits_per_s
            ends_at = max(self._free_at_ns, now_ns) + takes_ns
            if ends_at - now_ns > settings.queue_ns:
                return False
            self._free_at_ns = ends_at
        return True

    def _pass(self, num_bytes: int, now_ns: int) -> bool:
        """Send one segment through the queue and over the lossy wire."""
        settings = self.settings
        if settings.rate_bits_per_s:
            starts_at = max(self._free_at_ns, now_ns)
            if starts_at - now_ns > settings.queue_ns:
                self.counters.overflowed += 1
                return False
            self._free_at_ns = starts_at + num_bytes * 8 * _NS_PER_S // settings.rate_bits_per_s
        if settings.loss and self.chance.random() < settings.loss:
            self.counters.lost += 1
            return False
        self.counters.delivered_bytes += num_bytes
        return True


@dataclass(slots=True)
class _Segments:
    """A packet as the segments it stands for."""

    packet: bytes
    header_bytes: int
    """IP and TCP."""
    segment_bytes: int
    """Payload of each segment but the last."""
    count: int

    @classmethod
    def of(cls, packet: bytes) -> _Segments:
        """Look into the virtio header."""
        _, gso_type, _, size, _, _ = _VNET.unpack_from(packet)
        if gso_type == _GSO_NONE or not size:
            return cls(packet, len(packet) - VNET_BYTES, 0, 1)
        ip_bytes = (packet[VNET_BYTES] & 0x0F) * 4
        tcp_bytes = (packet[VNET_BYTES + ip_bytes + 12] >> 4) * 4
        payload = len(packet) - VNET_BYTES - ip_bytes - tcp_bytes
        return cls(packet, ip_bytes + tcp_bytes, size, max(1, -(-payload // size)))

    @property
    def all_wire_bytes(self) -> int:
        """Bytes of all segments on the wire."""
        payload = len(self.packet) - VNET_BYTES - self.header_bytes
        return payload + self.count * (self.header_bytes + WIRE_OVERHEAD_BYTES)

    def wire_bytes(self, index: int) -> int:
        """Bytes of one segment on the wire."""
        if self.count == 1:
            return len(self.packet) - VNET_BYTES + WIRE_OVERHEAD_BYTES
        payload = len(self.packet) - VNET_BYTES - self.header_bytes
        mine = min(self.segment_bytes, payload - index * self.segment_bytes)
        return mine + self.header_bytes + WIRE_OVERHEAD_BYTES

    def runs(self, passed: list[bool]) -> list[bytes]:
        """The packets that carry the segments that passed."""
        if all(passed):
            return [self.packet]
        runs: list[bytes] = []
        start: int | None = None
        for index, ok in enumerate([*passed, False]):
            if ok and start is None:
                start = index
            elif not ok and start is not None:
                runs.append(self._run(start, index))
                start = None
        return runs

    def _run(self, start: int, end: int) -> bytes:
        """Segments `start` to `end` as a separate packet."""
        head = bytearray(self.packet[: VNET_BYTES + self.header_bytes])
        at = VNET_BYTES + self.header_bytes
        data = self.packet[at + start * self.segment_bytes : at + end * self.segment_bytes]
        # The receiving kernel takes NEEDS_CSUM as "not damaged on the way", so the TCP checksum,
        # which covers the whole packet's length, may stay as it is.
        if end - start == 1:
            head[_GSO_TYPE] = _GSO_NONE
            head[_GSO_SIZE_AT : _GSO_SIZE_AT + 2] = b"\0\0"
        ip = memoryview(head)[VNET_BYTES:]
        ip_bytes = (ip[0] & 0x0F) * 4
        _add(ip, 4, ">H", start)
        struct.pack_into(">H", ip, 2, self.header_bytes + len(data))
        struct.pack_into(">H", ip, 10, 0)
        struct.pack_into(">H", ip, 10, _ip_checksum(ip[:ip_bytes]))
        _add(ip, ip_bytes + 4, ">I", start * self.segment_bytes)
        if end < self.count:
            ip[ip_bytes + 13] &= ~_FIN_PSH & 0xFF
        return bytes(head) + data


def _add(view: memoryview, at: int, form: str, amount: int) -> None:
    bits = 8 * struct.calcsize(form)
    (value,) = struct.unpack_from(form, view, at)
    struct.pack_into(form, view, at, (value + amount) % (1 << bits))


def _ip_checksum(header: memoryview) -> int:
    total: int = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
