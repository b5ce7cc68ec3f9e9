"""TLS towards clients: one certificate, taken up anew when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from prfaas.config.deployment import ClientTlsTable
from prfaas.errors import ConfigError
from prfaas.logs import log_event

LOOK_S = 10.0
"""Time between two checks of the files. A changed symbolic link counts as a change."""
_log = logging.getLogger(__name__)


def server_context(table: ClientTlsTable) -> ssl.SSLContext:
    """TLS 1.2 and later with the certificate of a gateway; clients show none.

    Raises:
        ConfigError: A file is missing, or the key is not the certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, table)
    return context


def _load(context: ssl.SSLContext, table: ClientTlsTable) -> None:
    try:
        # Without a password OpenSSL would ask for one at the terminal, and wait.
        context.load_cert_chain(table.certificate, table.key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"gateway.tls: certificate {table.certificate} and key {table.key} cannot be used: "
            f"{error}; both are PEM, the certificate with its chain, the key without a password"
        ) from None


class ClientTls:
    """The certificate that a gateway shows its clients.

    Raises:
        ConfigError: The files cannot be used.
    """

    def __init__(self, table: ClientTlsTable) -> None:
        self._table = table
        self._seen = self._state()
        self.context = server_context(table)

    @classmethod
    def of(cls, table: ClientTlsTable | None) -> ClientTls | None:
        """TLS by a table; None without a table.

        Raises:
            ConfigError: The files cannot be used.
        """
        return cls(table) if table else None

    def renew(self) -> None:
        """Show new connections what the files hold at this moment.

        Raises:
            ConfigError: They cannot be used; the certificate of before is kept.
        """
        self._seen = self._state()
        server_context(self._table)  # whole and consistent, before the one in use is touched
        _load(self.context, self._table)

    def look(self) -> bool:
        """Renew if the files changed; report whether a new certificate is shown."""
        if self._state() == self._seen:
            return False
        try:
            self.renew()
        except ConfigError as error:
            log_event(_log, logging.ERROR, "certificate_kept", why=str(error))
            return False
        log_event(_log, logging.INFO, "certificate_renewed")
        return True

    async def watch(self) -> None:
        """Check the files periodically, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_file_state(path) for path in (self._table.certificate, self._table.key))


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
