"""Settings of a shared tier in a Mooncake Store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.config.addresses import split_address
from prfaas.config.names import PEER_TO_PEER
from prfaas.config.tiers.mooncake import BUFFER_BYTES, DEADLINE_NS, MooncakeTable
from prfaas.units import NS_PER_S

PREFIX = "prfaas"
PROBE_RATIO = 0.25
"""Share of the deadline that the question for blocks may take; reads have the rest."""


@dataclass(frozen=True, slots=True)
class MooncakeLimits:
    """Times of the tier, seconds."""

    check_s: float = 0.5
    """The store is asked for some known blocks at this interval: for their sake, and to see if it
    answers."""
    request_s: float = 2.0
    """Limit of a request that nobody waits for."""
    stuck_s: float = 3.0
    """A client that has not answered an order for so long is killed."""
    start_s: float = 20.0
    """Limit of the start of the client, which waits for the master."""
    restart_s: float = 0.25
    """Pause before the client is started again; doubles up to `restart_max_s`."""
    restart_max_s: float = 5.0
    flush_s: float = 3.0
    """Limit of the last writes when the node stops."""


LIMITS = MooncakeLimits()


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """A Mooncake Store that pool nodes of a site share."""

    master: tuple[str, int]
    """Host and port of `mooncake_master`."""
    keys: Path
    """File of the site's keys."""
    prefix: str = PREFIX
    """Of all keys of the site."""
    metadata: str = PEER_TO_PEER
    """Metadata server of the store, or PEER_TO_PEER."""
    protocol: str = "tcp"
    """Transport, `tcp` or `rdma`."""
    devices: str = ""
    """Devices of RDMA, comma separated."""
    replicas: int = 1
    """Copies of each block, on different providers."""
    deadline_ns: int = DEADLINE_NS
    """Longest time that the tier may add to a request."""
    buffer_bytes: int = BUFFER_BYTES
    """Memory for blocks on their way to the store and from it, half of it each."""
    limits: MooncakeLimits = LIMITS
    """Times that are no settings of the deployment file."""

    @property
    def deadline_s(self) -> float:
        """The deadline, seconds."""
        return self.deadline_ns / NS_PER_S

    @property
    def probe_limit_s(self) -> float:
        """Time limit of the question for the blocks of a request, seconds."""
        return self.deadline_s * PROBE_RATIO

    @property
    def read_limit_s(self) -> float:
        """Time limit of all reads of a request, seconds."""
        return self.deadline_s - self.probe_limit_s


def mooncake_settings(table: MooncakeTable, cluster: str) -> MooncakeSettings:
    """Settings from a table of the deployment file.

    Args:
        cluster: Name of its cluster, which is the prefix unless the table has one.
    """
    return MooncakeSettings(
        split_address(table.master),
        table.keys,
        table.prefix or cluster,
        table.metadata,
        table.protocol,
        table.devices,
        table.replicas,
        table.deadline,
        table.buffer,
    )
