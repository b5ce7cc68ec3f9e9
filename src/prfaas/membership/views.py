"""Members and sources as operators see them: status and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from prfaas.core.membership.members import MemberKind, RefusalCause, State
from prfaas.series import Families
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.membership.follower import MembershipFollower


def members_json(follower: MembershipFollower) -> list[dict[str, object]]:
    """All members, with state, age and reason of a refusal."""
    now_ns = time.monotonic_ns()
    return [
        {
            "name": row.name,
            "kind": row.member.kind.value if row.member else None,
            "cluster": row.member.cluster if row.member else None,
            "address": row.member.address if row.member else None,
            "state": row.state.value,
            "age_s": round((now_ns - row.since_ns) / NS_PER_S, 1),
            "reason": row.refusal.reason.value if row.refusal else None,
            "why": row.refusal.words if row.refusal else "",
        }
        for row in follower.machine.rows()
    ]


def sources_json(follower: MembershipFollower) -> list[dict[str, object]]:
    """All sources, with the age of their lists and their faults."""
    now_s = asyncio.get_running_loop().time()
    return [
        {
            "name": source.name,
            "age_s": round(max(0.0, now_s - source.current_at_s), 1),
            "fault": source.fault,
            "waits": source.waits,
        }
        for source in follower.sources
    ]


class MemberMetrics:
    """Metrics of membership."""

    def __init__(self, registry: CollectorRegistry, prefix: str = "") -> None:
        make = Families(registry)
        self._members = make.gauge(f"{prefix}members", "Members of the site", "kind", "state")
        self._refused = make.gauge(f"{prefix}members_refused", "Refused members", "reason")
        self._age = make.gauge(
            f"{prefix}membership_age_seconds",
            "Time since the list of a source of members was known to be current",
            "source",
        )
        self._fault = make.gauge(
            f"{prefix}membership_fault",
            "1 while the list of a source of members is old: unreachable, or its change refused",
            "source",
        )

    def show(self, follower: MembershipFollower) -> None:
        """Set the metrics from what there is now."""
        rows = follower.machine.rows()
        members = Counter((row.member.kind, row.state) for row in rows if row.member is not None)
        refused = Counter(row.refusal.reason for row in rows if row.refusal is not None)
        for kind in MemberKind:
            for state in State:
                self._members.labels(kind.value, state.value).set(members[kind, state])
        for reason in RefusalCause:
            self._refused.labels(reason.value).set(refused[reason])
        now_s = asyncio.get_running_loop().time() if follower.sources else 0.0
        for source in follower.sources:
            self._age.labels(source.name).set(max(0.0, now_s - source.current_at_s))
            self._fault.labels(source.name).set(bool(source.fault))


class PartRegistry(CollectorRegistry):
    """A registry that forgets the series of parts that have left."""

    def __init__(self) -> None:
        super().__init__()
        self._labelled: list[MetricWrapperBase] = []

    def register(self, collector: Collector) -> None:
        """See `CollectorRegistry`."""
        super().register(collector)
        if isinstance(collector, MetricWrapperBase):
            self._labelled.append(collector)

    def forget(self, label: str, value: str) -> None:
        """Remove all series with a value of a label."""
        for metric in self._labelled:
            # A metric without this label refuses it.
            try:
                metric.remove_by_labels({label: value})
            except ValueError:
                continue
