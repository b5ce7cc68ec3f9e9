"""Metrics of the market of a gateway."""

from __future__ import annotations

import math
import time

from prometheus_client import CollectorRegistry, Counter, Gauge

from prfaas.core.market.market import Market
from prfaas.units import NS_PER_S


class MarketMetrics:
    """Prices of each cluster, and what was spent there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._cost = Counter(
            "prfaas_prefill_cost",
            "Cost of the prefills that were sent to a cluster, by the prices of that time, for "
            "compute and for bytes on its link",
            ("cluster", "part"),
            registry=registry,
        )
        self._sent = Counter(
            "prfaas_priced_prefills",
            "Prefills that were sent to a cluster with a price",
            ("cluster",),
            registry=registry,
        )
        self._price = Gauge(
            "prfaas_gpu_hour_price",
            "Price of one GPU of a cluster for one hour",
            ("cluster",),
            registry=registry,
        )
        self._leaves = Gauge(
            "prfaas_capacity_leaves_seconds",
            "Time until the capacity of a cluster is revoked; 0 is gone, NaN is not announced",
            ("cluster",),
            registry=registry,
        )
        self._shown: dict[tuple[str, str], float] = {}

    def show(self, market: Market | None) -> None:
        """Take over what the market counts; nothing without one."""
        if market is None:
            return
        now_ns = time.monotonic_ns()
        for name in market.prices:
            for part, sums in (("compute", market.gpu_cost), ("bytes", market.link_cost)):
                self._cost.labels(name, part).inc(self._more(name, part, sums[name]))
            self._sent.labels(name).inc(self._more(name, "sent", market.num_sent[name]))
            there = market.quote(name, now_ns)
            if there is None:
                continue
            self._price.labels(name).set(there.per_gpu_h)
            leaves_in_ns = there.leaves_in_ns
            leaves_s = math.nan if leaves_in_ns is None else max(leaves_in_ns, 0) / NS_PER_S
            self._leaves.labels(name).set(leaves_s)

    def _more(self, cluster: str, what: str, value: float) -> float:
        """Growth of a sum since it was shown last."""
        before = self._shown.get((cluster, what), 0.0)
        self._shown[cluster, what] = value
        return max(value - before, 0.0)
