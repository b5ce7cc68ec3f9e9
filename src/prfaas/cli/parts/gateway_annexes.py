"""A gateway with its annexes: audit log, bill, verification, purges, pins, prices, planner.

They subscribe to the facts of the gateway, and live as long as it does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from prfaas.audit.gateway_audit import GatewayAudit
from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.settings import AuditSettings
from prfaas.billing.gateway_meter import GatewayMeter
from prfaas.billing.metrics import UsageMetrics
from prfaas.cli.parts.gateway_plan import load_profiles
from prfaas.cli.parts.openapi import OpenApi
from prfaas.config.addresses import Endpoints
from prfaas.config.deployment import Deployment
from prfaas.console.request_list import RequestPages
from prfaas.console.sign_in import SignIn
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.errors import RequestError
from prfaas.gateway.app import Gateway, run_gateway
from prfaas.gateway.http.json_codec import JsonObject, as_object, from_json
from prfaas.gateway.http.request_body import read_small
from prfaas.gateway.http.responses import json_response
from prfaas.incidents.book import IncidentBook
from prfaas.incidents.log import IncidentLog, IncidentMetrics
from prfaas.incidents.pages import IncidentPages
from prfaas.incidents.store import IncidentStore
from prfaas.incidents.watcher import Watcher
from prfaas.integrity.barring import Barring
from prfaas.integrity.metrics import VerificationMetrics
from prfaas.integrity.verifier import VerifiedSite, Verifier
from prfaas.market.price_file import MarketClock, deployment_market
from prfaas.membership.port import Source
from prfaas.planner.report.what_if import WhatIf
from prfaas.prefixes.steering import Steering
from prfaas.purge.loop import PurgeLoop
from prfaas.tasks import cancel_all
from prfaas.workers.front import StartedWorker, WorkerMetrics, Workers, begin, give_up

BODY_BYTES_MAX = 1 << 16


async def serve(
    deployment: Deployment,
    endpoints: Endpoints,
    stop: asyncio.Event,
    on_listening: Callable[[str], None] = lambda _: None,
    sources: Sequence[Source] = (),
    is_alone: Callable[[], bool] = lambda: False,
) -> None:
    """Run a gateway with its annexes until `stop` is set; see `run_gateway`.

    Raises:
        ConfigError: The port is in use, or the tokenizer, an identity or the salt is missing.
    """
    num_workers = deployment.gateway.workers
    begun = [await begin(deployment) for _ in range(num_workers if num_workers > 1 else 0)]
    try:
        gateway = make_gateway(deployment, endpoints, sources, begun)
        await run_gateway(gateway, stop, on_listening, is_alone)
    finally:
        for each in begun:
            await give_up(each)


def make_gateway(
    deployment: Deployment,
    endpoints: Endpoints,
    sources: Sequence[Source] = (),
    begun: list[StartedWorker] | None = None,
    **settings: Any,
) -> Gateway:
    """Put a gateway and its annexes together.

    Args:
        begun: Processes of workers, which read while this is done.
        settings: Times, as of `Gateway`.

    Raises:
        ConfigError: The plan, the price file, the tokenizer, an identity or the salt is missing or
            invalid, or the audit log cannot be written.
    """
    found = load_profiles(deployment)
    profiles = replace(found, market=deployment_market(deployment, found.sites))
    gateway = Gateway(deployment, endpoints, sources, profiles, **settings)
    gateway.annexes.append(annexes := GatewayAnnexes(gateway))
    if deployment.gateway.workers > 1:
        gateway.front = Workers(gateway, annexes.metrics.workers, begun or [])
    return gateway


class AnnexMetrics:
    """Metrics of the annexes of a gateway, in its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.audit = AuditMetrics(registry, "gateway")
        self.verification = VerificationMetrics(registry)
        self.usage = UsageMetrics(registry)
        self.incidents = IncidentMetrics(registry)
        self.workers = WorkerMetrics(registry)


