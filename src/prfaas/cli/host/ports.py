"""Ports for parts, and for pool nodes' `/health` and `/metrics`, that have none in the file."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below the ports that Linux gives to outgoing connections (32768 and above)."""


def admin_port(state: Path, name: str) -> int:
    """The port of a pool node: the same at every start of the same deployment.

    Args:
        state: State directory of the deployment.
    """
    digest = hashlib.sha256(f"{state.absolute()}/{name}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % NUM_PORTS


_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RANGE_DEFAULT = (32768, 60999)
FIRST = 10_000
TRIES = 2000


def free_ports() -> Iterator[int]:
    """Ports to try, in random order; the last one is 0, for which the kernel finds one.

    They are below the range of ephemeral ports: a part may listen minutes after its port was found,
    and any connection of the machine may be given a port of that range meanwhile.
    """
    below = _ephemeral()[0]
    if below > FIRST:
        yield from random.sample(range(FIRST, below), min(TRIES, below - FIRST))
    yield 0


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = _RANGE_FILE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _RANGE_DEFAULT
