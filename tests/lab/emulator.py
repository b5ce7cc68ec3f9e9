"""The process between the two namespaces: reads packets from one TUN device, writes to the other.

Started by `tests.lab.wan`. It prints one JSON line when the devices exist, then reads JSON lines
on standard input, each a change of settings or nothing, and answers each with the counters. Ends
with its standard input.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import asdict
from heapq import heappop, heappush
from typing import Any

from tests.lab.path import LabPath, PathSettings, TrackedConnections

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CSUM, _OFFLOAD_TSO4 = 0x01, 0x02
_PACKET_BYTES_MAX = 1 << 17
_READS_AT_ONCE = 8
"""Packets taken from one device before the others get their turn."""


class Direction:
    """Forwarder from one device to the other, through a path."""

    def __init__(
        self, source: int, sink: int, path: LabPath, connections: TrackedConnections
    ) -> None:
        self.source = source
        self._connections = connections
        self.path = path
        self._sink = sink
        self._flying: list[tuple[int, int, bytes]] = []
        self._num_taken = 0

    def take(self) -> None:
        """Read what is there."""
        for _ in range(_READS_AT_ONCE):
            try:
                packet = os.read(self.source, _PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            now_ns, idle_ns = time.monotonic_ns(), self.path.settings.idle_ns
            if idle_ns and self._connections.has_forgotten(packet, now_ns, idle_ns):
                self.path.counters.forgotten += 1
            elif packet[10] >> 4 == 4:
                for arrives_at, run in self.path.carry(packet, now_ns):
                    self._num_taken += 1
                    heappush(self._flying, (arrives_at, self._num_taken, run))

    def deliver(self) -> float | None:
        """Write what is due.

        Returns:
            Seconds until the next packet is due; None if none is in transit.
        """
        while self._flying:
            wait_ns = self._flying[0][0] - time.monotonic_ns()
            if wait_ns > 0:
                return wait_ns / 1e9
            try:
                os.write(self._sink, heappop(self._flying)[2])
            except OSError:  # the device is down: whoever sent this has gone
                continue
        return None


def open_tun(name: str) -> int:
    """A TUN device that hands out and takes TSO packets; non-blocking."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOAD_CSUM | _OFFLOAD_TSO4)
    return device


def apply(directions: list[Direction], change: dict[str, Any]) -> None:
    """Change settings: `there` and `back` hold fields of `PathSettings`."""
    for direction, key in zip(directions, ("there", "back"), strict=True):
        for name, value in change.get(key, {}).items():
            setattr(direction.path.settings, name, value)


def serve(directions: list[Direction]) -> None:
    """Carry packets until standard input ends."""
    by_source = {direction.source: direction for direction in directions}
    pending = b""
    while True:
        waits = [wait for d in directions if (wait := d.deliver()) is not None]
        readable, _, _ = select.select([0, *by_source], [], [], min(waits, default=None))
        for source in readable:
            if source in by_source:
                by_source[source].take()
                continue
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                apply(directions, json.loads(line))
                say([asdict(direction.path.counters) for direction in directions])


def say(value: object) -> None:
    """One line on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Arguments: the names of the two devices and a seed."""
    here, there, seed = sys.argv[1:]
    first, second = open_tun(here), open_tun(there)
    there_path, back_path = (
        LabPath(PathSettings(), random.Random(f"{seed} {name}")) for name in ("there", "back")
    )
    known = TrackedConnections()
    directions = [
        Direction(first, second, there_path, known),
        Direction(second, first, back_path, known),
    ]
    say("ready")
    serve(directions)


if __name__ == "__main__":
    main()
