"""Settings of the shared tier of a pool node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.config.clusters import S3Table
from prfaas.units import NS_PER_S

PACK_BYTES = 16 << 20
DEADLINE_NS = NS_PER_S
PREFIX = "prfaas"


@dataclass(frozen=True, slots=True)
class S3Settings:
    """An S3 bucket that pool nodes of a site share.

    Credentials are those of the environment: `AWS_ACCESS_KEY_ID` and the other variables of the
    AWS tools, or the role of the machine.

    Attributes:
        bucket: Name of the bucket.
        keys: File of the site's keys.
        limit_bytes: Limit of what this node keeps in the bucket.
        prefix: Of all objects of the site.
        endpoint: URL of the server; None is AWS.
        region: Region of the bucket; None is that of the environment.
        deadline_ns: Longest time that reads of the tier may add to a request.
        pack_bytes: Size of an object.
    """

    bucket: str
    keys: Path
    limit_bytes: int
    prefix: str = PREFIX
    endpoint: str | None = None
    region: str | None = None
    deadline_ns: int = DEADLINE_NS
    pack_bytes: int = PACK_BYTES

    @property
    def deadline_s(self) -> float:
        """The deadline, seconds."""
        return self.deadline_ns / NS_PER_S


def s3_settings(table: S3Table, cluster: str) -> S3Settings:
    """Settings from a table of the deployment file.

    Args:
        table: The table.
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
