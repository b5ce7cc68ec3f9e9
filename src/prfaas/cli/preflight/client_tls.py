"""Checks of the certificate that gateways show clients."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from cryptography import x509

from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError

SOON_DAYS = 14


def check_client_tls(deployment: Deployment) -> None:
    """Refuse a `[gateway.tls]` that no client would accept.

    Raises:
        ConfigError: The files do not fit each other, or the certificate has ended.
    """
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
