"""States of parts: reports of pool nodes, and the engines that take requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas.core.kv.blocks import Layout
from prfaas.wire.messages.gateway import LinkTelemetry

LinkName = tuple[str, str]
"""Source and destination pool of a link."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """Latest report of a pool node; empty while its event stream is disconnected."""

    is_live: bool = False
    """True if its event stream is connected."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    links: Mapping[str, bool] = field(default_factory=dict)
    """True if the link to a peer is up, by the peer's name."""
    telemetry: Mapping[str, LinkTelemetry] = field(default_factory=dict)
    """Measurements of these links."""
    is_draining: bool = False
    """True if it takes no new transfers."""
    memory_bytes: int = 0
    """Its memory for blocks; 0 while unknown."""


class EngineStates:
    """Engines that take new requests.

    Args:
        clusters: Cluster of each engine by name.
    """

    def __init__(self, clusters: Mapping[str, str]) -> None:
        self.cluster_of = dict(clusters)
        self.healthy: set[str] = set()
        self.broken: set[str | LinkName] = set()
        """Engines and links that a breaker keeps from new requests."""
        self.drained: set[str] = set()
        """Engines that the operator has drained; one that leaves and returns stays drained."""
        self.paused: set[str] = set()
        """Engines that get nothing new until a purge is done."""
        self.withheld: set[str] = set()
        """Engines and pools that leave, or that their source calls not ready."""
        self.clusters_off: set[str] = set()
        self.num_changes = 0
        """Changes so far: who has looked at all engines need not look again before the next one."""
        self.changed: set[str] = set()
        """Engines that changed or were polled, until their slots are counted again."""

    def note(self, name: str) -> None:
        """An engine has changed, come or left."""
        self.num_changes += 1
        self.changed.add(name)

    def of(self, cluster: str) -> list[str]:
        """The engines of a cluster."""
        return [name for name, other in self.cluster_of.items() if other == cluster]

    def remove(self, name: str) -> None:
        """Forget an engine that has left."""
        self.cluster_of.pop(name, None)
        for names in (self.healthy, self.paused, self.withheld, self.broken):
            names.discard(name)

    def is_on(self, cluster: str) -> bool:
        """Return True if the operator lets a cluster take work."""
        return cluster not in self.clusters_off

    def is_barred(self, name: str) -> bool:
        """Return True if the operator has drained an engine or its cluster, or a purge waits."""
        if name in self.drained or name in self.paused:
            return True
        return self.cluster_of[name] in self.clusters_off

    def takes(self, name: str) -> bool:
        """Return True if an engine gets new requests: it is healthy, and nothing bars it."""
        is_well = name in self.healthy and name not in self.broken
        return is_well and name not in self.withheld and not self.is_barred(name)

    def why_unused(self, name: str) -> str:
        """Return why an engine takes no requests."""
        if name not in self.healthy:
            return "is not ready"
        return "is barred by its breaker" if name in self.broken else "is drained"
