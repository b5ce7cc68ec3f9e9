"""Settings of a pool node."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from prfaas.core.codec.codecs import LinkCodec
from prfaas.pool.receive.receive_limits import DEFAULTS, ReceiveLimits
from prfaas.wire.identity import Identity

LINK_GRACE_NS = 3 * 10**9
"""Longer than it takes to connect anew; decode waits that long at most for a link that broke."""

DRAIN_NS = 10 * 10**9


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Identity, resources and peers of a pool node.

    Attributes:
        name: Name in the deployment file and in the certificate.
        memory_bytes: Limit of KV blocks in memory.
        listen: Host and port for pools and gateways.
        socket_path: Unix socket for local engines.
        admin: Host and port for `/health` and `/metrics`, plain HTTP.
        identity: Certificate, key, authority.
        peers: Pools to push to, by name.
        sources: Names of pools that may push to this one.
        gateways: Names of gateways that may subscribe, and whose tickets count.
        disk: Folder of the disk tier; None is none.
        disk_bytes: Limit on its files.
        link_budgets: Bits per second that the link to a peer may send, by its name; others have no
            limit.
        link_connections: Data connections of the link to a peer, by its name; others adapt.
        link_codec: When blocks are coded on links, and whether coded ones are taken.
        link_grace_ns: How long transfers wait for a link that broke.
        tracing: Collector that takes spans of transfers, as OTLP over HTTP; None sends none.
        receive: Limits on what peers may have it receive.
        hello_timeout_s: Time limit for the first message of an engine.
        drain_ns: How long transfers under way may go on when the node stops.
    """

    name: str
    memory_bytes: int
    listen: tuple[str, int]
    socket_path: Path
    admin: tuple[str, int]
    identity: Identity
    peers: dict[str, tuple[str, int]]
    sources: frozenset[str]
    gateways: frozenset[str]
    disk: Path | None = None
    disk_bytes: int = 0
    link_budgets: dict[str, int] = field(default_factory=dict)
    link_connections: dict[str, int] = field(default_factory=dict)
    link_codec: LinkCodec = LinkCodec.RAW
    link_grace_ns: int = LINK_GRACE_NS
    tracing: str | None = None
    drain_ns: int = DRAIN_NS
    receive: ReceiveLimits = DEFAULTS
    hello_timeout_s: float = 10.0
