"""Requests that decode will refuse are not shipped: a rehearsal with a prompt of one token."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from prfaas.gateway.openai.requests import Api, parse_request
from prfaas.gateway.serving.prefill_leg import is_plain
from prfaas.gateway.times import Times
from tests.gateway.conftest import World
from tests.gateway.prompts import LONG
from tests.gateway.scripted_engine import ScriptedEngine, hang, refuse

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": LONG, "max_tokens": 3, **fields}


STRANGE = [
    (CHAT, chat(tools=[TOOL])),
    (COMPLETIONS, completion(n=2, temperature=0)),
    (COMPLETIONS, completion(structured_outputs={"regex": "("})),
    (COMPLETIONS, completion(min_tokens=5)),
    (COMPLETIONS, completion(top_p=7.0)),
]


@pytest.mark.parametrize(("path", "body"), STRANGE)
async def test_what_decode_refuses_gets_no_remote_prefill(
    world: World, path: str, body: dict[str, Any]
) -> None:
    world.decode.script = refuse(400, PARSER)
    status, answer = await world.post(body, path)
    assert (status, answer["error"]["message"]) == (400, PARSER)
    assert not world.prefill.calls
    asked, real = world.decode.calls
    ids = asked.body.get("prompt") or asked.body["kv_transfer_params"]["prompt_token_ids"]
    assert (len(ids), asked.body["max_tokens"], asked.body.get("stream")) == (1, 1, None)
    assert LONG not in str(asked.body)
    assert asked.path == real.path
    record = await world.record()
    assert record["outcome"] == "rejected"
    assert record["fallback"] == {"stage": "prefill", "reason": "refused"}
    assert await world.metric('prfaas_rehearsals_total{outcome="refused"}') == 1
    # The client's fault: one that asks again and again sets off no alarm of fallbacks.
    fallback = 'prfaas_fallback_total{reason="refused",stage="prefill"}'
    assert await world.metric(fallback) == 1
    assert world.gateway.metrics.totals().num_fallbacks == 0
    assert len(world.gateway.driver.dispatcher.requests) == 0


@pytest.mark.parametrize(("path", "body"), STRANGE)
async def test_what_decode_takes_is_shipped_and_not_asked_again(
    world: World, path: str, body: dict[str, Any]
) -> None:
    for _ in range(2):
        assert (await world.post(body, path))[0] == 200
    assert len(world.prefill.calls) == 2
    assert len(world.decode.calls) == 3
    assert await world.metric('prfaas_rehearsals_total{outcome="passed"}') == 1


async def test_an_engine_that_refuses_the_rehearsal_alone_serves_the_request(world: World) -> None:
    async def answer(engine: ScriptedEngine, request: web.Request, body: Any) -> web.StreamResponse:
        if len(body["prompt"]) == 1:
            return await refuse(400)(engine, request, body)
        return await engine.answer(request, body)

    world.decode.script = answer
    assert (await world.post(completion(top_k=3)))[0] == 200
    assert not world.prefill.calls


async def test_an_engine_that_fails_at_the_rehearsal_is_taken_to_agree(world: World) -> None:
    async def answer(engine: ScriptedEngine, request: web.Request, body: Any) -> web.StreamResponse:
        if len(body["prompt"]) == 1:
            return await refuse(503)(engine, request, body)
        return await engine.answer(request, body)

    world.decode.script = answer
    assert (await world.post(completion(top_k=3)))[0] == 200
    assert len(world.prefill.calls) == 1
    assert await world.metric('prfaas_rehearsals_total{outcome="unknown"}') == 1


class Silent:
    """Answers no rehearsal, and counts them."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def __call__(
        self, engine: ScriptedEngine, request: web.Request, body: Any
    ) -> web.StreamResponse:
        if len(body["prompt"]) == 1:
            self.num_asked += 1
            return await hang(engine, request, body)
        return await engine.answer(request, body)


@pytest.mark.parametrize("times", [Times(rehearsal_s=0.2)])
async def test_an_engine_that_does_not_answer_a_rehearsal_is_not_asked_again_for_a_while(
    world: World,
) -> None:
    world.decode.script = silent = Silent()
    for k in range(3):
        assert (await world.post(completion(top_k=3 + k)))[0] == 200
    assert silent.num_asked == 1
    assert len(world.prefill.calls) == 3
    assert await world.metric('prfaas_rehearsals_total{outcome="unknown"}') == 1
    assert await world.metric('prfaas_rehearsals_total{outcome="skipped"}') == 2


@pytest.mark.parametrize("times", [Times(rehearsal_s=0.2, rehearsal_pause_s=0.0)])
async def test_an_engine_that_does_not_answer_a_rehearsal_is_asked_again_after_the_pause(
    world: World,
) -> None:
    world.decode.script = silent = Silent()
    for k in range(2):
        assert (await world.post(completion(top_k=9 + k)))[0] == 200
    assert silent.num_asked == 2


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, True),
        ({"temperature": 0, "top_p": 0.9, "stop": ["a"], "seed": 1, "user": "u"}, True),
        ({"n": 3, "temperature": 0.7}, True),
        ({"n": 3}, False),
        ({"n": 1, "temperature": 0}, True),
        ({"temperature": -1}, False),
        ({"temperature": float("nan")}, False),
        ({"stop": ""}, False),
        ({"stop": ["a", ""]}, False),
        ({"presence_penalty": 3}, False),
        ({"logit_bias": {"1": 5}}, False),
        ({"logprobs": 30}, False),
    ],
)
def test_plain_requests_need_no_rehearsal(fields: dict[str, Any], plain: bool) -> None:
    body = {"prompt": "x", **fields}
    assert is_plain(parse_request(body, Api.COMPLETIONS, "tiny", 300)) is plain
