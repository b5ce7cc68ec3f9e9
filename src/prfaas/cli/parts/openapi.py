"""The OpenAPI document of the gateway, served at `/openapi.json` and kept in the documentation:
python -m prfaas.cli.parts.openapi > docs/openapi.json

Bodies are written from the types that the gateway reads. A test holds the paths to the routes that
a gateway serves. The console's own routes are left out: they change with the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import click
import msgspec
from aiohttp import web

from prfaas import __version__
from prfaas.errors import ERROR_TYPES
from prfaas.gateway.api.auth import OPEN_PATHS, OPENAPI_PATH, is_for_clients
from prfaas.gateway.api.operator_api import ClusterBody, EngineBody, FreezeBody, ThresholdBody
from prfaas.gateway.http.json_codec import JsonObject, to_json
from prfaas.gateway.openai.fields import (
    CONTROL_FIELDS,
    DROPPED_FIELDS,
    OURS_FIELDS,
    ChatFields,
    CompletionFields,
)
from prfaas.gateway.routing.change_log import ENTRIES_MAX
from prfaas.gateway.telemetry.prices import PriceBody
from prfaas.gateway.telemetry.request_records import RECORDS_MAX
from prfaas.incidents.alarm_kinds import Kind
from prfaas.incidents.pages import LIMIT_MAX, SECONDS_MAX
from prfaas.prefixes.steering import PrefixBody
from prfaas.purge.loop import PurgeBody

PATH = OPENAPI_PATH
_SCHEMAS = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)}")


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: a prompt, or the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class LookupBody(msgspec.Struct):
    """`POST /kv/lookup`: a prompt as of a completion, or the messages of a chat."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None


BODIES: dict[str, type[msgspec.Struct]] = {
    "ChatCompletionRequest": ChatFields,
    "CompletionRequest": CompletionFields,
    "TokenizeRequest": TokenizeBody,
    "DetokenizeRequest": DetokenizeBody,
    "LookupRequest": LookupBody,
    "LoopsRequest": FreezeBody,
    "ThresholdRequest": ThresholdBody,
    "EngineRequest": EngineBody,
    "ClusterRequest": ClusterBody,
    "PriceRequest": PriceBody,
    "PrefixRequest": PrefixBody,
    "PurgeRequest": PurgeBody,
}
_REQUIRED = {"ChatCompletionRequest": "messages", "CompletionRequest": "prompt"}
"""Fields that have to be given, and are checked after the types of the others."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path: POST with a body, GET without one."""

    path: str
    summary: str
    query: tuple[tuple[str, JsonObject], ...] = ()
    """Parameters of the query, with their schemas."""
    body: str = ""
    """Name in `BODIES`; empty without a body."""
    content: str = "application/json"
    """Type of the answer; a stream of a client is an event stream besides."""

    @property
    def method(self) -> str:
        """In lower case."""
        return "post" if self.body else "get"


def _number(low: int, high: int) -> JsonObject:
    return {"type": "integer", "minimum": low, "maximum": high}


_TEXT: JsonObject = {"type": "string"}
OPERATIONS = (
    Operation(
        "/v1/chat/completions", "Answer a chat, whole or streamed", body="ChatCompletionRequest"
    ),
    Operation("/v1/completions", "Continue a prompt, whole or streamed", body="CompletionRequest"),
    Operation("/v1/models", "The model and its adapters"),
    Operation("/v1/models/{model}", "The model or one adapter"),
    Operation("/tokenize", "Token ids as the engines get them", body="TokenizeRequest"),
    Operation("/detokenize", "Text of token ids", body="DetokenizeRequest"),
    Operation(
        "/health",
        "200 while requests are taken; with full, only if all parts are ready",
        (("full", {"type": "string", "enum": ["1", "parts"]}),),
    ),
    Operation("/ping", "As /health"),
    Operation("/version", "The version of the gateway"),
    Operation(PATH, "This document"),
    Operation("/metrics", "Metrics of Prometheus", content="text/plain"),
    Operation(
        "/control/requests",
        "Recent requests, newest first, with the reason for their path",
        (("limit", _number(1, RECORDS_MAX)),),
    ),
    Operation("/control/requests/{request_id}", "One recent request"),
    Operation(
        "/control/requests/{request_id}/explanation",
        "All inputs of the decision on its path",
    ),
    Operation("/control/requests/{request_id}/story", "Its events, with their times"),
    Operation("/control/links", "Measurements of links"),
    Operation(
        "/control/incidents",
        "Incidents, the newest first",
        (
            ("since", _number(0, SECONDS_MAX)),
            ("until", _number(0, SECONDS_MAX)),
            ("kind", {"type": "string", "enum": [*Kind]}),
            ("open", _number(0, 1)),
            ("limit", _number(1, LIMIT_MAX)),
        ),
    ),
    Operation(
        "/control/incidents/{incident_id}",
        "One incident, with its time line and the requests that it touched",
    ),
    Operation("/control/status", "State of clusters, engines, pools, links and loops"),
    Operation(
        "/control/decisions",
        "Changes by operators and control loops",
        (("limit", _number(1, ENTRIES_MAX)), ("after", {"type": "integer", "minimum": 0})),
    ),
    Operation("/control/loops", "Freeze or resume the control loops", body="LoopsRequest"),
    Operation(
        "/control/threshold",
        "Set the threshold of a link or of all; null gives it back to the loops",
        body="ThresholdRequest",
    ),
    Operation("/control/engines/{name}", "Drain an engine, or resume it", body="EngineRequest"),
    Operation("/control/clusters/{name}", "Turn a PrfaaS cluster on or off", body="ClusterRequest"),
    Operation("/control/prices/{name}", "Change a price of a cluster", body="PriceRequest"),
    Operation(
        "/control/prefixes", "Pin the blocks of a prompt, or copy them", body="PrefixRequest"
    ),
    Operation("/control/purge", "Drop blocks of a pool, a tenant or a prompt", body="PurgeRequest"),
    Operation(
        "/kv/lookup",
        "Hits of a prompt in every pool and engine",
        (("prompt", _TEXT), ("tenant", _TEXT)),
    ),
    Operation(
        "/kv/lookup",
        "Hits of a prompt or chat in every pool and engine",
        (("tenant", _TEXT),),
        "LookupRequest",
    ),
)


