"""The OpenAI surface, as vLLM serves it: fields, headers, errors, deadlines, small endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from prfaas import __version__
from prfaas.config.clusters import EngineTable
from prfaas.errors import RequestError
from prfaas.gateway.openai.messages import parse_tools
from tests.gateway.conftest import World, deployment_for, running, until
from tests.gateway.prompts import LONG, SHORT
from tests.gateway.scripted_engine import ScriptedEngine, hang, refuse, send, stream_then_hang

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def say(
    world: World, path: str, body: Any = None, method: str = "POST", **headers: str
) -> tuple[int, Mapping[str, str], Any]:
    async with world.http.request(method, world.url + path, json=body, headers=headers) as response:
        found = await response.json() if response.content_type == "application/json" else None
        return response.status, response.headers.copy(), found


# Endpoints


async def test_one_model(world: World) -> None:
    model = await world.openai.models.retrieve("tiny")
    assert model.model_dump()["max_model_len"] == 4096
    with pytest.raises(openai.NotFoundError, match="this gateway serves 'tiny'"):
        await world.openai.models.retrieve("other/model")


async def test_probes_and_version(world: World) -> None:
    for method in ("GET", "POST"):
        status, _, _ = await say(world, "/ping", method=method)
        assert status == 200
    _, _, found = await say(world, "/version", method="GET")
    assert found == {"version": __version__}


@pytest.mark.parametrize(
    "path",
    ["/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/chat/completions/batch", "/generate"],
)
async def test_what_is_not_served_names_what_is(world: World, path: str) -> None:
    status, _, found = await say(world, path, {"input": "x"})
    assert status == 404
    error = found["error"]
    assert error["code"] == 404
    assert error["type"] == "NotFoundError"
    assert path in error["message"]
    assert "/v1/chat/completions" in error["message"]
    status, headers, found = await say(world, "/v1/completions", method="GET")
    assert (status, headers["Allow"]) == (405, "POST")
    assert found["error"]["code"] == 405


# Tokens


async def test_tokenize_tells_the_ids_that_the_engines_get(world: World) -> None:
    messages = [{"role": "user", "content": SHORT}]
    for path, body in (
        ("/v1/completions", {"prompt": SHORT}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "tools": [TOOL], "tool_choice": "none"}),
        ("/v1/chat/completions", {"messages": messages, "add_generation_prompt": False}),
    ):
        await say(world, path, body)
        sent = world.decode.calls[-1].body
        given = sent.get("prompt") or sent["kv_transfer_params"]["prompt_token_ids"]
        status, _, found = await say(world, "/tokenize", body | {"model": "tiny"})
        assert status == 200
        assert found == {
            "count": len(given),
            "max_model_len": 4096,
            "tokens": given,
            "token_strs": None,
        }


async def test_detokenize_is_the_way_back(world: World) -> None:
    text = "Grüße <|im_end|> 🙂"
    _, _, found = await say(world, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert len(found["token_strs"]) == found["count"] == len(found["tokens"])
    assert "<|im_end|>" in found["token_strs"]
    status, _, back = await say(world, "/detokenize", {"tokens": found["tokens"]})
    assert (status, back) == (200, {"prompt": text})
    _, _, back = await say(world, "/detokenize", {"tokens": []})
    assert back == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [3]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
async def test_what_can_not_be_tokenised(
    world: World, path: str, body: dict[str, Any], param: str
) -> None:
    status, _, found = await say(world, path, body)
    assert status == (404 if param == "model" else 400)
    assert found["error"]["param"] == param


async def test_without_an_engine_nobody_knows_how_long_a_prompt_may_be(world: World) -> None:
    world.gateway.engines.by_name["decode"].is_ready = False
    world.decode.healthy = False
    status, headers, found = await say(world, "/tokenize", {"prompt": SHORT})
    assert status == 503
    assert found["error"]["type"] == "ServiceUnavailableError"
    assert headers["X-Prfaas-Reject-Reason"] == "unavailable"
    assert headers["Retry-After"] == "1"


def test_tools_are_what_vllms_templates_get() -> None:
    """Pairs of what a client sends and what vLLM 0.32's ChatCompletionToolsParam dumps."""
    function = {"name": "f", "description": "d", "parameters": {"a": 1}}
    for given, dumped in (
        (
            {"type": "function", "function": {"name": "f"}},
            '{"type": "function", "function": {"name": "f", "description": null, '
            '"parameters": null}}',
        ),
        (
            {"type": "function", "function": function | {"strict": True}},
            '{"type": "function", "function": {"name": "f", "description": "d", '
            '"parameters": {"a": 1}, "strict": true}}',
        ),
        (
            {"function": {"name": "f", "parameters": None, "x": 1}, "extra": 2},
            '{"type": "function", "function": {"name": "f", "description": null, '
            '"parameters": null}}',
        ),
        (
            {"type": "function", "function": {"name": "f"}, "defer_loading": True},
            '{"type": "function", "function": {"name": "f", "description": null, '
            '"parameters": null, "defer_loading": true}, "defer_loading": true}',
        ),
        (
            {"function": dict(reversed(function.items())), "type": "function"},
            '{"type": "function", "function": {"name": "f", "description": "d", '
            '"parameters": {"a": 1}}}',
        ),
    ):
        assert json.dumps(parse_tools([given])[0]) == dumped
    assert parse_tools(None) == []


