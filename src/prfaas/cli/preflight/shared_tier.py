"""Reachability of the shared tiers of a deployment, and the files of their keys."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError, TransferError
from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.shared.bucket import S3Bucket
from prfaas.pool.shared.mooncake.client import check_library
from prfaas.pool.shared.mooncake.settings import MooncakeSettings
from prfaas.pool.shared.settings import S3Settings, shared_settings

LIMIT_S = 5.0


def unusable_shared_tiers(deployment: Deployment) -> Iterator[str]:
    """A line for all that would keep pool nodes started here from using a shared tier."""
    for name, cluster in deployment.clusters.items():
        settings = shared_settings(cluster, name)
        if settings is None:
            continue
        is_s3 = isinstance(settings, S3Settings)
        place = f"clusters.{name}.{'s3' if is_s3 else 'mooncake'}"
        try:
            load_keys(settings.keys)
        except ConfigError as error:
            yield f"{place}.keys: {error}"
        found = _bucket(settings) if isinstance(settings, S3Settings) else _store(settings)
        yield from (f"{place}: {problem}" for problem in found)


def unusable_disk_keys(deployment: Deployment) -> Iterator[str]:
    """A line for each file of keys of a disk tier that a pool node started here cannot use."""
    for cluster, table in deployment.clusters.items():
        for name, pool in table.pools.items():
            if pool.disk_keys is None or pool.address:
                continue
            try:
                load_keys(pool.disk_keys, "the disk tier")
            except ConfigError as error:
                yield f"clusters.{cluster}.pools.{name}.disk_keys: {error}"


def _bucket(settings: S3Settings) -> Iterator[str]:
    try:
        asyncio.run(_listed(S3Bucket(settings)))
    except (ConfigError, TransferError) as error:
        yield f"bucket {settings.bucket} cannot be listed from here: {error}"


async def _listed(bucket: S3Bucket) -> None:
    async for _ in bucket.list(LIMIT_S):
        return


def _store(settings: MooncakeSettings) -> Iterator[str]:
    try:
        check_library()
    except ConfigError as error:
        yield str(error)
    host, port = settings.master
    try:
        socket.create_connection((host, port), LIMIT_S).close()
    except OSError as error:
        yield f"master {host}:{port} cannot be reached from here: {error.strerror or error}"