class OpenApi:
    """Serves the document."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_get(PATH, self._get)

    async def _get(self, _: web.Request) -> web.Response:
        return web.Response(body=_encoded(), content_type="application/json")


@cache
def _encoded() -> bytes:
    return to_json(document())


def document() -> JsonObject:
    """The document, OpenAPI 3.1."""
    paths: dict[str, JsonObject] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "prfaas gateway",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "OpenAI's API as vLLM serves it, and the control API of operators.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "client": {"type": "http", "scheme": "bearer", "description": "A tenant's key"},
                "operator": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An operator's key; none is needed on loopback without keys",
                },
            },
        },
    }


def _operation(operation: Operation) -> JsonObject:
    is_client = is_for_clients(operation.path)
    key = "client" if is_client else "operator"
    found: JsonObject = {
        "operationId": _name(operation),
        "summary": operation.summary,
        "tags": ["public" if operation.path in OPEN_PATHS else key],
        "security": [{}] if operation.path in OPEN_PATHS else [{key: []}, {}],
        "parameters": [*_parameters(operation)],
        "responses": {
            "200": {"description": "Done", "content": _content(operation)},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": _reference("Error")}},
            },
        },
    }
    if operation.body:
        schema = {"schema": _reference(operation.body)}
        found["requestBody"] = {"required": True, "content": {"application/json": schema}}
    return found


def _name(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.path)
    return operation.method + "".join(each.title().replace("_", "") for each in words)


def _content(operation: Operation) -> JsonObject:
    kind: JsonObject = {"type": "object" if operation.content.endswith("json") else "string"}
    found: JsonObject = {operation.content: {"schema": kind}}
    if operation.path.endswith("/completions"):
        found["text/event-stream"] = {"schema": {"type": "string"}}
    return found


def _parameters(operation: Operation) -> Iterator[JsonObject]:
    for name in _PARAMETER.findall(operation.path):
        yield {"name": name, "in": "path", "required": True, "schema": _TEXT}
    for name, schema in operation.query:
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _reference(name: str) -> JsonObject:
    return {"$ref": _SCHEMAS.format(name=name)}


def _schemas() -> JsonObject:
    of_types, named = msgspec.json.schema_components(list(BODIES.values()), ref_template=_SCHEMAS)
    schemas: JsonObject = {}
    for name, reference in zip(BODIES, of_types, strict=True):
        schema = named.pop(reference["$ref"].rpartition("/")[2])
        schema["title"] = name
        schemas[name] = schema
    for name, field in _REQUIRED.items():
        schemas[name]["required"] = [field]
        schemas[name]["properties"] |= {
            each: {"description": _effect(each)} for each in sorted(_other_fields())
        }
    return schemas | named | {"Error": _error()}


def _other_fields() -> frozenset[str]:
    return DROPPED_FIELDS | CONTROL_FIELDS | OURS_FIELDS


def _effect(name: str) -> str:
    if name in OURS_FIELDS:
        return "Read by the gateway, sent to no engine."
    if name in CONTROL_FIELDS:
        return "Removed: it would control engines and caches."
    return "Accepted and ignored."


def _error() -> JsonObject:
    kinds = sorted({*ERROR_TYPES.values()})
    error: JsonObject = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": _TEXT,
            "type": {"type": "string", "examples": kinds},
            "param": {"type": ["string", "null"]},
            "code": {"type": "integer", "description": "The HTTP status"},
        },
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


if __name__ == "__main__":
    click.echo(json.dumps(document(), indent=1))
