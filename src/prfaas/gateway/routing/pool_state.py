"""Latest reports of pool nodes and their links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas.core.kv.blocks import Layout
from prfaas.wire.messages.gateway import LinkTelemetry

LinkName = tuple[str, str]
"""Source and destination pool of a link."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """Latest report of a pool node; empty while its event stream is disconnected.

    Attributes:
        is_live: True if its event stream is connected.
        links: True if the link to a peer is up, by the peer's name.
        telemetry: What is measured of these links.
        is_draining: True if it takes no new transfers.
        memory_bytes: Its memory for blocks; 0 while unknown.
    """

    is_live: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    links: Mapping[str, bool] = field(default_factory=dict)
    telemetry: Mapping[str, LinkTelemetry] = field(default_factory=dict)
    is_draining: bool = False
    memory_bytes: int = 0
