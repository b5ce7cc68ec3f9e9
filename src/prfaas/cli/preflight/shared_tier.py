"""Reachability of the buckets of a deployment, and the files of their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError, TransferError
from prfaas.pool.shared.bucket import S3Bucket
from prfaas.pool.shared.settings import s3_settings
from prfaas.pool.shared.site_keys import load_keys

LIMIT_S = 5.0


def unusable_buckets(deployment: Deployment) -> Iterator[str]:
    """A line for every bucket that pool nodes could not use if they were started here."""
    for name, cluster in deployment.clusters.items():
        if cluster.s3 is None:
            continue
        settings = s3_settings(cluster.s3, name)
        try:
            load_keys(settings.keys)
        except ConfigError as error:
            yield f"clusters.{name}.s3.keys: {error}"
        try:
            asyncio.run(_listed(S3Bucket(settings)))
        except (ConfigError, TransferError) as error:
            yield (
                f"clusters.{name}.s3: bucket {settings.bucket} cannot be listed from here: {error}"
            )


async def _listed(bucket: S3Bucket) -> None:
    async for _ in bucket.list(LIMIT_S):
        return
