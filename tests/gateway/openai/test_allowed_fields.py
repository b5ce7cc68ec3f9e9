"""Fields reach an engine by an allow-list, which the operator may extend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import RequestError
from prfaas.gateway.openai.fields import (
    DROPPED_FIELDS,
    KNOWN_FIELDS,
    REFUSED,
    Trait,
    allowed,
    fields_with,
)
from prfaas.gateway.openai.requests import Api, parse_request
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.gateway.conftest import World, running

STEERING = {
    "priority": -100,
    "data_parallel_rank": 1,
    "logits_processors": ["os.system"],
    "session_id": "x",
    "mm_payload": {},
    "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0,
    "something_new": 1,
}
KEY = new_key()


@pytest.mark.parametrize("name", STEERING)
@pytest.mark.parametrize("api", Api)
def test_what_steers_an_engine_is_refused_by_name(name: str, api: Api) -> None:
    prompt: dict[str, Any] = {"prompt": "x"}
    if api is Api.CHAT:
        prompt = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(RequestError, match=name) as caught:
        parse_request(prompt | {name: STEERING[name]}, api, "tiny", 300)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_openais_fields_that_no_engine_reads_are_left_out() -> None:
    assert allowed({"prompt": "x"} | dict.fromkeys(DROPPED_FIELDS, "y")) == {"prompt": "x"}


def test_an_unknown_field_that_is_null_is_no_field() -> None:
    assert allowed({"prompt": "x", "priority": None}) == {"prompt": "x"}


def test_what_steers_caches_never_passes() -> None:
    more = ["cache_salt", "kv_transfer_params", "bootstrap_host"]
    assert allowed({"prompt": "x"} | dict.fromkeys(more, "y"), more) == {"prompt": "x"}


def test_every_field_of_openais_api_is_known() -> None:
    """Its own Python client sends nothing that is refused."""
    from openai.types.chat import completion_create_params as chat
    from openai.types.completion_create_params import CompletionCreateParamsBase

    known = KNOWN_FIELDS | DROPPED_FIELDS
    assert not set(chat.CompletionCreateParamsBase.__annotations__) - known
    assert not set(CompletionCreateParamsBase.__annotations__) - known


@pytest.mark.parametrize("whose", ["everybody", "tenant"])
async def test_the_operator_may_allow_more(
    checkpoint: Path, identities: Path, tmp_path: Path, whose: str
) -> None:
    more = {"request_fields": ["priority"]}
    red, tables = {"keys": [key_hash(KEY)]}, {}
    if whose == "tenant":
        red |= more
    else:
        tables = {"gateway": more}
    state = tmp_path / "state"
    async with running(checkpoint, identities, state, tenants={"red": red}, **tables) as world:
        assert await _status(world, priority=1) == 200
        assert world.decode.calls[-1].body["priority"] == 1
        assert await _status(world, data_parallel_rank=1) == 400


async def _status(world: World, **fields: Any) -> int:
    body = {"prompt": "hi", "max_tokens": 3, **fields}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with world.http.post(
        f"{world.url}/v1/completions", json=body, headers=headers
    ) as response:
        return response.status


def test_a_refused_field_that_is_null_is_left_out() -> None:
    assert allowed({"prompt": "x"} | dict.fromkeys(REFUSED)) == {"prompt": "x"}


def test_every_trait_is_of_some_field_and_each_field_is_known() -> None:
    for trait in Trait:
        assert fields_with(trait)
        assert fields_with(trait) <= KNOWN_FIELDS
