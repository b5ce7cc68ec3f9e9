"""Bad input: refused at the door, in OpenAI's shape, with what, the value and the limit."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import RequestError
from prfaas.gateway.api import completions
from prfaas.gateway.http.request_body import BIG_BYTES
from prfaas.gateway.openai.requests import Api, parse_request
from tests.gateway.conftest import World, running, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KWARGS = "chat_template_kwargs"
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "prompt must be given"),
        ({"prompt": ""}, "prompt", "not be empty"),
        ({"prompt": []}, "prompt", "not be empty"),
        ({"prompt": 5}, "prompt", "got 5"),
        ({"prompt": {"a": 1}}, "prompt", "a string or an array"),
        ({"prompt": [1, "a"]}, "prompt", "prompt[1] must be an integer, got 'a'"),
        ({"prompt": [1, "a"], "n": "2"}, "prompt", "got 'a'"),
        ({"prompt": [1, 1.5]}, "prompt", "got 1.5"),
        ({"prompt": [-1]}, "prompt", "-1 is out of vocabulary: 0 to 299"),
        ({"prompt": [300]}, "prompt", "300 is out of vocabulary"),
        ({"prompt": [1, 2**62]}, "prompt", "out of vocabulary"),
        ({"prompt": ["a", ""]}, "prompt", "not empty"),
        ({"prompt": [[1], []]}, "prompt", "not empty"),
        ({"prompt": [[1], [[2]]]}, "prompt", "prompt[1][0] must be an integer, got [2]"),
        ({"prompt": ["a"] * 129}, "prompt", "129 prompts; the limit is 128"),
        ({"prompt": "hi", "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"prompt": "hi", "max_tokens": -5}, "max_tokens", "got -5"),
        ({"prompt": "hi", "max_tokens": "5x"}, "max_tokens", "an integer, got '5x'"),
        ({"prompt": "hi", "max_tokens": 1.5}, "max_tokens", "got 1.5"),
        ({"prompt": "hi", "max_tokens": "1e1"}, "max_tokens", "got '1e1'"),
        ({"prompt": "hi", "max_tokens": 4097}, "max_tokens", "4096 tokens"),
        ({"prompt": "x" * 4096, "max_tokens": 1}, "prompt", "has 4096 tokens"),
        ({"prompt": "x" * 100_000}, "prompt", "100000 characters"),
        ({"prompt": "hi", "n": 0}, "n", "must be an integer >= 1, got 0"),
        ({"prompt": "hi", "n": 1000}, "n", "must be an integer <= 128, got 1000"),
        ({"prompt": "hi", "temperature": 10**400}, "temperature", "out of range, got 1000"),
        ({"prompt": "hi", "temperature": "hot"}, "temperature", "got 'hot'"),
        ({"prompt": "hi", "stream": "maybe"}, "stream", "true or false"),
        ({"prompt": "hi", "stop": [1]}, "stop", "stop[0] must be a string, got 1"),
        ({"prompt": "hi", "stop": 5}, "stop", "a string or an array, got 5"),
        ({"prompt": "hi", "logit_bias": []}, "logit_bias", "an object"),
        ({"prompt": "hi", "stream_options": {}, "seed": "x"}, "seed", "an integer"),
        ({"prompt": "hi", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"prompt": "hi", "model": 5}, "model", "must be a string"),
        ({"prompt": "hi", "prompt_embeds": "AAAA"}, "prompt_embeds", "not accepted"),
        ({"prompt": "hi", "logprobs": []}, "logprobs", "an integer"),
    ],
)
async def test_completions(world: World, body: dict[str, Any], param: str, said: str) -> None:
    await refused(world, COMPLETIONS, body, param, said)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "messages", "non-empty array"),
        ({"messages": []}, "messages", "non-empty array"),
        ({"messages": "hi"}, "messages", "got 'hi'"),
        ({"messages": ["hi"]}, "messages", "messages[0] must be an object"),
        ({"messages": [{"content": "x"}]}, "messages", "messages[0].role must be given"),
        ({"messages": [{"role": 1}]}, "messages", "got 1"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages", "messages[1].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages", "content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages",
            "[0].type must",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", ".text"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages", "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages", "tool_calls"),
        ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
        ({"messages": [USER], "max_completion_tokens": 9999}, "max_completion_tokens", "4096"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "4096 tokens"),
        ({"messages": [USER], "chat_template": "x"}, "chat_template", "not accepted"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, KWARGS, "tokenize"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, KWARGS, "messages"),
        ({"messages": [USER], "continue_final_message": True}, "messages", "template refuses"),
        ({"messages": [USER], "logprobs": 3}, "logprobs", "true or false"),
        ({"messages": [USER], "top_logprobs": 3}, "top_logprobs", "logprobs"),
        (
            {"messages": [USER], "top_logprobs": -2, "logprobs": True},
            "top_logprobs",
            ">= -1, got -2",
        ),
        ({"messages": [USER], "tools": {"a": 1}}, "tools", "array"),
        ({"messages": [USER], "documents": 5}, "documents", "array"),
    ],
)
async def test_chat(world: World, body: dict[str, Any], param: str | None, said: str) -> None:
    await refused(world, CHAT, body, param, said)


async def refused(
    world: World, path: str, body: dict[str, Any], param: str | None, said: str
) -> None:
    status, reply = await world.post(body, path)
    assert status == 400, reply
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert said in error["message"]
    assert len(error["message"]) < 400
    assert not world.prefill.calls
    assert not world.decode.calls
    assert (await world.record())["outcome"] == "rejected"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{'prompt': 1}",
        b'{"prompt": NaN}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "hi", "x": ' + b"[" * 100 + b"]" * 100 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_malformed_bodies(world: World, data: bytes, path: str) -> None:
    async with world.http.post(world.url + path, data=data) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"x": [[]] * 100_000}, "has 100004 arrays and objects; the limit is 100000"),
        ({"messages": [{}] * 100_000}, "has 100002 arrays and objects"),
        ({"messages": [{**USER, "content": "{" * 100_000}]}, "4096 tokens"),
        ({str(i): i for i in range(1000)}, "1001 fields; the limit is 1000"),
    ],
)
async def test_a_body_of_very_many_things(world: World, body: dict[str, Any], said: str) -> None:
    status, reply = await world.post({"messages": [USER]} | body, CHAT)
    assert status == 400
    assert said in reply["error"]["message"]


async def test_only_large_bodies_are_parsed_on_another_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def parse(data: bytes, **more: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse_request(data, **more)

    monkeypatch.setattr(completions, "parse_request", parse)
    for length in (10, BIG_BYTES):
        await world.post({"prompt": "hi", "x": "x" * length})
    assert threads == [True, False]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_unknown_model(world: World, path: str) -> None:
    body = {"model": "gpt-9", "prompt": "hi", "messages": [USER]}
    status, reply = await world.post(body, path)
    assert status == 404
    assert reply["error"]["type"] == "NotFoundError"
    assert reply["error"]["param"] == "model"
    assert "gpt-9" in reply["error"]["message"]


async def test_the_official_client_raises_its_own_errors(world: World) -> None:
    with pytest.raises(openai.NotFoundError):
        await world.openai.completions.create(model="gpt-9", prompt="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        await world.openai.completions.create(model="tiny", prompt="hi", max_tokens=-1)
    assert caught.value.param == "max_tokens"


async def test_body_over_the_limit(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    gateway = {"body_bytes_max": "10kB"}
    async with running(checkpoint, identities, tmp_path, gateway=gateway) as world:
        status, reply = await world.post({"prompt": "x" * 20_000})
        assert status == 413
        assert reply["error"]["code"] == 413
        assert "10000" in reply["error"]["message"]


async def test_nobody_to_decode(world: World) -> None:
    world.decode.healthy = False
    await until(lambda: not world.gateway.engines.by_name["decode"].is_ready)
    for method, path in (("GET", "/health"), ("POST", COMPLETIONS)):
        async with world.http.request(method, world.url + path, json={"prompt": "hi"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("POST", "/metrics", 405),
        ("GET", "/control/requests?limit=0", 400),
        ("GET", "/control/requests?limit=x", 400),
        ("GET", "/control/requests?limit=99999999999999999999", 400),
        ("GET", "/control/requests/unknown", 404),
    ],
)
async def test_routes(world: World, method: str, path: str, status: int) -> None:
    async with world.http.request(method, world.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == status
        assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("wanted", ["x" * 129, "a b", "é", ""])
async def test_odd_request_ids_are_replaced(world: World, wanted: str) -> None:
    headers = {"X-Request-Id": wanted}
    async with world.http.post(
        world.url + COMPLETIONS, json={"prompt": "hi"}, headers=headers
    ) as response:
        given_id = response.headers["X-Request-Id"]
    assert len(given_id) == 32
    assert given_id != wanted


async def test_a_client_that_sends_half_a_body(world: World) -> None:
    host, port = "127.0.0.1", int(world.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b'{"pro'
    )
    await writer.drain()
    await until(lambda: len(world.gateway.records.latest(10)) == 1)
    writer.transport.abort()
    await until(lambda: world.gateway.records.latest(1)[0].outcome == "cancelled")


async def sent(url: str, head: bytes) -> bytes:
    """The answer to a request of which only the head comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
    answer = await reader.readuntil(b"}}")
    writer.transport.abort()
    return answer


