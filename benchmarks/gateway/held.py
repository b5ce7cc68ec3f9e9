"""Engines without a model: all answer at once and by themselves, and never tokenise.

    python -m benchmarks.gateway.held PORT MODEL hold | answer [tokenize]

`hold` begins every stream and never ends it, to count what an open stream costs; `answer` sends as
many tokens as were asked for, to count what a long prompt costs the router alone. `tokenize` gives
routers made-up ids of a prompt; a gateway of ours would find that they differ from its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial

from aiohttp import web

MODEL, HOLD = sys.argv[2], sys.argv[3] == "hold"
NUM_TOKENS, NUM_OUTPUT = 100, 16
LENGTH_MAX = 262_144
TOKEN_BYTES = 5
"""Bytes of text that count as a token where a router asks for tokens."""


async def models(request: web.Request) -> web.Response:
    card = {"id": MODEL, "object": "model", "max_model_len": LENGTH_MAX}
    return web.json_response({"object": "list", "data": [card]})


async def anything(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def render(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response({"request_id": "1", "token_ids": list(range(NUM_TOKENS))})


async def tokenize(request: web.Request) -> web.Response:
    ids = list((await request.read())[::TOKEN_BYTES])
    return web.json_response({"count": len(ids), "max_model_len": LENGTH_MAX, "tokens": ids})


async def stream(request: web.Request, *, is_chat: bool) -> web.StreamResponse:
    await request.read()
    said = {"delta": {"content": "Hello"}} if is_chat else {"text": "Hello"}
    chunk = {"id": "1", "object": "text_completion", "created": 1, "model": MODEL}
    chunk["choices"] = [{"index": 0, "finish_reason": None, "logprobs": None, **said}]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(1 if HOLD else NUM_OUTPUT - 1):
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    if HOLD:
        await asyncio.Event().wait()
    chunk["choices"][0]["finish_reason"] = "length"  # type: ignore[index]
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
    return response


def main() -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", partial(stream, is_chat=True))
    app.router.add_post("/v1/completions", partial(stream, is_chat=False))
    if sys.argv[4:] == ["tokenize"]:
        app.router.add_post("/v1/chat/completions/render", render)
        app.router.add_post("/tokenize", tokenize)
    app.router.add_get("/{rest:.*}", anything)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, backlog=4096)


if __name__ == "__main__":
    main()
