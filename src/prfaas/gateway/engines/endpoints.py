"""Addresses of the parts of a deployment, once all have their ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of everything the gateway talks to.

    Attributes:
        engines: Base URL by engine name, without a trailing slash: "http://127.0.0.1:8100".
        pools: Host and port of the TLS listener by pool name.
    """

    engines: Mapping[str, str]
    pools: Mapping[str, tuple[str, int]]
