"""Metering of prefills and decodes in a gateway, and its records of terms.

Usage is summed by tenant, phase, cluster and class, and recorded every RECORD_BEATS seconds, before
each change of terms, and at the end of the process. So a line of the log is written for each
combination that was used and not for each request, and the terms before a line are those of all
usage in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from fractions import Fraction

from prfaas.billing.metrics import UsageMetrics
from prfaas.config.clusters import ClusterRole, ClusterTable
from prfaas.core.billing.terms import ClusterTerms, exact, terms_record
from prfaas.core.billing.usage import Amounts, Meter, UsageKey, UsagePhase, usage_record
from prfaas.core.facts import FactStream
from prfaas.core.market.market import Market
from prfaas.core.request.facts import PrefillBooked, RequestEnded
from prfaas.core.routing.decision import Path

RECORD_BEATS = 5
"""Seconds between two records of usage."""
TERMS_BEATS = 3600
"""Seconds after which unchanged terms are recorded again: files of a log may be removed."""
POOLS_MAX = 100
"""Pool nodes in a record; more are in further ones."""

Write = Callable[[Mapping[str, object]], None]


class GatewayMeter:
    """Usage of the tenants of a gateway. A loop of the gateway.

    Args:
        clusters: Clusters and their engines, as of now.
        market: Prices; None without.
        tags: Tag of each tenant by name.
        write: Writes a record to the audit log.
        metrics: Counters of what is recorded.
    """

    turns_each_beat = False

    def __init__(
        self,
        clusters: Mapping[str, ClusterTable],
        market: Market | None,
        tags: Mapping[str, str],
        write: Write,
        metrics: UsageMetrics,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clusters, self._market, self._tags = clusters, market, tags
        self._write = write
        self._metrics, self._meter = metrics, Meter()
        self._terms: dict[str, ClusterTerms] = {}
        self._num_beats = 0
        self._local = next(n for n, c in clusters.items() if c.role is ClusterRole.PD)
        # Terms precede all usage.
        self.beat(clock_ns())

    # --- usage ---

    def follow(self, facts: FactStream) -> None:
        """Meter the prefills and decodes of the gateway from now on."""
        facts.subscribe(PrefillBooked, self._prefill)
        facts.subscribe(RequestEnded, self._decoded)

    def _prefill(self, booked: PrefillBooked) -> None:
        arrival, routed = booked.arrival, booked.routed
        is_remote = routed.decision.path is Path.REMOTE
        key = UsageKey(
            arrival.tenant,
            UsagePhase.PREFILL_REMOTE if is_remote else UsagePhase.PREFILL_LOCAL,
            routed.cluster,
            "" if arrival.service is None else arrival.service.name,
        )
        self._meter.add(key, Amounts(1, routed.num_tokens_to_prefill, booked.work_ns))
        self._metrics.saved(key, booked.saved_ns)

    def _decoded(self, ended: RequestEnded) -> None:
        """A request ended; without a decode nothing is counted."""
        if ended.decode_at_ns is None:
            return
        key = UsageKey(ended.tenant, UsagePhase.DECODE, self._local, ended.service)
        self._meter.add(key, Amounts(1, ended.num_output_tokens, slot_ns=ended.slot_ns))

    # --- records ---

    def beat(self, now_ns: int) -> None:
        """A second has passed; terms change with the time of day."""
        changed = {n: new for n, new in self._now(now_ns).items() if new != self._terms.get(n)}
        if self._num_beats % TERMS_BEATS == 0:
            changed = self._now(now_ns)
        if changed or self._num_beats % RECORD_BEATS == 0:
            self.record()
        self._num_beats += 1
        self._terms |= changed
        for terms in changed.values():
            for record in _records(terms):
                self._write(record)

    def turn(self, now_ns: int) -> None:
        """Nothing: usage is also recorded while the loops are frozen."""

    def record(self) -> None:
        """Record the usage since the last call."""
        for key, amounts in self._meter.take().items():
            self._metrics.used(key, amounts)
            tag = self._tags.get(key.tenant, "")
            named = key._replace(tenant=tag or key.tenant)
            self._write(usage_record(named, amounts, tenant_name=key.tenant))

    def _now(self, now_ns: int) -> dict[str, ClusterTerms]:
        return {name: self._of(name, table, now_ns) for name, table in self._clusters.items()}

    def _of(self, name: str, table: ClusterTable, now_ns: int) -> ClusterTerms:
        engines = table.engines.values()
        terms = ClusterTerms(
            name,
            table.role.value,
            tuple(sorted({engine.pool for engine in engines})),
            slots=max((engine.num_slots for engine in engines), default=1),
        )
        price = None if self._market is None else self._market.prices.get(name)
        if price is None or self._market is None:
            return terms
        wall_ns = now_ns + self._market.wall_ns
        watts: Fraction | None = exact(price.watts) if price.watts else None
        return ClusterTerms(
            name,
            terms.role,
            terms.pools,
            price.gpus,
            terms.slots,
            exact(price.gpu_hour.at(wall_ns)),
            exact(price.per_tb.at(wall_ns)),
            exact(price.gb_hour.at(wall_ns)),
            watts,
        )


def _records(terms: ClusterTerms) -> list[dict[str, object]]:
    record, pools = terms_record(terms), terms.pools
    parts = [pools[i : i + POOLS_MAX] for i in range(0, len(pools), POOLS_MAX)] or [()]
    return [record | {"pools": ",".join(part)} for part in parts]
