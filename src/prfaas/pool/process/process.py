"""A pool node as a process: the node, and the annexes that follow its facts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import Counter

from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.pool_audit import MovedBytes, PoolAudit
from prfaas.audit.settings import AuditSettings
from prfaas.billing.metrics import storage_counter
from prfaas.billing.storage_meter import MeteredTier, StorageMeter
from prfaas.core.facts import FactStream
from prfaas.core.transfer.facts import HousekeepingDone, TransferDone
from prfaas.extras import missing
from prfaas.logs import log_event
from prfaas.pool.codec.loading import KERNELS, Kernels
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.node import PoolNode
from prfaas.pool.node.own_site import OwnSite
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.node.store_room import DISK, HOST
from prfaas.pool.process.comparing import Comparing
from prfaas.pool.process.transfer_spans import TransferSpans
from prfaas.pool.shared.opening import open_shared
from prfaas.pool.shared.settings import SharedSettings
from prfaas.pool.sites.sites import Sites
from prfaas.wire.messages.comparing import Compare

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolProcessSettings(PoolSettings):
    """Settings of a pool node and of its annexes."""

    shared: SharedSettings | None = None
    """Tier that pool nodes of the site share; None without one."""
    audit: AuditSettings | None = None
    """Audit log; None without."""
    contracts: Path | None = None
    """Contracts file of the sites that share this pool node; None without."""
    tracing: str | None = None
    """Collector that takes spans of transfers, as OTLP over HTTP; None sends none."""

    @property
    def read_limit_s(self) -> float | None:
        """Time limit of all slow reads of one request, seconds; None without a shared tier."""
        return self.shared.read_limit_s if self.shared is not None else None


class PoolProcess:
    """A pool node with its audit log, bill, spans, comparisons, and sites that share it.

    Raises:
        ConfigError: A setting, a file or a limit is wrong; see `PoolNode`.
    """

    def __init__(self, settings: PoolProcessSettings, kernels: Kernels = KERNELS) -> None:
        facts, clock_ns = FactStream(), settings.clock_ns
        moved = MovedBytes()
        metrics = PoolMetrics(moved if settings.audit is not None else None)
        audited, stored = annex_metrics(metrics)
        site = OwnSite(settings)
        if settings.contracts is not None:
            site = Sites(settings, settings.contracts)
        self.audit: PoolAudit | None = None
        if settings.audit is not None:
            self.audit = PoolAudit(
                settings.audit, settings.name, audited, moved, site.site_of, clock_ns
            )
            self.audit.follow(facts)
        site.follow(facts)
        shared = None
        if settings.shared is not None:
            shared = partial(open_shared, settings.shared, settings.name)
        self.node = PoolNode(site, facts, metrics, shared, kernels)
        self._comparing = Comparing(self.node.store, self.node.link_room.layouts)
        self.node.take_orders(Compare, self._comparing.asked)
        self._spans: TransferSpans | None = None
        if settings.tracing is not None:
            self._spans = TransferSpans(settings.tracing, settings.name)
            facts.subscribe(TransferDone, self._spans.ended)
        own: list[tuple[str, MeteredTier | None]] = [
            (HOST, self.node.store.room),
            (DISK, self.node.disk),
        ]
        tiers = {name: tier for name, tier in own if tier is not None}
        self.storage = StorageMeter(tiers, self._record, stored, clock_ns())
        facts.subscribe(HousekeepingDone, self._keep_house)

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """See `PoolNode.run`; what annexes have not recorded yet is recorded at the end."""
        if why := missing("coding and comparing blocks", "codecs"):
            log_event(_log, logging.INFO, "codecs_not_installed", why=why)
        try:
            await self.node.run(ready)
        finally:
            await self._comparing.close()
            self.storage.close(self.node.settings.clock_ns())
            if self.audit is not None:
                await asyncio.to_thread(self.audit.close)
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    def _record(self, fields: Mapping[str, object]) -> None:
        if self.audit is not None:
            self.audit.log.write(fields)

    def _keep_house(self, fact: HousekeepingDone) -> None:
        if self.audit is not None:
            self.audit.sweep(self.node.link_room.is_moving)
        self.storage.read(fact.now_ns)


def annex_metrics(metrics: PoolMetrics) -> tuple[AuditMetrics, Counter]:
    """Add the metrics of the audit log and of stored bytes, which are 0 without a log."""
    return AuditMetrics(metrics.registry, "pool"), storage_counter(metrics.registry)
