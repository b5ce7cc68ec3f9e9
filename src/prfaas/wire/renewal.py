"""Identities are changed while a process runs: SIGHUP has it read its files again."""

from __future__ import annotations

import asyncio
import datetime
import logging
import signal
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from prfaas.errors import ConfigError
from prfaas.logs import log_event
from prfaas.wire.certificates import ends_at, ends_soon, faults
from prfaas.wire.identity import Identity

_log = logging.getLogger(__name__)


def identity_gauge(kind: str, registry: CollectorRegistry) -> Gauge:
    """When the identity of a kind of process ends, in a registry."""
    return Gauge(
        f"prfaas_{kind}_identity_ends_timestamp_seconds",
        f"When the certificate of this {kind}, or its authority, ends: Unix time",
        registry=registry,
    )


class Renewal:
    """Watches over the identity of a process.

    Args:
        identity: Its files.
        name: Name in the deployment file.
        renew: Takes up what the files hold; raises ConfigError if that can not be used.
        gauge: Shows when it ends.
    """

    def __init__(
        self, identity: Identity, name: str, renew: Callable[[], None], gauge: Gauge
    ) -> None:
        self._identity, self._name, self._renew, self._gauge = identity, name, renew, gauge

    def watch(self) -> None:
        """Say what is wrong with it, and do so again at every SIGHUP. On the main thread only."""
        self._look()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.hang_up)

    def hang_up(self) -> None:
        """Take up what the files hold at this moment, or go on with what was read before."""
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
