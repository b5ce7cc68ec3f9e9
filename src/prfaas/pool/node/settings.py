"""Settings of a pool node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.core.cache.keep_rules import BAR_NS
from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.core.transfer.residency import Regions
from prfaas.errors import ConfigError
from prfaas.pool.net import link_probe
from prfaas.pool.net.link_end import SEND_LIMITS, SendLimits
from prfaas.pool.net.link_probe import ProbeLimits
from prfaas.pool.receive import inbound_transfers
from prfaas.pool.receive.inbound_transfers import ReceiveLimits
from prfaas.pool.store import disk_writer, event_feed
from prfaas.pool.store.disk_writer import DiskLimits
from prfaas.pool.store.event_feed import FeedLimits
from prfaas.wire import channel
from prfaas.wire.allow_list import wrong_regions
from prfaas.wire.channel import ChannelLimits
from prfaas.wire.identity import Identity

LINK_GRACE_NS = 3 * 10**9
"""Longer than a reconnect; the limit of decode's wait for a broken link."""

DRAIN_NS = 10 * 10**9
AGE_ROUND_S = 1.0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Identity, resources and peers of a pool node."""

    name: str
    """Name in the deployment file and in the certificate."""
    memory_bytes: int
    """Limit of KV blocks in memory."""
    listen: tuple[str, int]
    """Host and port for pools and gateways."""
    socket_path: Path
    """Unix socket for local engines."""
    admin: tuple[str, int]
    """Host and port for `/health` and `/metrics`, plain HTTP."""
    identity: Identity
    peers: dict[str, tuple[str, int]]
    """Pools to push to, by name."""
    sources: frozenset[str]
    """Names of pools that may push to this one."""
    gateways: frozenset[str]
    """Names of gateways that may subscribe, and whose tickets are valid."""
    disk: Path | None = None
    """Folder of the disk tier; None without a disk tier."""
    disk_bytes: int = 0
    """Limit on its files."""
    disk_keys: Path | None = None
    """File of the site's keys, which wrap the keys that seal blocks on disk."""
    own_disk_key: Path | None = None
    """Such a file that is made if it is missing; used without `disk_keys`. Without both, blocks on
    disk are in the clear."""
    site_budget: int = 0
    """Bits per second that the links of all pool nodes of the site to other sites may send
    together; 0 is no limit."""
    site: frozenset[str] = frozenset()
    """Names of the pool nodes of the site, with a budget."""
    link_budgets: dict[str, int] = field(default_factory=dict)
    """Bits per second that the link to a peer may send, by its name; others have no limit."""
    link_connections: dict[str, int] = field(default_factory=dict)
    """Data connections of the link to a peer, by its name; others adapt."""
    link_codec: LinkCodec = LinkCodec.AUTO
    """Rule of coding blocks on links, and of taking coded ones."""
    link_encryption: LinkEncryption = LinkEncryption.SEALED
    """Protection of the data connections of links."""
    link_lanes: int = 1
    """Threads for sealed data connections."""
    link_grace_ns: int = LINK_GRACE_NS
    """Time that transfers wait for a link that broke."""
    regions: Regions = frozenset()
    """Regions where its blocks rest. With some, it demands regions of tickets and peers."""
    needs_grant: bool = False
    """Keep blocks of engines only with an accepted ticket: every request of a PrfaaS engine has
    one."""
    drain_ns: int = DRAIN_NS
    """Time limit of running transfers after a stop, ns."""
    receive: ReceiveLimits = inbound_transfers.DEFAULTS
    """Limits on what peers may have it receive."""
    send: SendLimits = SEND_LIMITS
    """Limits of data connections to peers."""
    channels: ChannelLimits = channel.LIMITS
    """Limits on unsent bytes of connections for messages."""
    feed: FeedLimits = event_feed.LIMITS
    """Limits on events for a gateway."""
    probes: ProbeLimits = link_probe.LIMITS
    """Limits of link tests."""
    disk_limits: DiskLimits = disk_writer.LIMITS
    """Sizes and times of the disk tier."""
    purge_bar_ns: int = BAR_NS
    """Time limit of the refusal of a purged source's blocks, ns."""
    age_round_s: float = AGE_ROUND_S
    """Time between removals of blocks that are too old, seconds."""
    hello_timeout_s: float = 10.0
    """Time limit for the first message of an engine."""
    wall_s: Callable[[], float] = time.time
    clock_ns: Callable[[], int] = time.monotonic_ns

    @property
    def read_limit_s(self) -> float | None:
        """Time limit of all slow reads of one request, seconds; None without a shared tier."""
        return None

    def check_certificate(self) -> None:
        """See that the certificate names the regions of this pool node, and no others; ConfigError
        if it does not."""
        if why := wrong_regions(self.identity.certificate, self.name, self.regions):
            raise ConfigError(why)

    @property
    def hosts(self) -> frozenset[str]:
        """Pools of other hosts of the site: links between two sites have one direction."""
        return self.sources & self.peers.keys()
