"""The pages of incidents: `/control/incidents`, for operators who may view."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from prfaas.errors import RequestError
from prfaas.gateway.http.request_body import query_number
from prfaas.gateway.http.responses import json_response
from prfaas.incidents.alarm_kinds import Kind
from prfaas.incidents.log import IncidentLog
from prfaas.incidents.store import DAYS, Query

LIMIT_MAX = 1000
_LIMIT_DEFAULT = 100
SECONDS_MAX = 10**11
_ID_CHARS_MIN = 4


@dataclass(frozen=True, slots=True)
class IncidentPages:
    """The log as JSON."""

    log: IncidentLog

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/control/incidents", self._list)
        router.add_get("/control/incidents/{incident_id}", self._one)

    async def _list(self, request: web.Request) -> web.Response:
        """Those of a span and a kind, the newest first; `open=1`: those that have not ended."""
        kind = request.query.get("kind", "")
        if kind and kind not in set(Kind):
            kinds = ", ".join(Kind)
            raise RequestError(f"kind is one of {kinds}, got {kind[:20]!r}", param="kind")
        query = Query(
            query_number(request, "since", 0, 0, SECONDS_MAX),
            query_number(request, "until", SECONDS_MAX, 0, SECONDS_MAX),
            kind,
            bool(query_number(request, "open", 0, 0, 1)),
            query_number(request, "limit", _LIMIT_DEFAULT, 1, LIMIT_MAX),
        )
        found = await self.log.find(query)
        response = json_response(
            {
                "incidents": [each.brief() for each in found],
                "days_kept": DAYS,
                "why_unwritten": self.log.why_unwritten,
            }
        )
        response.enable_compression()
        return response

    async def _one(self, request: web.Request) -> web.Response:
        incident_id = request.match_info["incident_id"]
        is_id = _ID_CHARS_MIN <= len(incident_id) <= 8 and incident_id.isalnum()
        found = await self.log.get(incident_id) if is_id else None
        if found is None:
            raise RequestError(
                f"no incident {incident_id[:20]!r} in the last {DAYS} days, or several whose id "
                "begins so; `prfaas ctl incidents` lists them",
                status=404,
            )
        return json_response(found.full())