@pytest.mark.parametrize(
    "tool",
    [
        1,
        {},
        {"type": "web_search"},
        {"type": "custom", "function": {"name": "f"}},
        {"function": {}},
        {"function": {"name": 1}},
        {"function": {"name": "f", "parameters": []}},
        {"function": {"name": "f", "description": 1}},
        {"function": {"name": "f", "strict": 1}},
    ],
)
def test_tools_that_are_none(tool: Any) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        parse_tools([tool])


# Fields


async def test_openais_fields_reach_the_decode_leg_and_both_legs_compute_the_same(
    world: World,
) -> None:
    answer = await world.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": LONG}],
        max_completion_tokens=3,
        n=2,
        stop=["x", "y"],
        seed=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"5": 1},
        response_format=SCHEMA,
        user="u",
        service_tier="auto",
        store=True,
        metadata={"a": "b"},
        extra_body={"min_tokens": 1, "ignore_eos": True, "top_k": 4},
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello there!"] * 2
    prefill, decode = world.prefill.calls[0].body, world.decode.calls[-1].body
    assert prefill["prompt"] == decode["prompt"]
    assert decode["response_format"] == SCHEMA
    assert decode["max_tokens"] == 3
    for name, value in (
        ("n", 2),
        ("stop", ["x", "y"]),
        ("seed", 7),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("logit_bias", {"5": 1}),
        ("min_tokens", 1),
        ("ignore_eos", True),
        ("top_k", 4),
    ):
        assert decode[name] == value
        assert name not in prefill


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "find"}}},
        {"logprobs": True, "top_logprobs": 3},
    ],
)
async def test_what_only_the_chat_endpoint_can_do_gets_the_same_tokens_there(
    world: World, fields: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], **fields}
    status, headers, _ = await say(world, "/v1/chat/completions", body)
    assert (status, headers["X-Prfaas-Path"]) == (200, "remote")
    call = world.decode.calls[-1]
    assert call.path == "/v1/chat/completions"
    given = call.body["kv_transfer_params"]["prompt_token_ids"]
    assert given == world.prefill.calls[0].body["prompt"]
    assert {name: call.body[name] for name in fields} == fields