async def test_a_body_that_does_not_come_gives_its_place_back(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    gateway = {"body_timeout": "50ms"}
    async with running(checkpoint, identities, tmp_path, gateway=gateway) as world:
        answer = await sent(world.url, b"Content-Length: 100")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"RequestTimeoutError" in answer
        assert b"within 0.05 s" in answer
        assert (await world.record())["outcome"] == "rejected"


async def test_a_body_that_is_said_to_be_too_large_is_not_waited_for(world: World) -> None:
    answer = await sent(world.url, b"Content-Length: 99999999999")
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_failure_of_ours_has_the_shape_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.gateway.driver.states, "is_on", None)
    async with world.http.get(f"{world.url}/control/status") as reply:
        assert reply.status == 500
        assert (await reply.json())["error"]["type"] == "InternalServerError"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("rebound.example", 403),
        ("rebound.example:8000", 403),
        ("10.0.0.1", 403),
        ("x:y", 403),
        ("xn--", 403),
        ("evil#@localhost", 403),
        ("localhost.evil:1", 403),
        ("localhost", 200),
        ("localhost:9000", 200),
        ("127.0.0.1", 200),
        ("[::1]:9000", 200),
    ],
)
async def test_operators_pages_answer_to_this_machine_s_names_only(
    world: World, host: str, status: int
) -> None:
    async with world.http.get(f"{world.url}/control/status", headers={"Host": host}) as reply:
        assert reply.status == status
    async with world.http.get(f"{world.url}/v1/models", headers={"Host": host}) as reply:
        assert reply.status == 200


