"""The gateway's connections to its members, which come and go while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prfaas.config.addresses import split_address
from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.control.changes import Loop
from prfaas.core.control.split import decode_name
from prfaas.core.dispatch.types import ClusterMember as Instance
from prfaas.core.membership.members import Member, MemberKind, RefusalCause
from prfaas.core.resilience.quarantine import label_of
from prfaas.gateway.engines.engine import Engine, OtherModelError
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.engines.kv_event_subscriber import EngineEvents
from prfaas.gateway.pools.layout_check import LayoutCheck
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.membership.entries import engine_table, pool_table
from prfaas.membership.follower import MembershipFollower

HOME_GROUP = 0
"""Group of the guards with the engines of the PD cluster."""


@dataclass(frozen=True, slots=True)
class GatewayMembers:
    """Adds and removes members in all parts of a gateway."""

    deployment: Deployment
    """The gateway's own copy, whose tables of engines and pools follow the members."""
    driver: Driver
    engines: Engines
    """Probe engines and run legs on them."""
    events: EngineEvents
    """Follow the KV events of engines."""
    pools: Pools
    layouts: LayoutCheck
    """Compare what engines announce."""
    metrics: GatewayMetrics
    journal: Journal

    def join(self, member: Member) -> bool:
        """Connect to a member; False if it is connected already."""
        if member.kind is MemberKind.ENGINE and member.name not in self.engines.by_name:
            self._join_engine(member)
        elif member.kind is MemberKind.POOL and member.name not in self.pools.names():
            self.deployment.clusters[member.cluster].pools[member.name] = pool_table(member)
            self.pools.add(member.name, split_address(member.address))
        else:
            return False
        self.metrics.parts_changed = True
        return True

    def withhold(self, name: str, *, withheld: bool) -> None:
        """Give a member nothing new, or lift that."""
        self.driver.set_withheld(name, time.monotonic_ns(), withheld=withheld)

    def leave(self, member: Member) -> None:
        """Disconnect from a member, and forget what it holds."""
        tables = self.deployment.clusters[member.cluster]
        if member.kind is MemberKind.ENGINE:
            self.events.remove(member.name)
            self.engines.remove(member.name)
            self.driver.remove_engine(member.name, time.monotonic_ns())
            self.engines.guards.remove(member.name)
            tables.engines.pop(member.name, None)
            self.layouts.note_changes(member.pool)
        elif member.kind is MemberKind.POOL:
            self.pools.remove(member.name)
            self.driver.remove_pool(member.name)
            links = [each for each in self.engines.guards.breakers if isinstance(each, tuple)]
            for link in [each for each in links if member.name in each]:
                self.engines.guards.remove(link)
                self.metrics.registry.forget("target", label_of(link))
            tables.pools.pop(member.name, None)
        for label in ("engine", "pool", "source", "destination"):
            self.metrics.registry.forget(label, member.name)
        self.metrics.registry.forget("target", label_of(member.name))

    def is_idle(self, member: Member) -> bool:
        """Return True if no leg and no transfer uses a member."""
        if self.driver.dispatcher.requests.uses(member.name, decode_name(member.name)):
            return False
        engine = self.engines.by_name.get(member.name)
        return engine is None or (not engine.num_in_flight and not engine.legs)

    def note(self, action: str, what: str, why: str) -> None:
        """Record a change for operators."""
        self.journal.note(Loop.MEMBERS, action, what, why=why)

    def follow(self, follower: MembershipFollower) -> None:
        """Report to the machine what engines answer, and whose blocks are of no use here."""

        def changed(engine: Engine, error: Exception | None) -> None:
            follower.well(engine.name, is_well=engine.is_ready)
            words = str(error) if isinstance(error, OtherModelError) else ""
            follower.judge(engine.name, RefusalCause.OTHER_MODEL, words)

        def compared(name: str, words: str) -> None:
            engine = self.engines.by_name.get(name)
            # A PD engine of another layout serves prompts by itself.
            if engine is not None and engine.role is ClusterRole.PRFAAS:
                follower.judge(name, RefusalCause.OTHER_LAYOUT, words)

        self.engines.probes.on_change = changed
        self.layouts.on_mismatch = compared

    def _join_engine(self, member: Member) -> None:
        cluster = self.deployment.clusters[member.cluster]
        table = cluster.engines[member.name] = engine_table(member)
        instance = Instance(member.name, member.pool)
        links = self.driver.add_engine(member.cluster, instance, table.role, time.monotonic_ns())
        is_local = cluster.role is ClusterRole.PD
        self.engines.guards.add(member.name, HOME_GROUP if is_local else None)
        for ends in links:
            if ends not in self.engines.guards.breakers:
                self.engines.guards.add(ends)
        self.engines.add(Engine.of(member.name, member.address, cluster.role, table))
        self.events.add(member.name, table)
        self.layouts.note_changes(member.pool)
