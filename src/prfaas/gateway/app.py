"""A gateway put together, started and stopped."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware

from prfaas.config.addresses import Endpoints, join_address, split_address
from prfaas.config.deployment import Deployment
from prfaas.core.admission.concurrency_slots import ConcurrencySlots
from prfaas.core.facts import FactStream
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.membership.machine import Membership
from prfaas.core.request.facts import PartSeen, PrefillBooked
from prfaas.core.request.fleet import RequestLimits, SharedState
from prfaas.errors import ConfigError
from prfaas.gateway.admission.charging import Charging
from prfaas.gateway.admission.engine_slots import Holding, holding_for
from prfaas.gateway.admission.quarantine import PromptQuarantine
from prfaas.gateway.api.auth import Access, RequestAdmission, is_for_clients
from prfaas.gateway.api.completions import CompletionService
from prfaas.gateway.api.health import Views
from prfaas.gateway.api.kv_lookup import KvLookup, TokenApi
from prfaas.gateway.api.operator_api import ControlApi
from prfaas.gateway.console.routes import Console
from prfaas.gateway.console.state import ConsoleReader
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.engines.kv_event_subscriber import EngineEvents, EventTiming
from prfaas.gateway.http.connections import (
    BACKLOG,
    ClientConnections,
    ClientTls,
    connections_max,
)
from prfaas.gateway.http.errors import openai_errors
from prfaas.gateway.http.request_body import BODY_TIMEOUT_S, Origins
from prfaas.gateway.loops.loops import Loops
from prfaas.gateway.loops.members import GatewayMembers
from prfaas.gateway.loops.operator_actions import Control
from prfaas.gateway.loops.ticker import ControlTicker, LeaseGiver
from prfaas.gateway.pools.layout_check import LayoutCheck
from prfaas.gateway.pools.pool_client import Pools, PoolTiming
from prfaas.gateway.pools.transfer_orders import Fetcher, TicketOffice
from prfaas.gateway.routing.change_log import Journal, make_guards
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.dispatcher_setup import NO_PLAN, Profiles
from prfaas.gateway.routing.transfer_tracker import Transfers
from prfaas.gateway.serving.decode_leg import DecodeLeg, StreamHandover
from prfaas.gateway.serving.prefill_leg import Movers, PrefillLeg, Rehearsal
from prfaas.gateway.serving.request_run import RequestServices as RunParts
from prfaas.gateway.serving.routing_step import Planner
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_records import Records
from prfaas.gateway.telemetry.tracing import Tracing
from prfaas.gateway.tenancy.tenants import Tenants, fairness
from prfaas.gateway.times import TIMES, Times
from prfaas.gateway.tokenization.chat_renderer import EngineRendering
from prfaas.gateway.tokenization.prompt_encoder import PromptMaker
from prfaas.membership.entries import entries_of, site_of
from prfaas.membership.follower import MembershipFollower
from prfaas.membership.port import Source
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_MS, NS_PER_S
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.gateway import Subscribe
from prfaas.wire.renewal import Renewal
from prfaas.wire.sockets import raise_descriptor_limit
from prfaas.wire.tickets import TicketSigner

SHUTDOWN_S = 5.0
"""Time limits of running requests after a stop, and of their end."""


class Page(Protocol):
    """Pages of the gateway."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""


class Front(Protocol):
    """Processes that take the connections of clients, in place of the gateway's own."""

    behind: Middleware
    """Makes the requests that they hand on those of their clients."""

    async def serve(self, own: ClientConnections, listening: Sequence[int]) -> None:
        """Take requests, and hand those on to this process that they do not serve.

        Args:
            own: Makes the connections over which they are handed on.
            listening: Descriptors of the sockets at which clients arrive.
        """

    def renew(self) -> None:
        """Have them read their identity and certificate again."""

    async def stop(self, seconds: float) -> None:
        """Take no more, and end those that are under way after this time, seconds."""


class Annex(Protocol):
    """A part outside of the house that lives as long as the gateway."""

    def start(self) -> None:
        """Begin; engines and pools are being connected."""

    async def stop(self) -> None:
        """End what needs engines and pools; requests have ended."""

    async def close(self) -> None:
        """End; all else has ended, and nothing is reported any more."""


