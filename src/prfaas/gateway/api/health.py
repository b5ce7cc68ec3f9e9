"""Endpoints for models, health, metrics and recent requests."""

from __future__ import annotations

import time
from dataclasses import dataclass

from aiohttp import web

from prfaas import __version__
from prfaas.config.clusters import ClusterRole
from prfaas.errors import RequestError
from prfaas.gateway.api.auth import OPERATOR, RequestAdmission
from prfaas.gateway.http.errors import UnavailableError, error_response
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.http.request_body import query_number
from prfaas.gateway.http.responses import json_response
from prfaas.gateway.openai.requests import check_model
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_records import RECORDS_MAX, WHOLE_MAX, as_json
from prfaas.series import CONTENT_TYPE

_LIMIT_DEFAULT = 100
PARTS = "parts"


@dataclass(frozen=True, slots=True)
class Views:
    """Read-only pages."""

    live: LiveParts
    metrics: GatewayMetrics
    request_admission: RequestAdmission

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes; each answers HEAD as well."""
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{model:.+}", self._model)
        router.add_get("/version", self._version)
        router.add_get("/health", self._health)
        router.add_route("*", "/ping", self._health)
        router.add_get("/metrics", self._metrics)
        router.add_get("/control/requests", self._requests)
        router.add_get("/control/requests/{request_id}", self._request)
        router.add_get("/control/links", self._links)

    @property
    def _name(self) -> str:
        """Name of the model that is served."""
        return self.live.deployment.model.name

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": __version__})

    async def _models(self, _: web.Request) -> web.Response:
        adapters = sorted(self.live.engines.adapters())
        cards = [self._card(), *(self._adapter_card(name) for name in adapters)]
        return json_response({"object": "list", "data": cards})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if check_model({"model": name}, self._name, self.live.engines.adapters()):
            return json_response(self._adapter_card(name))
        return json_response(self._card())

    def _adapter_card(self, name: str) -> JsonObject:
        """An adapter; where its files lie is no client's business."""
        return self._card() | {"id": name, "root": name, "parent": self._name}

    def _card(self) -> JsonObject:
        ready = self.live.engines.choose(ClusterRole.PD)
        return {
            "id": self._name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "prfaas",
            "root": self._name,
            "parent": None,
            "max_model_len": ready.max_model_len if ready else None,
        }

    async def _health(self, request: web.Request) -> web.Response:
        """Health: 200 if it takes requests; with `?full=1`, if all parts for offloading are ready.

        With `?full=parts`: the same, whatever their KV layouts are. Parts are named to operators.
        """
        if self.request_admission.is_leaving:
            return error_response(UnavailableError("this gateway is about to stop"), {})
        full = request.query.get("full")
        missing = [] if full is None else self._missing()
        missing += self._mismatches() if full is not None and full != PARTS else []
        if not missing and self.live.engines.choose(ClusterRole.PD) is None:
            return error_response(self.live.engines.nobody(), {})
        if missing:
            names = ", ".join(missing) if request.get(OPERATOR) else _unnamed(len(missing))
            return error_response(UnavailableError(f"not there: {names}"), {})
        return json_response({"status": "ready"})

    def _missing(self) -> list[str]:
        engines = self.live.engines.by_name.values()
        missing = [
            f"engine {engine.name} ({engine.why_down})" for engine in engines if not engine.is_ready
        ]
        missing += [
            f"pool {pool}" for pool in self.live.pools.names() if not self.live.pools.is_live(pool)
        ]
        missing += [
            f"KV layout of engine {engine.name}"
            for engine in engines
            if self.live.pools.layout(engine.pool, engine.name) is None
        ]
        links = self.live.driver.links()
        down = (link for link in links if not self.live.pools.link_up(*link))
        return missing + [f"link {source} to {destination}" for source, destination in down]

    def _mismatches(self) -> list[str]:
        return [
            f"KV blocks of engine {each.engine} that {each.reference} can use ({each.words})"
            for each in self.live.layouts.mismatches()
        ]

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _requests(self, request: web.Request) -> web.Response:
        limit = query_number(request, "limit", _LIMIT_DEFAULT, 1, WHOLE_MAX)
        records = [as_json(record) for record in self.live.records.latest(limit)]
        return json_response({"requests": records})

    async def _links(self, _: web.Request) -> web.Response:
        links = [
            {
                "source": source,
                "destination": destination,
                "is_up": self.live.pools.link_up(source, destination),
                **{name: getattr(measured, name) for name in measured.__struct_fields__},
            }
            for (source, destination), measured in self.live.pools.telemetry().items()
        ]
        return json_response({"links": links})

    async def _request(self, request: web.Request) -> web.Response:
        record = self.live.records.find(request.match_info["request_id"])
        if record is None:
            message = f"no such request among the last {RECORDS_MAX}"
            raise RequestError(message, status=404)
        return json_response(as_json(record))


def _unnamed(count: int) -> str:
    return f"{count} of what a whole deployment has; an operator's key shows the names"
