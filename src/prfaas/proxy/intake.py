"""Bodies of prefills that come to the proxy or are held: too many of a site are refused unread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.core.sharing.engine_queue import EngineQueue, Why
from prfaas.proxy.turns import TurnRefusedError

BODY_BYTES_MAX = 32 << 20
HELD_BYTES_MAX = 256 << 20
"""Bodies of one site that come, wait or run, together."""


class Intake:
    """Counts what comes from each site, for the ports of all engines.

    Args:
        queue: Requests whose bodies are here.
    """

    def __init__(self, queue: EngineQueue) -> None:
        self._queue = queue
        self._held_bytes = Counter[str]()
        self._coming: dict[str, Counter[str]] = {}
        """Bodies that are being read, by site and engine."""

    @contextmanager
    def hold(self, site: str, num_bytes: int) -> Iterator[None]:
        """Hold a body until the end of the block.

        Raises:
            TurnRefusedError: It is too long, or the site has too many bytes here.
        """
        if num_bytes > BODY_BYTES_MAX or self._held_bytes[site] + num_bytes > HELD_BYTES_MAX:
            raise TurnRefusedError(Why.MEMORY)
        self._held_bytes[site] += num_bytes
        try:
            yield
        finally:
            self._held_bytes[site] -= num_bytes

    @contextmanager
    def read(self, site: str, engine: str) -> Iterator[None]:
        """Read a body in the block.

        Raises:
            TurnRefusedError: The site may have no more requests, with those whose bodies come.
        """
        coming = self._coming.setdefault(site, Counter())
        coming[engine] += 1
        try:
            if (why := self._queue.refuses(site, coming)) is not None:
                raise TurnRefusedError(why)
            yield
        finally:
            coming[engine] -= 1