JSON: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.just("hi") | st.just([USER])
)
JSON |= st.lists(JSON, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), JSON, max_size=2)
KEYS = st.sampled_from(
    [
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stream",
        "stream_options",
        "stop",
        "tools",
        "tool_choice",
        "logprobs",
        "top_logprobs",
        "echo",
        "vllm_xargs",
        "chat_template_kwargs",
    ]
)


@given(st.dictionaries(KEYS, JSON, max_size=5), st.sampled_from(Api))
def test_any_body_is_either_parsed_or_refused(body: dict[str, Any], api: Api) -> None:
    try:
        client = parse_request(json.dumps(body).encode(), api, "tiny", 300)
    except RequestError:
        return
    assert bool(client.prompts) != bool(client.messages)
    assert 1 <= client.num_choices <= 128
    assert client.max_tokens is None or client.max_tokens >= 0


@given(st.binary(max_size=200), st.sampled_from(Api))
def test_any_bytes_are_either_parsed_or_refused(data: bytes, api: Api) -> None:
    with pytest.raises(RequestError):
        parse_request(data, api, "tiny", 300)


async def test_a_body_that_is_not_encoded_as_it_says(world: World) -> None:
    async with world.http.post(
        f"{world.url}/v1/chat/completions",
        data=b'{"model": "m"}',
        headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
    ) as reply:
        assert reply.status == 400
        assert "Content-Encoding" in (await reply.json())["error"]["message"]
