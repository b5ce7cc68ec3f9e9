"""Bodies of prefills that come to the proxy or are held: too many of a site are refused unread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prfaas.core.sharing.engine_queue import EngineQueue, QueueRefusal
from prfaas.proxy.turns import TurnRefusedError

BODY_BYTES_MAX = 32 << 20
HELD_BYTES_MAX = 256 << 20
"""Bodies of one site that come, wait or run, together."""
REFUSED_BYTES_PER_S = 4 << 20
"""Rate of bodies of one site that are read and then refused."""
SMALL_BYTES = 64 << 10
"""A body up to this costs no more than its refusal would."""


class Intake:
    """Counts what comes from each site, for the ports of all engines.

    Args:
        queue: Requests whose bodies are here.
    """

    def __init__(self, queue: EngineQueue, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._queue, self._clock_s = queue, clock_s
        self._paid_at_s: dict[str, float] = {}
        """Instant from which a site may have a long body read again."""
        self._held_bytes = Counter[str]()
        self._coming: dict[str, Counter[str]] = {}
        """Bodies that are being read, by site and engine."""

    @contextmanager
    def hold(self, site: str, num_bytes: int) -> Iterator[None]:
        """Hold a body until the end of the block.

        Raises:
            TurnRefusedError: It is too long, the site has too many bytes here, or too many of its
                bodies were refused.
        """
        if num_bytes > SMALL_BYTES and self._paid_at_s.get(site, 0.0) > self._clock_s():
            raise TurnRefusedError(QueueRefusal.REFUSALS)
        if num_bytes > BODY_BYTES_MAX or self._held_bytes[site] + num_bytes > HELD_BYTES_MAX:
            raise TurnRefusedError(QueueRefusal.MEMORY)
        self._held_bytes[site] += num_bytes
        try:
            yield
        finally:
            self._held_bytes[site] -= num_bytes

    def refused(self, site: str, num_bytes: int) -> None:
        """A body of a site was read in vain."""
        since_s = max(self._paid_at_s.get(site, 0.0), self._clock_s())
        self._paid_at_s[site] = since_s + num_bytes / REFUSED_BYTES_PER_S

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
