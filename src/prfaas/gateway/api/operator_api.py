"""The control API: `/control/...`, for operators and `prfaas ctl`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web

from prfaas.core.control.changes import ChangeEntry
from prfaas.errors import RequestError
from prfaas.gateway.http.request_body import query_number, read_small
from prfaas.gateway.http.responses import json_response
from prfaas.gateway.loops.operator_actions import THRESHOLD_MAX, Control
from prfaas.gateway.routing.change_log import ENTRIES_MAX
from prfaas.gateway.telemetry.explain import explain, story
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.telemetry.prices import PriceBody
from prfaas.gateway.telemetry.request_records import RECORDS_MAX, RequestRecord

BODY_BYTES_MAX = 4096
_LIMIT_DEFAULT = 100
_NUMBER_MAX = 2**53
T = TypeVar("T")
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class FreezeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /control/loops`."""

    frozen: bool


class ThresholdBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /control/threshold`: of one link, or of all; null gives it back to the loops."""

    tokens: Annotated[int, msgspec.Meta(ge=1, le=THRESHOLD_MAX)] | None
    source: Name | None = None
    destination: Name | None = None


class EngineBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /control/engines/NAME`."""

    drained: bool


class ClusterBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /control/clusters/NAME`."""

    on: bool


@dataclass(frozen=True, slots=True)
class ControlApi:
    """Pages that show and change what the control plane does."""

    live: LiveParts
    control: Control

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/control/status", self._status)
        router.add_get("/control/decisions", self._decisions)
        router.add_get("/control/requests/{request_id}/explanation", self._explanation)
        router.add_get("/control/requests/{request_id}/story", self._story)
        router.add_post("/control/loops", self._loops)
        router.add_post("/control/threshold", self._threshold)
        router.add_post("/control/engines/{name}", self._engine)
        router.add_post("/control/clusters/{name}", self._cluster)
        router.add_post("/control/prices/{name}", self._price)

    async def _status(self, _: web.Request) -> web.Response:
        return json_response(self.control.status())

    async def _decisions(self, request: web.Request) -> web.Response:
        limit = query_number(request, "limit", _LIMIT_DEFAULT, 1, ENTRIES_MAX)
        after = query_number(request, "after", 0, 0, _NUMBER_MAX)
        return _entries(self.live.journal.latest(limit, after))

    async def _explanation(self, request: web.Request) -> web.Response:
        return json_response(explain(self._recent(request)))

    async def _story(self, request: web.Request) -> web.Response:
        return json_response(story(self._recent(request)))

    def _recent(self, request: web.Request) -> RequestRecord:
        record = self.live.records.find(request.match_info["request_id"])
        if record is None:
            message = f"no such request among the last {RECORDS_MAX}, or several whose id begins so"
            raise RequestError(message, status=404)
        return record

    async def _loops(self, request: web.Request) -> web.Response:
        body = await json_body(request, FreezeBody)
        return _entries([self.control.freeze(frozen=body.frozen)])

    async def _threshold(self, request: web.Request) -> web.Response:
        body = await json_body(request, ThresholdBody)
        if (body.source is None) != (body.destination is None):
            raise RequestError("give source and destination of the link, or neither for all links")
        link = (body.source, body.destination) if body.source and body.destination else None
        return _entries(self.control.set_threshold(body.tokens, link))

    async def _engine(self, request: web.Request) -> web.Response:
        body = await json_body(request, EngineBody)
        name = request.match_info["name"]
        return _entries([self.control.drain(name, drained=body.drained)])

    async def _cluster(self, request: web.Request) -> web.Response:
        body = await json_body(request, ClusterBody)
        return _entries([self.control.turn(request.match_info["name"], on=body.on)])

    async def _price(self, request: web.Request) -> web.Response:
        body = await json_body(request, PriceBody)
        return _entries([self.control.price(request.match_info["name"], body)])


def _entries(entries: Iterable[ChangeEntry]) -> web.Response:
    return json_response({"decisions": [entry.as_json() for entry in entries]})


async def json_body(request: web.Request, kind: type[T]) -> T:
    """The checked body of a request; RequestError if it is no JSON of that kind."""
    # A page of another site can post forms here from an operator's browser, and no JSON.
    if request.content_type != "application/json":
        raise RequestError(
            f"Content-Type has to be application/json, got {request.content_type[:80]!r}",
            status=415,
        )
    data = await read_small(request, BODY_BYTES_MAX)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        fields = ", ".join(kind.__annotations__)
        raise RequestError(f"the body is wrong: {error}; its fields are: {fields}") from None
