"""Addresses as operators write them, HOST:PORT, and those of the parts of a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PORT_MAX = 65535


def split_address(text: str) -> tuple[str, int]:
    """Host, without brackets, and port.

    Raises:
        ValueError: It is no HOST:PORT, or no host and no port can be called that.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ValueError(f"{text!r} is not HOST:PORT with a port up to {PORT_MAX}")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(
            f"{text!r}: the parts of a host's name have 1 to 63 characters, as in pd.example.net"
        ) from None
    return host.strip("[]"), int(port)


def join_address(address: tuple[str, int]) -> str:
    """`HOST:PORT`, with brackets around a host that has colons itself."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of everything a gateway talks to, once all have their ports."""

    engines: Mapping[str, str]
    """Base URL by engine name, without a trailing slash: "http://127.0.0.1:8100"."""
    pools: Mapping[str, tuple[str, int]]
    """Host and port of the TLS listener by pool name."""
