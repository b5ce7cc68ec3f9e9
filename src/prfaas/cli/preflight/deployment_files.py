"""Checks of files: tokenizer, certificate for clients, keys of tiers, and reachable tiers."""

from __future__ import annotations

import asyncio
import datetime
import socket
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509

from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError, TransferError
from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.shared.bucket import S3Bucket
from prfaas.pool.shared.mooncake.client import check_library
from prfaas.pool.shared.mooncake.settings import MooncakeSettings
from prfaas.pool.shared.settings import S3Settings, shared_settings

_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


def check_tokenizer(deployment: Deployment) -> None:
    """See that a checkpoint on this machine has a tokenizer.

    Raises:
        ConfigError: It has none: no request could be tokenised.
    """
    path = Path(deployment.model.path)
    if deployment.model.generate or not (path / "config.json").exists():
        return
    if any((path / name).exists() for name in _NAMES) or any(path.glob("*.tiktoken")):
        return
    raise ConfigError(
        f"no tokenizer at {path}: the gateway tokenises every prompt and needs {_NAMES[0]}, or one "
        f"of {', '.join(_NAMES[1:])}; copy it there from the source of the model"
    )


SOON_DAYS = 14


def check_client_tls(deployment: Deployment) -> None:
    """Refuse a `[gateway.tls]` that no client would accept; ConfigError if the files do not fit
    each other, or the certificate has ended."""
    table = deployment.gateway.tls
    if table is None:
        return
    from prfaas.gateway.http.connections import server_context

    server_context(table)
    ends = _ends_at(deployment)
    if ends <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(
            f"gateway.tls.certificate {table.certificate} ended at {ends:%Y-%m-%d %H:%M} UTC; "
            "clients refuse it: put a new one there, with its key"
        )


def client_tls_doubts(deployment: Deployment) -> Iterator[str]:
    """Yield a line if the certificate ends within `SOON_DAYS` days."""
    if deployment.gateway.tls is None:
        return
    left = _ends_at(deployment) - datetime.datetime.now(datetime.UTC)
    if left < datetime.timedelta(days=SOON_DAYS):
        yield f"gateway.tls.certificate {deployment.gateway.tls.certificate} ends in {left.days} d"


def _ends_at(deployment: Deployment) -> datetime.datetime:
    table = deployment.gateway.tls
    if table is None:
        raise ValueError("the deployment has no [gateway.tls]")
    first = x509.load_pem_x509_certificates(table.certificate.read_bytes())[0]
    return first.not_valid_after_utc


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
