"""History of the last hour, one sample per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.telemetry.metrics import Totals

SAMPLES_MAX = 3600
COUNTS = ("num_in_flight", "num_remote", "num_local", "num_refused", "num_fallbacks")


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One link at one instant.

    Attributes:
        goodput_bits_per_s: While it has something to send; 0 while unknown.
        rtt_ms: Of its last ping.
        queued_bytes: Waiting for a connection.
        in_flight_bytes: Sent, and not known to have arrived.
        offload_threshold: t, tokens; None between hosts of one cluster.
        kv_bytes: KV cache that arrived over it since the gateway started.
        cost: Price of these bytes, in the currency of the plan; None without a price.
        carried_bits_per_s: Bytes delivered, averaged over the last `flow.WINDOW_S` seconds.
        budget_bits_per_s: Rate the operator allows; 0 is no limit.
    """

    up: bool
    goodput_bits_per_s: int
    rtt_ms: float
    queued_bytes: int
    in_flight_bytes: int
    offload_threshold: int | None
    kv_bytes: int = 0
    cost: float | None = None
    carried_bits_per_s: int = 0
    budget_bits_per_s: int = 0

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
