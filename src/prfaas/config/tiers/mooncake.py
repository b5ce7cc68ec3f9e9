"""`[clusters.CLUSTER.mooncake]`: a Mooncake Store that the pool nodes of a cluster share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from prfaas.config.names import (
    DEVICES,
    METADATA,
    PEER_TO_PEER,
    PREFIX,
    FilePathText,
    HostPort,
    RegionName,
)
from prfaas.config.quantities import DurationNs, SizeBytes, Table

DEADLINE_NS, DEADLINE_NS_MIN, DEADLINE_NS_MAX = 10**9, 10**6, 60 * 10**9
BUFFER_BYTES, BUFFER_BYTES_MIN, BUFFER_BYTES_MAX = 128 << 20, 16 << 20, 16 << 30
REPLICAS_MAX = 8


class MooncakeTable(Table):
    """`[clusters.CLUSTER.mooncake]`: a Mooncake Store that the pool nodes of the cluster share."""

    master: HostPort
    """Address of `mooncake_master`. It has no TLS and no keys: fence it."""
    keys: FilePathText
    """File with the keys that blocks are encrypted with: base64 of 32 random bytes a line, the one
    for new blocks first. The same on all hosts of the cluster."""
    prefix: Annotated[str, StringConstraints(pattern=PREFIX)] | None = None
    """Start of all keys in the store; the name of the cluster if absent."""
    metadata: Annotated[str, StringConstraints(pattern=METADATA)] = PEER_TO_PEER
    """Metadata server of the store, the same for its providers; by default clients exchange
    metadata themselves."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport of blocks."""
    devices: Annotated[str, StringConstraints(pattern=DEVICES)] = ""
    """RDMA devices of the pool nodes, separated by commas."""
    replicas: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 1
    """Copies of each block, on different providers."""
    data_region: RegionName | None = None
    """Region of the providers, if it is not that of the cluster."""
    deadline: DurationNs = DEADLINE_NS
    """Longest time that the store may add to a request; then it continues without these blocks."""
    buffer: SizeBytes = BUFFER_BYTES
    """Memory of each pool node for blocks on their way to the store and from it, half of it each.
    A sealed block has to fit into a half."""

    @field_validator("deadline")
    @classmethod
    def _is_short(cls, value: int) -> int:
        if not DEADLINE_NS_MIN <= value <= DEADLINE_NS_MAX:
            raise ValueError(f"{value / 10**9:g} s; the limits are 1ms and 60s")
        return value

    @field_validator("buffer")
    @classmethod
    def _holds_blocks(cls, value: int) -> int:
        if not BUFFER_BYTES_MIN <= value <= BUFFER_BYTES_MAX:
            raise ValueError(f"{value} bytes; the limits are 16MiB and 16GiB")
        return value