class GatewayAnnexes:
    """Annexes of one gateway; ConfigError if the audit log cannot be written."""

    def __init__(self, gateway: Gateway) -> None:
        live, facts = gateway.live, gateway.facts
        deployment, driver = live.deployment, live.driver
        metrics, market = AnnexMetrics(gateway.metrics.registry), driver.dispatcher.market
        self.metrics = metrics
        self.audit: GatewayAudit | None = None
        settings = AuditSettings.of(deployment.audit)
        if settings is not None:
            self.audit = GatewayAudit(settings, deployment.gateway.name, metrics.audit)
            self.audit.follow(facts)
        write = self.audit.log.write if self.audit is not None else _unrecorded
        tags = {n: tenant_tag(each.cache_salt) for n, each in gateway.tenants.by_name.items()}
        self.meter = GatewayMeter(deployment.clusters, market, tags, write, metrics.usage)
        self.meter.follow(facts)
        self.purging = PurgeLoop(
            live,
            gateway.engine_events.forgotten,
            gateway.tenants,
            gateway.times.purge_retry_s,
            gateway.times.purge_repeat_s,
        )
        self._repeating: asyncio.Task[None] | None = None
        self.steering = Steering(live, gateway.fetcher, gateway.transfers, gateway.tenants)
        barring = Barring(live.engines, driver, self.purging, live.journal.note)
        site = VerifiedSite(gateway.parts.prefill_leg, live.pools)
        routing = deployment.routing
        self.verifier = Verifier(
            routing.verify_one_in, routing.verify_limits, site, barring, metrics.verification
        )
        self.verifier.follow(facts)
        self.prices = MarketClock.of(
            deployment, market, gateway.profiles.sites, live.journal.priced
        )
        if self.prices is not None:
            gateway.control_ticker.loops.append(self.prices)
        self.incidents = incident_log(gateway, metrics.incidents)
        gateway.control_ticker.loops += [self.meter, self.steering.pins]
        self._planner = WhatIf(routing.plan)
        page = deployment.tracing.page if deployment.tracing is not None else None
        gateway.pages += [
            PlannerPages(self._planner),
            self.purging,
            self.steering,
            SignIn(gateway.access, deployment.gateway.name, page),
            OpenApi(),
            RequestPages(gateway.records, gateway.console.history),
        ]

    def start(self) -> None:
        """Repeat purges that an earlier process began, and read its incidents."""
        self.incidents.flush()
        self._repeating = asyncio.create_task(self.purging.repeat())

    async def stop(self) -> None:
        """End what needs engines and pools; requests have ended."""
        self._planner.close()
        await self.verifier.close()
        if self._repeating is not None:
            await cancel_all([self._repeating])
        await self.purging.close()

    async def close(self) -> None:
        """Record what is left; all else has ended."""
        self.meter.record()
        await self.incidents.close()
        if self.audit is not None:
            await asyncio.to_thread(self.audit.close)


def incident_log(gateway: Gateway, metrics: IncidentMetrics) -> IncidentLog:
    """Return the log of incidents of a gateway, which watches it from now on."""
    deployment, began_at = gateway.live.deployment, time.time()
    name = deployment.gateway.name
    book = IncidentBook(began_at, gateway.times.incident_grace_s)
    store = IncidentStore(deployment.state, name)
    log = IncidentLog(book, store, metrics, name, began_at)
    watcher = Watcher(gateway.console_reader, log, lambda: gateway.is_leaving)
    watcher.follow(gateway.facts)
    gateway.control_ticker.loops.append(watcher)
    gateway.console_reader.alarms.append(watcher.alarms_json)
    gateway.pages.append(IncidentPages(log))
    return log


def _unrecorded(_: Mapping[str, object]) -> None:
    """Write no record: there is no audit log."""


@dataclass(frozen=True, slots=True)
class PlannerPages:
    """The planner in the console: questions."""

    what_if: WhatIf

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_post("/console/api/what-if", self._ask)

    async def _ask(self, request: web.Request) -> web.Response:
        settings = _settings(await read_small(request, BODY_BYTES_MAX))
        response = json_response(await self.what_if.answer(settings))
        response.enable_compression()
        return response


def _settings(data: bytes) -> JsonObject:
    """The question in a body; RequestError (400) if it is invalid."""
    try:
        settings = as_object(from_json(data)).get("settings")
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    if not isinstance(settings, dict):
        raise RequestError('the body has to be {"settings": {NAME: NUMBER, ...}}')
    return settings
