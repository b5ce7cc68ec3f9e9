"""Ports for processes that have to be told theirs."""

import socket

from prfaas.cli.host.ports import free_ports


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    for port in free_ports():
        try:
            with socket.create_server(("127.0.0.1", port)) as server:
                found: int = server.getsockname()[1]
                return found
        except OSError:
            continue
    raise AssertionError("no port is free")
