"""Renewal of identities while a process runs: it reads its files again when they change.

Files are compared by content, so it does not matter how they are changed: written in place,
renamed, or behind a symbolic link that is swapped, as the kubelet does with Secrets.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import signal
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from prfaas.errors import ConfigError
from prfaas.limited_files import digest_of
from prfaas.logs import log_event
from prfaas.wire.certificates import ends_at, ends_soon, faults
from prfaas.wire.identity import Identity

_log = logging.getLogger(__name__)

POLL_S = 10.0
"""Time between two comparisons. Files are read again when two comparisons find the same change."""


def identity_gauge(kind: str, registry: CollectorRegistry) -> Gauge:
    """Create the gauge of the end of a process's identity."""
    return Gauge(
        f"prfaas_{kind}_identity_ends_timestamp_seconds",
        f"End of the certificate of this {kind} or its authority: Unix time",
        registry=registry,
    )


class Renewal:
    """Watches over the identity of a process.

    Args:
        name: Name in the deployment file.
        renew: Loads the files; raises ConfigError if they cannot be used.
        gauge: Shows when it ends.
        poll_s: Time between two comparisons of the files, seconds.
    """

    def __init__(
        self,
        identity: Identity,
        name: str,
        renew: Callable[[], None],
        gauge: Gauge,
        poll_s: float = POLL_S,
    ) -> None:
        self._identity, self._name, self._renew, self._gauge = identity, name, renew, gauge
        self._poll_s = poll_s
        self._taken = self._content()
        """Digest of the files that were last accepted or refused."""

    def watch(self) -> None:
        """Log problems of the identity, and follow its files. Call it on the main thread."""
        self._look()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.hang_up)
        self._following = loop.create_task(self._follow())

    async def _follow(self) -> None:
        """Read changed files again once two comparisons find the same content."""
        before = self._taken
        while True:
            await asyncio.sleep(self._poll_s)
            now = self._content()
            if now == before != self._taken:
                self.hang_up()
            before = now

    def _content(self) -> bytes:
        identity = self._identity
        return digest_of((identity.authority, identity.certificate, identity.key))

    def hang_up(self) -> None:
        """Load the files, or keep the previous contents."""
        self._taken = self._content()
        try:
            self._renew()
        except ConfigError as error:
            log_event(_log, logging.ERROR, "identity_kept", why=str(error))
            return
        end = ends_at(self._identity)
        log_event(_log, logging.INFO, "identity_renewed", ends=end.isoformat() if end else None)
        self._look()

    def _look(self) -> None:
        now = datetime.datetime.now(datetime.UTC)
        end = ends_at(self._identity)
        if end is not None:
            self._gauge.set(end.timestamp())
        for why in faults(self._identity, self._name, now):
            log_event(_log, logging.ERROR, "identity_wrong", why=why)
        for why in ends_soon(self._identity, now):
            log_event(_log, logging.WARNING, "identity_ends_soon", why=why)
