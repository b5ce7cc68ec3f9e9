"""The bar of a source whose blocks are wrong: no new requests, and its blocks are purged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prfaas.core.control.changes import ChangeEntry, Loop
from prfaas.errors import RequestError
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.logs import log_event
from prfaas.purge.loop import PurgeLoop

TRIES_MAX, PAUSE_S = 240, 5.0
"""Attempts to purge while another purge runs, and to see the end of prefills under way."""
_log = logging.getLogger(__name__)


class Barring:
    """Bars sources until an operator resumes their engines.

    Args:
        purging: Drops blocks in all pools and engines.
        note: Records a change: loop, action, what, `why`.
        pause_s: Wait between two attempts, seconds.
    """

    def __init__(
        self,
        engines: Engines,
        driver: Driver,
        purging: PurgeLoop,
        note: Callable[..., ChangeEntry],
        pause_s: float = PAUSE_S,
    ) -> None:
        self._engines, self._driver, self._purging = engines, driver, purging
        self._note, self._pause_s = note, pause_s
        self._barred: set[str] = set()

    async def bar(self, source: str, why: str) -> None:
        """Bar a source.

        Its blocks are purged at once, and again after the last prefill that was under way; so too
        if an operator has drained its engines, or none is known at present. A pool of a PD cluster
        is not barred: it passed on what it may have from others.

        Args:
            source: Pool that sent the blocks.
        """
        engines = [each for each in self._engines.by_name.values() if each.pool == source]
        if any(each.role == "pd" for each in engines):
            self.alarm(f"sent by {source}: {why}")
            return
        in_use = [each for each in engines if not self._driver.is_drained(each.name)]
        for each in in_use:
            self._driver.set_drained(each.name, time.monotonic_ns(), drained=True)
        if not in_use and source in self._barred:
            return
        self._barred.add(source)
        names = ", ".join(each.name for each in in_use)
        log_event(_log, logging.ERROR, "source_barred", source=source, engines=names, why=why)
        self._note(Loop.INTEGRITY, "bar", f"source {source}", old="in use", new="barred", why=why)
        await self._purge(source)
        for _ in range(TRIES_MAX):
            if not any(each.num_in_flight for each in engines):
                break
            await asyncio.sleep(self._pause_s)
        await self._purge(source)

    def alarm(self, why: str) -> None:
        """Report altered blocks that no pool is barred for."""
        log_event(_log, logging.ERROR, "altered_blocks_unattributed", why=why)
        self._note(Loop.INTEGRITY, "alarm", "altered blocks", old=None, new=None, why=why)

    def suspect(self, source: str, why: str) -> None:
        """Report a source that verification does not reach."""
        log_event(_log, logging.ERROR, "source_suspect", source=source, why=why)
        self._note(Loop.INTEGRITY, "alarm", f"source {source}", old=None, new=None, why=why)

    async def _purge(self, source: str) -> None:
        for _ in range(TRIES_MAX):
            try:
                await self._purging.purge(source, is_dry=False, loop=Loop.INTEGRITY)
                return  # Where it failed, it is repeated once that part is reached.
            except RequestError as error:
                if error.status != 409:
                    break
            await asyncio.sleep(self._pause_s)
        log_event(_log, logging.ERROR, "purge_not_done", source=source)
