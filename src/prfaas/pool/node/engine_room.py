"""The engine room of a pool node: the local engines that are connected, and their requests."""

from __future__ import annotations

import logging

from prfaas.core.facts import FactStream
from prfaas.core.transfer.facts import RECEIVED, EnginesChanged, TransferDone
from prfaas.logs import log_event
from prfaas.pool.engine.engine_requests import EnginePushes, EngineRequests
from prfaas.pool.engine.engine_server import ConnectedEngines, EnginePort, EngineSession
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.link_room import LinkRoom
from prfaas.pool.node.own_site import OwnSite
from prfaas.pool.node.store_room import StoreRoom
from prfaas.wire.messages.codec import AnyMessage

log = logging.getLogger(__name__)


class EngineRoom:
    """Engines of one pool node.

    Args:
        facts: Told of engines that come and go.
        engines: Connected engines; changed in place.
    """

    def __init__(
        self,
        site: OwnSite,
        facts: FactStream,
        metrics: PoolMetrics,
        store: StoreRoom,
        links: LinkRoom,
        engines: ConnectedEngines,
    ) -> None:
        settings = site.settings
        self._facts, self._store, self._links = facts, store, links
        self.engines = engines
        self.pushes = EnginePushes(
            links.links,
            links.tickets,
            links.sending,
            metrics,
            facts,
            settings.clock_ns,
            needs_grant=settings.needs_grant,
            is_shared=site.is_shared,
        )
        self.requests = EngineRequests(
            settings.name,
            store.memory,
            links.inbound,
            self.pushes,
            metrics,
            settings.read_limit_s,
            settings.wall_s,
        )
        self.port = EnginePort(settings.socket_path, self, settings.hello_timeout_s)
        facts.subscribe(TransferDone, self._transfer_done)

    def came(self, engine: EngineSession) -> None:
        """An engine has sent its hello."""
        log_event(log, logging.INFO, "engine_connected", engine=engine.name)
        self.engines.add(engine)
        self._links.layouts.learn(engine.layout)
        if self._store.shared is not None:
            self._store.shared.learn(engine.layout)
        self._facts.report(EnginesChanged())

    def handle(self, engine: EngineSession, message: AnyMessage) -> None:
        """See `EngineRequests.handle`."""
        self.requests.handle(engine, message)

    def left(self, engine: EngineSession) -> None:
        """An engine has disconnected."""
        self.requests.left(engine)
        if self.engines.remove(engine):
            self._facts.report(EnginesChanged())

    def _transfer_done(self, fact: TransferDone) -> None:
        if fact.direction == RECEIVED:
            self.requests.transfer_over(fact.transfer.transfer_id)