async def run_gateway(
    gateway: Gateway,
    stop: asyncio.Event,
    on_listening: Callable[[str], None] = lambda _: None,
    is_alone: Callable[[], bool] = lambda: False,
) -> None:
    """Run a gateway until `stop` is set; ConfigError if the port is in use.

    Args:
        stop: Ends the gateway once its requests are served, or `gateway.drain_timeout` is over.
        is_alone: Asked when it is set: True if no other gateway takes requests, so that there is
            nobody to wait for before they are refused.
        on_listening: Called with the base URL once requests are taken.
    """
    raise_descriptor_limit()
    table = gateway.live.deployment.gateway
    Renewal(
        gateway.identity, table.name, gateway.renew_identity, gateway.metrics.identity_ends
    ).watch()
    try:
        url = await gateway.start()
        # Objects created so far live on: a garbage collection over them would block all requests.
        gc.collect()
        gc.freeze()
        on_listening(url)
        await stop.wait()
        await gateway.drain(0 if is_alone() else table.lame_duck)
    finally:
        await gateway.close()


class Gateway:
    """All parts of a gateway, put together; ConfigError if the tokenizer, an identity or the salt
    is missing.

    Args:
        sources: List members that come and go.
        profiles: As its plan has the clusters.
        poll_s: Time between two polls of an engine.
        timing, events, times: Times of connections to pools, subscriptions, and all else.
    """

    front: Front | None = None
    """Set before the start; None takes connections in this process."""
    is_leaving = False
    """True from the begin of its end on: what it loses by then is no loss."""

    def __init__(
        self,
        deployment: Deployment,
        endpoints: Endpoints,
        sources: Sequence[Source] = (),
        profiles: Profiles = NO_PLAN,
        *,
        poll_s: float = 1.0,
        timing: PoolTiming | None = None,
        events: EventTiming | None = None,
        times: Times = TIMES,
    ) -> None:
        # Its tables of engines and pools follow the members.
        deployment = deployment.model_copy(deep=True)
        name = deployment.gateway.name
        self.identity = identity = identity_in(deployment.security.identities, name)
        self._tls = engine_tls, pool_tls = identity.host_context(), identity.client_context()
        self.profiles, limits = profiles, deployment.routing
        self.facts, self.times = FactStream(), times
        facts = self.facts
        self.annexes: list[Annex] = []
        self.tenants = Tenants(deployment)
        lifetime_ns = limits.prefill_timeout + limits.transfer_timeout
        self._signer = TicketSigner(identity)
        self.metrics = GatewayMetrics()
        self.metrics.follow(facts)
        tickets = TicketOffice(
            self._signer,
            self.tenants.by_name,
            lifetime_ns,
            lambda *ends: self.driver.dispatcher.links.between(*ends).is_in_site,
            facts=facts,
        )
        self._table, self._sites = deployment.gateway, deployment.clusters.values()
        self._tracing = Tracing(deployment.tracing, name)
        self._prompts = PromptMaker(deployment.model.path, is_shared=len(self.tenants.by_name) > 1)
        self.index = PrefixIndex()
        self.records = Records(names_bytes_max=deployment.gateway.request_names)
        self.driver = Driver(deployment, profiles, self.index)
        self.transfers = Transfers(facts)
        self.journal = Journal(facts)
        self.guards = make_guards(deployment, self.driver, self.journal)
        self.engines = Engines(deployment, endpoints, engine_tls, self.driver, self.guards, poll_s)
        self.pools = Pools(
            endpoints,
            Subscribe(gateway=name, shares=self.tenants.shares, ages=self.tenants.ages),
            pool_tls,
            self.index,
            self.transfers,
            self.driver,
            timing or PoolTiming(),
        )
        self.layouts = LayoutCheck(deployment, self.pools)
        self.pools.on_change = self._pool_changed
        self.engine_events = EngineEvents(
            deployment,
            self.index,
            self.pools.layout,
            self.metrics.events,
            events,
        )
        self.live = live = LiveParts(
            deployment,
            self.driver,
            self.engines,
            self.pools,
            self.layouts,
            self.journal,
            self._follow_members(deployment, endpoints, sources),
            self.records,
        )
        holding = holding_for(
            deployment, self.tenants, self.engines, self.driver, profiles.engine_slots
        )
        self.metrics.tenants.watch(self.tenants, holding.num_held, self.pools)
        self.access = Access(deployment, self.tenants, facts)
        places = ConcurrencySlots(deployment.gateway.requests_max, fairness(deployment))
        self.request_admission = RequestAdmission(places)
        self.fetcher = fetcher = Fetcher(tickets, self.pools.send)
        self.loops = Loops(
            deployment, self.driver, fetcher, self.transfers, profiles, self.journal, facts
        )
        self.driver.dispatcher.count_prefills(lambda *booked: facts.report(PrefillBooked(*booked)))
        self.control_ticker = ControlTicker(self.driver, self.guards, self.journal, self.loops.all)
        self.metrics.control.watch_loops(lambda: self.control_ticker.frozen)
        control = Control(live, self.control_ticker)
        planner = Planner(live, self._prompts, self.loops.copier)
        self.console_reader = ConsoleReader(live, self.metrics, control)
        self.console = Console(
            self.console_reader,
            deployment.gateway.consoles_max,
            times.console_interval_s,
            self.access.may_go_on,
        )
        self.parts = self._services(holding, planner, tickets, fetcher, times)
        self.charging = Charging(self.engines.probes)
        self.pages: list[Page] = [
            self.completions(self.parts),
            TokenApi(live, self._prompts, self.request_admission),
            Views(live, self.metrics, self.request_admission),
            KvLookup(
                live, planner, self.tenants, self.engine_events.names, self._prompts.vocab_size
            ),
            self.console,
            ControlApi(live, control),
        ]
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._client_tls = ClientTls.of(deployment.gateway.tls)

    def completions(self, parts: RunParts) -> CompletionService:
        """Return the service of requests that these parts execute."""
        return CompletionService(
            self.live,
            parts,
            self._prompts,
            self.request_admission,
            self._tracing,
            self.charging,
            self.times.error_s,
        )

    def _services(
        self,
        holding: Holding,
        planner: Planner,
        tickets: TicketOffice,
        fetcher: Fetcher,
        times: Times,
    ) -> RunParts:
        limits, model = self.live.deployment.routing, self.live.deployment.model.name
        self.fleet = SharedState(
            self.driver,
            self.guards,
            RequestLimits(limits.prefill_timeout, limits.transfer_timeout, limits.ttft_max),
        )
        prefill_leg = PrefillLeg(self.engines, model, limits, tickets, self.driver.checkpoints)
        return RunParts(
            holding=holding,
            planner=planner,
            fleet=self.fleet,
            engines=self.engines,
            prefill_leg=prefill_leg,
            decode_leg=DecodeLeg(self.engines, limits.transfer_timeout // NS_PER_MS),
            ending=StreamHandover(self._prompts, model),
            movers=Movers(self.pools, self.transfers, fetcher),
            rehearsal=Rehearsal(
                self.engines, self.metrics.rehearsed, times.rehearsal_s, times.rehearsal_pause_s
            ),
            suspects=PromptQuarantine(self.metrics.suspect, times.suspect_survived_ns),
            facts=self.facts,
            metrics=self.metrics,
            stream_head_s=times.stream_head_s,
            stream_comment_s=times.stream_comment_s,
        )

    def _follow_members(
        self, deployment: Deployment, endpoints: Endpoints, sources: Sequence[Source]
    ) -> MembershipFollower:
        connections = GatewayMembers(
            deployment,
            self.driver,
            self.engines,
            self.engine_events,
            self.pools,
            self.layouts,
            self.metrics,
            self.journal,
        )
        self.members = MembershipFollower(Membership(site_of(deployment)), connections, sources)
        connections.follow(self.members)
        model, renderer = deployment.model.name, self._prompts.renderer
        rendering = EngineRendering(self.engines, model, renderer, self._prompts.ids_of)
        self.rendering, self._prompts.chat_ids = rendering, rendering.ids
        followed = self.engines.probes.on_change

        def changed(engine: Engine, error: Exception | None) -> None:
            followed(engine, error)
            rendering.engine_changed(engine)
            self.facts.report(PartSeen(engine.name))

        self.engines.probes.on_change = changed
        entries = entries_of(deployment, endpoints.engines, endpoints.pools)
        self.members.machine.begin("file", entries, time.monotonic_ns())
        self.metrics.on_read = self._watch
        self._watch()
        return self.members

    def _pool_changed(self, pool: str) -> None:
        self.layouts.note_changes(pool)
        self.facts.report(PartSeen(pool))

    def _watch(self) -> None:
        """Have the metrics read what the parts know, and those that have joined."""
        self.metrics.members.show(self.members)
        self.metrics.market.show(self.driver.dispatcher.market)
        if not self.metrics.parts_changed:
            return
        self.metrics.parts_changed = False
        self.metrics.events.watch(self.index, self.engine_events.names())
        self.metrics.watch(
            self.engines, self.pools, self.index, self.driver, self.layouts, self.guards
        )

    async def start(self) -> str:
        """Connect to everything and take requests; ConfigError if the address cannot be listened
        on.

        Returns:
            The base URL.
        """
        self.engines.start()
        self.pools.start()
        self.engine_events.start()
        self.members.start()
        self._tasks.append(asyncio.create_task(self.control_ticker.run()))
        self._tasks.append(asyncio.create_task(LeaseGiver.of(self._sites, self.pools).run()))
        self.console.start()
        for annex in self.annexes:
            annex.start()
        # A client that leaves cancels its handler, and with it both legs and the transfer.
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        if self._runner.server is None:
            raise RuntimeError("the server was not set up")
        tls = None if self._client_tls is None or self.front else self._client_tls.context
        self.connections = ClientConnections(
            self._runner.server, connections_max(self._table.requests_max), tls
        )
        self.metrics.watch_connections(self.connections)
        await self.engines.probes.all_probed()
        address = split_address(self._table.listen)
        try:
            is_here = self.front is None
            self._listener = await _listen(self.connections, *address, is_here=is_here)
        except (OSError, OverflowError) as error:
            message = f"gateway.listen {self._table.listen!r} cannot be used: {error}"
            raise ConfigError(message) from None
        port = self._listener.sockets[0].getsockname()[1]
        if self.front is not None:
            await self.front.serve(
                self.connections, [each.fileno() for each in self._listener.sockets]
            )
        elif self._client_tls is not None:
            self._tasks.append(asyncio.create_task(self._client_tls.watch()))
        return f"{self._table.scheme}://{join_address((address[0], port))}"

    def renew_identity(self) -> None:
        """Show, and trust, what the files of the identity hold at this moment.

        Raises:
            ConfigError: They cannot be used; nothing is changed.
        """
        self.identity.refresh(*self._tls)
        self._signer.renew()
        if self._client_tls is not None:
            self._client_tls.renew()
        if self.front is not None:
            self.front.renew()

    async def drain(self, lame_duck_ns: int = 0) -> None:
        """Answer `/health` with 503, later new requests as well, and wait for those under way.

        Args:
            lame_duck_ns: Time in which new requests are still served.
        """
        self.is_leaving = True
        await self.request_admission.leave(lame_duck_ns / NS_PER_S)
        await self.request_admission.close(self._table.drain_timeout / NS_PER_S)

    async def close(self) -> None:
        """Stop taking requests, let those in flight end, and disconnect."""
        self.is_leaving = True
        if self._listener is not None:
            self._listener.close()
        if self.front is not None:
            await self.front.stop(SHUTDOWN_S)
        if self._runner is not None:
            await self.connections.stop()
            await self._runner.cleanup()
        await self.console.close()
        await cancel_all(self._tasks)
        await self.members.close()
        for annex in self.annexes:
            await annex.stop()
        await self.engine_events.close()
        await self.pools.close()
        await self.engines.close()
        await self.rendering.close()
        self._prompts.close()
        await asyncio.to_thread(self._tracing.close)
        for annex in self.annexes:
            await annex.close()

    def _app(self) -> web.Application:
        origins = Origins(self._table.allowed_origins, is_for_clients)
        front = () if self.front is None else (self.front.behind,)
        app = web.Application(
            middlewares=[*front, openai_errors, origins.check, self.access.check],
            client_max_size=self._table.body_bytes_max,
        )
        app[BODY_TIMEOUT_S] = self._table.body_timeout / NS_PER_S
        app.on_response_prepare.append(self.request_admission.add_headers)
        if self._table.allowed_origins:
            app.on_response_prepare.append(origins.add_headers)
        for page in self.pages:
            page.add_to(app.router)
        return app


async def _listen(
    connections: ClientConnections, host: str, port: int, *, is_here: bool
) -> asyncio.Server:
    """Listen; every address of IPv6 is every one of IPv4 as well, as for vLLM's server; OSError if
    the address cannot be listened on.

    Args:
        is_here: True if this process accepts the connections.
    """
    loop = asyncio.get_running_loop()
    if host != "::" or not socket.has_dualstack_ipv6():
        return await loop.create_server(connections, host, port, start_serving=is_here)
    family = socket.AF_INET6
    listener = socket.create_server(
        (host, port), family=family, dualstack_ipv6=True, backlog=BACKLOG
    )
    return await loop.create_server(connections, sock=listener, start_serving=is_here)
