"""The OpenAPI document: what a gateway serves, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator

from prfaas import __version__
from prfaas.cli.parts.openapi import document
from prfaas.gateway.openai.fields import ChatFields, CompletionFields

from .conftest import World

PAGE = Path(__file__).parents[2] / "docs" / "openapi.json"
CONSOLE = "/console"


def served(world: World) -> set[tuple[str, str]]:
    """Methods and paths of a gateway with all its annexes, but for the console's own."""
    router = web.UrlDispatcher()
    for page in world.gateway.pages:
        page.add_to(router)
    return {
        ("get" if route.method == "*" else route.method.lower(), route.resource.canonical)
        for route in router.routes()
        if route.resource is not None and route.method != "HEAD"
        if not route.resource.canonical.startswith(CONSOLE)
    }


def described() -> set[tuple[str, str]]:
    """Methods and paths of the document."""
    paths: dict[str, dict[str, Any]] = document()["paths"]
    return {(method, path) for path, methods in paths.items() for method in methods}


def test_the_document_in_the_documentation_is_written_from_the_code() -> None:
    kept = json.loads(PAGE.read_text())
    assert kept == document(), "run: python -m prfaas.cli.parts.openapi > docs/openapi.json"


async def test_every_route_that_is_served_is_described(world: World) -> None:
    assert served(world) - described() == set(), "add it to OPERATIONS in cli/parts/openapi.py"
    assert described() - served(world) == set()


async def test_the_gateway_serves_the_document_without_a_key(world: World) -> None:
    async with world.http.get(f"{world.url}/openapi.json", headers={"Host": "x"}) as response:
        assert response.status == 200
        found = await response.json()
    assert found == document()
    assert found["info"]["version"] == __version__


def test_every_schema_is_one() -> None:
    for schema in document()["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("ChatCompletionRequest", ChatFields), ("CompletionRequest", CompletionFields)],
)
def test_every_field_that_reaches_an_engine_is_in_its_schema(
    name: str, fields: type[msgspec.Struct]
) -> None:
    properties = document()["components"]["schemas"][name]["properties"]
    assert {*fields.__struct_fields__} <= {*properties}
    assert {"cache_salt", "metadata", "kv_transfer_params"} <= {*properties}


async def test_errors_have_the_form_of_the_document(world: World) -> None:
    status, answer = await world.post({"model": "tiny", "prompt": 7})
    assert status == 400
    Draft202012Validator(document()["components"]["schemas"]["Error"]).validate(answer)
