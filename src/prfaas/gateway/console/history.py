"""Figures of the console over time: rates of links, the last hour by second, and the present state,
read once for all who follow it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.telemetry.metrics import Totals
from prfaas.units import BITS_PER_BYTE

SAMPLES_MAX = 3600
COUNTS = ("num_in_flight", "num_remote", "num_local", "num_refused", "num_fallbacks")


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One link at one instant."""

    up: bool
    goodput_bits_per_s: int
    """While it has something to send; 0 while unknown."""
    rtt_ms: float
    """Of its last ping."""
    queued_bytes: int
    """Waiting for a connection."""
    in_flight_bytes: int
    """Sent, and not known to have arrived."""
    offload_threshold: int | None
    """t, tokens; None between hosts of one cluster."""
    kv_bytes: int = 0
    """KV cache that arrived over it since the gateway started."""
    cost: float | None = None
    """Price of these bytes, in the currency of the plan; None without a price."""
    carried_bits_per_s: int = 0
    """Bytes delivered, averaged over the last `flow.WINDOW_S` seconds."""
    budget_bits_per_s: int = 0
    """Rate the operator allows; 0 is no limit."""

    @property
    def is_busy(self) -> bool:
        """Return True if anything is in transit, so that the goodput is of now."""
        return bool(self.queued_bytes or self.in_flight_bytes)


@dataclass(frozen=True, slots=True)
class HistorySample:
    """One instant; `links` are by "SOURCE>DESTINATION"."""

    at_unix_s: float
    totals: Totals
    links: Mapping[str, LinkSample]

    def as_json(self) -> JsonObject:
        """The sample as the console reads it."""
        fields: JsonObject = {"at_unix_s": self.at_unix_s, "kv_bytes": self.totals.kv_bytes}
        fields |= {name: getattr(self.totals, name) for name in COUNTS}
        links = {
            name: {field: getattr(link, field) for field in link.__slots__}
            for name, link in self.links.items()
        }
        return fields | {"links": links}


class History:
    """The last samples, the oldest forgotten first."""

    def __init__(self, samples_max: int = SAMPLES_MAX) -> None:
        self._samples: deque[HistorySample] = deque(maxlen=samples_max)

    def add(self, sample: HistorySample) -> None:
        """Take the next one."""
        self._samples.append(sample)

    def since(self, at_unix_s: float) -> list[HistorySample]:
        """Samples not older than an instant, the oldest first."""
        found = []
        for sample in reversed(self._samples):
            if sample.at_unix_s < at_unix_s:
                break
            found.append(sample)
        return found[::-1]

    def best_goodput(self, link: str) -> int:
        """The highest goodput of a link in all samples, bit/s."""
        seen = (sample.links.get(link) for sample in self._samples)
        return max((found.goodput_bits_per_s for found in seen if found), default=0)

    def __len__(self) -> int:
        return len(self._samples)


WINDOW_S = 5.0
"""Length of the average, seconds. Transfers of a demo take one; samples come once a second."""


class LinkFlow:
    """Bytes that a link delivered, and their rate over the last `WINDOW_S` seconds.

    The counter is that of the sending pool's connections, and restarts when they do.
    """

    def __init__(self) -> None:
        self._counter: int | None = None
        self._totals: deque[tuple[float, int]] = deque()
        self.delivered_bytes = 0
        """Since the first look; never falls."""

    def look(self, now_s: float, counter: int) -> None:
        """Take the counter's value in.

        Args:
            now_s: Any clock that does not go back, seconds.
            counter: Bytes that the connections of this moment delivered, at least 0.
        """
        if self._counter is not None:
            began_anew = counter < self._counter
            self.delivered_bytes += counter if began_anew else counter - self._counter
        self._counter = counter
        self._totals.append((now_s, self.delivered_bytes))
        while len(self._totals) > 2 and self._totals[1][0] <= now_s - WINDOW_S:
            self._totals.popleft()

    @property
    def bits_per_s(self) -> float:
        """Mean over the window, or over the life of a newer link; 0 after one sample."""
        if len(self._totals) < 2:
            return 0.0
        (then, before), (now, after) = self._totals[0], self._totals[-1]
        return (after - before) * BITS_PER_BYTE / (now - then) if now > then else 0.0


class LiveState:
    """The state as an event, at most one reading an interval however many pages are open.

    Nothing is read while nobody follows. Who is slow gets the newest and misses what lay between.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read
        self._event = b""
        """Empty when it is of an earlier interval and nobody followed."""
        self._number = 0
        self._fresh = asyncio.Event()
        self.num_followers = 0
        """Pages that are open."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count a follower for as long as it stays."""
        self.num_followers += 1
        try:
            yield
        finally:
            self.num_followers -= 1

    def beat(self) -> None:
        """The next interval begins."""
        self._event = b""
        if self.num_followers:
            self._publish()

    async def after(self, number: int) -> tuple[int, bytes]:
        """The newest event with its number, once that is beyond `number`; 0 is before all."""
        if not self._event:
            self._publish()
        while self._number <= number:
            await self._fresh.wait()
        return self._number, self._event

    def _publish(self) -> None:
        self._event = self._read()
        self._number += 1
        self._fresh.set()
        self._fresh = asyncio.Event()
