"""Settings of the shared tier of a pool node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.config.clusters import ClusterTable, S3Table
from prfaas.config.governance.residency import footprint
from prfaas.pool.shared.mooncake.settings import MooncakeSettings, mooncake_settings
from prfaas.units import NS_PER_S

PACK_BYTES = 16 << 20
DEADLINE_NS = NS_PER_S
PREFIX = "prfaas"


@dataclass(frozen=True, slots=True)
class S3Timing:
    """Intervals and time limits of a tier in a bucket, seconds."""

    refresh_s: float = 5.0
    """Between lists of the bucket. A long list is asked for less often."""
    retry_s: float = 0.25
    """Between attempts while the bucket fails."""
    request_s: float = 5.0
    """Limit of a request that nobody waits for."""
    probe_s: float = 0.25
    """Limit of the time that look-ups wait for the first list."""
    flush_s: float = 5.0
    """A pack that is not full is written after this."""
    write_s: float = 30.0
    """Limit of writing a pack."""
    close_s: float = 3.0
    """Limit of the last writes when the node stops."""
    reread_s: float = 300.0
    """What was altered is read again after this."""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """An S3 bucket that pool nodes of a site share.

    Credentials are those of the environment: `AWS_ACCESS_KEY_ID` and the other variables of the
    AWS tools, or the role of the machine."""

    bucket: str
    keys: Path
    """File of the site's keys."""
    limit_bytes: int
    """Limit of what this node keeps in the bucket."""
    prefix: str = PREFIX
    """Of all objects of the site."""
    endpoint: str | None = None
    """URL of the server; None is AWS."""
    region: str | None = None
    """Region of the bucket; None is that of the environment."""
    deadline_ns: int = DEADLINE_NS
    """Longest time that reads of the tier may add to a request."""
    pack_bytes: int = PACK_BYTES
    """Size of an object."""
    timing: S3Timing = S3Timing()
    """Intervals, which no table has."""

    @property
    def deadline_s(self) -> float:
        """The deadline, seconds."""
        return self.deadline_ns / NS_PER_S

    @property
    def read_limit_s(self) -> float:
        """Time limit of all reads of a request, seconds."""
        return self.deadline_s


SharedSettings = S3Settings | MooncakeSettings
"""Settings of a shared tier of any kind."""


def s3_settings(table: S3Table, cluster: str) -> S3Settings:
    """Settings from a table of the deployment file.

    Args:
        cluster: Name of its cluster, which is the prefix unless the table has one.
    """
    return S3Settings(
        table.bucket,
        table.keys,
        table.limit,
        table.prefix or cluster,
        table.endpoint,
        table.region,
        table.deadline,
        table.object_size,
    )


def shared_settings(cluster: ClusterTable, name: str) -> SharedSettings | None:
    """Settings of the shared tier of a cluster; None without one.

    With regions, they are part of the prefix: what was written under others is not read.
    """
    found: SharedSettings
    if cluster.mooncake is not None:
        found = mooncake_settings(cluster.mooncake, name)
    elif cluster.s3 is not None:
        found = s3_settings(cluster.s3, name)
    else:
        return None
    regions = "-".join(sorted(footprint(cluster)))
    return replace(found, prefix=f"{found.prefix}/in-{regions}") if regions else found