async def test_every_chat_goes_to_the_chat_endpoint_where_engines_parse_reasoning(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with running(
        checkpoint, identities, tmp_path / "state", model={"chat_endpoint": True}
    ) as world:
        await say(world, "/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]})
        assert world.decode.calls[0].path == "/v1/chat/completions"
        assert world.prefill.calls[0].path == "/v1/completions"


@pytest.mark.parametrize("args", [["--reasoning-parser", "qwen3"], ["--reasoning-parser=qwen3"]])
def test_a_reasoning_parser_is_seen(
    checkpoint: Path, identities: Path, tmp_path: Path, args: list[str]
) -> None:
    deployment = deployment_for(checkpoint, identities, tmp_path)
    assert not deployment.needs_chat_endpoint
    cluster = deployment.clusters["pd"]
    engines = {"decode": EngineTable(pool="pd-pool", args=args)}
    clusters = {"pd": cluster.model_copy(update={"engines": engines})}
    assert deployment.model_copy(update={"clusters": clusters}).needs_chat_endpoint


async def test_a_gap_is_rendered_by_the_engine(world: World) -> None:
    status, headers, _ = await say(world, "/v1/completions", {"prompt": LONG, "suffix": "end"})
    assert (status, headers["X-Prfaas-Path"]) == (200, "local")
    assert world.decode.calls[0].body["prompt"] == LONG
    assert world.decode.calls[0].body["suffix"] == "end"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"best_of": 3, "guided_choice": ["a"]}, "best_of, guided_choice"),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, None),
        ({"kv_transfer_params": {}, "bootstrap_x\r\ny": 1}, "kv_transfer_params"),
        ({"best_of": None, "safety_identifier": "u", "cache_salt": "s"}, ""),
    ],
)
async def test_fields_without_effect_are_named_and_reach_no_engine(
    world: World, fields: dict[str, Any], named: str | None
) -> None:
    status, headers, _ = await say(world, "/v1/completions", {"prompt": SHORT, **fields})
    assert status == 200
    expected = ", ".join(fields) if named is None else named
    assert headers.get("X-Prfaas-Ignored", "") == expected
    assert not (fields.keys() - {"cache_salt"}) & world.decode.calls[-1].body.keys()


async def test_an_engines_refusal_is_passed_on_as_it_is(world: World) -> None:
    world.decode.script = refuse(422, "logit_bias: token 900 is out of vocabulary")
    status, _, found = await say(world, "/v1/completions", {"prompt": SHORT})
    assert status == 422
    assert found == {
        "error": {
            "message": "logit_bias: token 900 is out of vocabulary",
            "type": "BadRequestError",
            "param": None,
            "code": 422,
        }
    }


async def test_a_refusal_within_a_stream_is_passed_on_and_tried_nowhere_else(
    world: World,
) -> None:
    """vLLM checks some fields only after the head of a stream."""
    error = {"error": {"message": "bad bias", "type": "BadRequestError", "param": "b", "code": 400}}

    async def script(engine: ScriptedEngine, request: web.Request, body: Any) -> Any:
        response = await engine.begin_stream(request)
        await send(response, error)
        await response.write(b"data: [DONE]\n\n")
        return response

    world.decode.script = world.spare.script = script
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    async with world.http.post(
        f"{world.url}/v1/completions", json={"prompt": SHORT, "stream": True}
    ) as response:
        assert response.status == 200
        events = (await response.text()).split("\n\n")
    assert json.loads(events[0].removeprefix("data: ")) == error
    assert events[1:] == ["data: [DONE]", ""]
    assert len(world.decode.calls) + len(world.spare.calls) == 1
    record = await world.record()
    assert (record["outcome"], record["fallback"]) == ("rejected", None)


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize(
    ("said", "passed_on"),
    [
        ({}, "1"),
        ({"Retry_After": "17"}, "17"),
        ({"Retry_After": "0"}, "0"),
        ({"Retry_After": "999999999"}, "3600"),
        ({"Retry_After": "Fri, 31 Dec 1999 23:59:59 GMT"}, "1"),
        ({"Retry_After": "-5"}, "1"),
    ],
)
async def test_an_engine_that_is_full_says_when_to_try_again(
    world: World, code: int, said: dict[str, str], passed_on: str
) -> None:
    world.decode.script = refuse(code, "full", **said)
    status, headers, found = await say(world, "/v1/completions", {"prompt": SHORT})
    assert (status, found["error"]["message"]) == (code, "full")
    assert headers["Retry-After"] == passed_on


