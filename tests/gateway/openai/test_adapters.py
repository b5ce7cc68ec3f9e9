"""Adapters are models that can be asked for; their requests stay with one engine."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.gateway.engines.engine_probes import ADAPTERS_MAX, adapters_in
from tests.gateway.conftest import World, until
from tests.gateway.prompts import LONG, SHORT

BASE = {"id": "tiny", "object": "model", "max_model_len": 4096, "root": "/models/tiny"}


def card(name: str) -> dict[str, Any]:
    """As vLLM lists an adapter."""
    return {"id": name, "root": f"/adapters/{name}", "parent": "tiny", "max_model_len": None}


async def list_adapters(world: World, *names: str) -> None:
    world.decode.cards = [BASE, *map(card, names)]
    await until(lambda: world.gateway.engines.adapters() == frozenset(names))


async def test_a_request_for_an_adapter_is_served_by_one_engine(world: World) -> None:
    await list_adapters(world, "poet")
    status, reply = await world.post({"model": "poet", "prompt": LONG, "max_tokens": 3})
    assert status == 200, reply
    assert world.prefill.calls == []
    [call] = world.decode.calls
    assert call.body["model"] == "poet"
    assert "kv_transfer_params" not in call.body
    assert call.body["cache_salt"]
    record = await world.record()
    assert (record["path"], record["reason"]) == ("local", "not_offloadable")
    assert record["explanation"].endswith(
        "its model is an adapter, whose KV blocks stay in the engine"
    )


async def test_the_model_itself_goes_where_it_went(world: World) -> None:
    await list_adapters(world, "poet")
    for model in ("tiny", None):
        world.prefill.calls.clear()
        await world.post({"model": model, "prompt": LONG, "max_tokens": 3})
        assert [call.body["model"] for call in world.prefill.calls] == ["tiny"]


async def test_adapters_are_listed_without_their_paths(world: World) -> None:
    await list_adapters(world, "poet", "critic")
    models = (await world.openai.models.list()).data
    assert [model.id for model in models] == ["tiny", "critic", "poet"]
    found = (await world.openai.models.retrieve("poet")).model_dump()
    assert (found["root"], found["parent"]) == ("poet", "tiny")


async def test_an_adapter_that_an_engine_has_lost_is_none(world: World) -> None:
    await list_adapters(world, "poet")
    await list_adapters(world)
    status, reply = await world.post({"model": "poet", "prompt": SHORT})
    assert (status, reply["error"]["param"]) == (404, "model")
    assert world.decode.calls == []


async def test_only_what_all_ready_engines_have_can_be_asked_for(world: World) -> None:
    await list_adapters(world, "poet")
    world.spare.cards, world.spare.healthy = [BASE, card("critic")], True
    spare = world.gateway.engines.by_name["spare"]
    await until(lambda: spare.is_ready)
    await until(lambda: world.gateway.engines.adapters() == frozenset())
    world.spare.cards = [BASE, card("critic"), card("poet")]
    await until(lambda: world.gateway.engines.adapters() == {"poet"})
    world.spare.healthy = world.decode.healthy = False
    await until(lambda: not spare.is_ready)
    await until(lambda: not world.gateway.engines.by_name["decode"].is_ready)
    assert world.gateway.engines.adapters() == {"poet"}
    assert (await world.post({"model": "poet", "prompt": SHORT}))[0] == 503


async def test_text_is_tokenised_for_adapters_too(world: World) -> None:
    await list_adapters(world, "poet")
    status, reply = await world.post({"model": "poet", "prompt": SHORT}, "/tokenize")
    assert (status, reply["count"]) == (200, len(SHORT))


@pytest.mark.parametrize(
    "models",
    [
        None,
        {"data": 7},
        {"data": [7, {"id": 7, "parent": "tiny"}, {"id": "", "parent": "tiny"}]},
        {"data": [{"id": "alias", "parent": None}, {"id": "tiny", "parent": "tiny"}]},
        {"data": [{"id": "x" * 257, "parent": "tiny"}]},
    ],
)
def test_what_is_no_adapter_is_none(models: object) -> None:
    assert adapters_in(models, "tiny") == frozenset()


def test_adapters_of_an_engine_have_a_limit() -> None:
    cards = [card(str(number)) for number in range(ADAPTERS_MAX + 1)]
    assert len(adapters_in({"data": cards}, "tiny")) == ADAPTERS_MAX
