"""Ports of pool nodes' `/health` and `/metrics` where the deployment file names none."""

from __future__ import annotations

import hashlib
from pathlib import Path

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below the ports that Linux gives to outgoing connections (32768 and above)."""


def admin_port(state: Path, name: str) -> int:
    """The port of a pool node: the same at every start of the same deployment.

    Args:
        state: State directory of the deployment.
        name: Of the pool node.
    """
    digest = hashlib.sha256(f"{state.absolute()}/{name}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % NUM_PORTS