async def test_what_is_no_refusal_for_now_has_nothing_to_wait_for(world: World) -> None:
    world.decode.script = refuse(400, "no", Retry_After="17")
    status, headers, _ = await say(world, "/v1/completions", {"prompt": SHORT})
    assert status == 400
    assert "Retry-After" not in headers


# Headers


async def test_trace_context_reaches_both_legs(world: World) -> None:
    body = {"prompt": LONG, "max_tokens": 2}
    await say(world, "/v1/completions", body, traceparent=TRACE, tracestate="a=b,c=d")
    for engine in (world.prefill, world.decode):
        assert engine.calls[0].headers["traceparent"] == TRACE
        assert engine.calls[0].headers["tracestate"] == "a=b,c=d"
    await say(world, "/v1/completions", body, traceparent="00-xyz", tracestate="a=b")
    await say(world, "/v1/completions", body, traceparent=TRACE, tracestate="a=" + "b" * 600)
    assert "tracestate" not in world.decode.calls[1].headers
    assert "traceparent" not in world.decode.calls[1].headers
    assert "traceparent" in world.decode.calls[2].headers
    assert "tracestate" not in world.decode.calls[2].headers


async def test_a_request_id_comes_back_in_header_and_body(world: World) -> None:
    headers = {"X-Request-Id": "mine-1"}
    _, answered, found = await say(world, "/v1/completions", {"prompt": SHORT}, **headers)
    assert answered["X-Request-Id"] == "mine-1"
    assert found["id"] == "cmpl-mine-1"
    _, answered, found = await say(world, "/v1/completions", {"prompt": SHORT, "n": 0}, **headers)
    assert answered["X-Request-Id"] == "mine-1"
    assert found["error"]["param"] == "n"
    _, answered, found = await say(world, "/v1/completions", {"prompt": SHORT})
    assert found["id"] == f"cmpl-{answered['X-Request-Id']}"


# Deadlines


async def test_a_clients_deadline_ends_both_legs(world: World) -> None:
    world.prefill.script = hang
    headers = {"X-Request-Timeout": "1"}
    status, _, found = await say(world, "/v1/completions", {"prompt": LONG}, **headers)
    assert status == 504
    assert found["error"]["type"] == "GatewayTimeoutError"
    assert "X-Request-Timeout" in found["error"]["message"]
    await asyncio.wait_for(world.prefill.gone.wait(), 30)
    sample = 'prfaas_requests_total{outcome="timed_out",path="remote"}'
    assert await world.metric(sample) == 1


async def test_a_deadline_within_a_stream(world: World) -> None:
    world.decode.script = stream_then_hang(2)
    async with world.http.post(
        f"{world.url}/v1/completions",
        json={"prompt": SHORT, "stream": True},
        headers={"X-Request-Timeout": "1"},
    ) as response:
        text = await response.text()
    assert "GatewayTimeoutError" in text
    assert text.endswith("data: [DONE]\n\n")
    await asyncio.wait_for(world.decode.gone.wait(), 30)
    await until(lambda: world.gateway.records.latest(1)[0].outcome.value == "timed_out")


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "inf", "nan", "1e999"])
async def test_a_deadline_that_is_none(world: World, value: str) -> None:
    headers = {"X-Request-Timeout": value}
    status, _, found = await say(world, "/v1/completions", {"prompt": SHORT}, **headers)
    assert status == 400
    assert found["error"]["param"] == "X-Request-Timeout"


async def test_the_gateways_deadline_is_the_last(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    gateway = {"request_timeout": "200ms"}
    async with running(checkpoint, identities, tmp_path / "state", gateway=gateway) as world:
        world.decode.script = hang
        headers = {"X-Request-Timeout": "100"}
        status, _, found = await say(world, "/v1/completions", {"prompt": SHORT}, **headers)
        assert status == 504
        assert "gateway.request_timeout" in found["error"]["message"]
