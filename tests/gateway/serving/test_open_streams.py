"""Memory of a stream that is open, by what the gateway's own code has allocated for it."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from typing import Any

import aiohttp
from aiohttp import web

from tests.gateway.conftest import World
from tests.gateway.scripted_engine import ScriptedEngine

NUM_WARM, NUM_STREAMS = 5, 20
BYTES_MAX = 15_000
"""A queue for the few events of a stream, or a list of those who wait for one, takes 760."""


async def hold(_: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    choice = b'{"index": 0, "text": "Hello", "finish_reason": null, "logprobs": null}'
    await response.write(b'data: {"id": "1", "created": 1, "choices": [%s]}\n\n' % choice)
    await asyncio.Event().wait()
    return response


async def test_bytes_of_an_open_stream(world: World) -> None:
    world.decode.script = hold
    held: list[aiohttp.ClientResponse] = []

    async def open_streams(num: int) -> None:
        for number in range(num):
            body = {"prompt": f"This is {number}.", "stream": True, "max_tokens": 16}
            response = await world.http.post(f"{world.url}/v1/completions", json=body)
            assert b"Hello" in await response.content.readline()
            held.append(response)

    await open_streams(NUM_WARM)
    gc.collect()
    tracemalloc.start()
    try:
        await open_streams(NUM_STREAMS)
        gc.collect()
        ours = tracemalloc.Filter(inclusive=True, filename_pattern="*/src/prfaas/*")
        found = tracemalloc.take_snapshot().filter_traces([ours]).statistics("filename")
    finally:
        tracemalloc.stop()
    num_bytes = sum(each.size for each in found) / NUM_STREAMS
    assert num_bytes < BYTES_MAX, f"{num_bytes:.0f} bytes"
    for response in held:
        response.close()


async def test_a_chat_that_is_tokens_is_kept_as_tokens_alone(world: World) -> None:
    """Neither the bytes of its body nor its messages are kept while it streams."""
    world.decode.script = hold
    text = "A text of some length. " * 50
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True})
    headers = {"Content-Type": "application/json"}
    async with world.http.post(
        f"{world.url}/v1/chat/completions", data=body, headers=headers
    ) as response:
        while b"Hello" not in (line := await response.content.readline()):
            assert line
        gc.collect()
        # By their types: what others have loaded may warn when it is asked for its class.
        kept = gc.get_objects()
        requests = [each for each in kept if issubclass(type(each), web.Request)]
        [chat] = (each for each in requests if each.path == "/v1/chat/completions")
        assert chat._read_bytes is None
        assert not [each for each in kept if type(each) is list and _is_chat(each, text)]


def _is_chat(found: list[Any], text: str) -> bool:
    return any(type(each) is dict and each.get("content") == text for each in found)
