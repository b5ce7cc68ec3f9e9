"""Certificates for clients to look at, made for a test."""

from __future__ import annotations

import ssl
from pathlib import Path

from prfaas.wire.identity import make_authority, make_identity

NAME = "localhost"


def certificate_in(directory: Path) -> dict[str, str]:
    """A certificate of `localhost` by an authority of its own: the table `[gateway.tls]`."""
    directory.mkdir()
    make_authority(directory)
    make_identity(directory, NAME)
    return {
        "certificate": str(directory / f"{NAME}.pem"),
        "key": str(directory / f"{NAME}.key"),
    }


def trusting(directory: Path) -> ssl.SSLContext:
    """TLS context of a client that trusts only the authority in a directory."""
    return ssl.create_default_context(cafile=str(directory / "ca.pem"))
