"""An engine that begins every stream and never ends it, to count what an open stream costs."""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

MODEL = sys.argv[2]
NUM_TOKENS = 100


async def models(request: web.Request) -> web.Response:
    card = {"id": MODEL, "object": "model", "max_model_len": 100_000}
    return web.json_response({"object": "list", "data": [card]})


async def anything(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def render(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response({"request_id": "1", "token_ids": list(range(NUM_TOKENS))})


async def hold(request: web.Request) -> web.StreamResponse:
    await request.read()
    is_chat = "chat" in request.path
    said = {"delta": {"content": "Hello"}} if is_chat else {"text": "Hello"}
    chunk = {"id": "1", "object": "text_completion", "created": 1, "model": MODEL}
    chunk["choices"] = [{"index": 0, "finish_reason": None, "logprobs": None, **said}]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await asyncio.Event().wait()
    return response


def main() -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", hold)
    app.router.add_post("/v1/completions", hold)
    app.router.add_post("/v1/chat/completions/render", render)
    app.router.add_get("/{rest:.*}", anything)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, backlog=4096)


if __name__ == "__main__":
    main()
