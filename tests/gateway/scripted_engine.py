"""A small server that speaks vLLM's HTTP, and misbehaves on command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Callable[["ScriptedEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Call:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ScriptedEngine:
    """Answers with `words`; `script` takes over when set."""

    name: str
    model: str = "tiny"
    max_model_len: int = 4096
    words: tuple[str, ...] = ("Hello", " there", "!")
    cached_tokens: int = 0
    healthy: bool = True
    num_waiting: int = 0
    num_running: int = 1
    num_made: int = 0
    """Output tokens, by its counter."""
    cards: object = None
    """What it says its models are, if it is to be something else than the truth."""
    num_asked_models: int = 0
    padding: int = 0
    """Bytes that are added to its metrics."""
    on_forget: Callable[[], bool] | None = None
    """Asked to forget its blocks; None has no such endpoint."""
    on_tokenize: Callable[[web.Request], Awaitable[web.Response]] | None = None
    """Renders chats; None has no such endpoint."""
    script: Script | None = None
    calls: list[Call] = field(default_factory=list)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client left while it was served."""
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    """Once set, it does not answer that it is well, nor that it is not."""
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/reset_prefix_cache", self._forget)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._post)
        app.router.add_post("/v1/chat/completions", self._post)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        if self.frozen.is_set():
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.on_tokenize is None:
            return web.Response(status=404)
        return await self.on_tokenize(request)

    async def _forget(self, request: web.Request) -> web.Response:
        if self.on_forget is None:
            return web.Response(status=404)
        return web.json_response({"success": self.on_forget()})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        self.num_asked_models += 1
        cards = [card] if self.cards is None else self.cards
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.Response:
        labels = f'engine="0",model_name="{self.model}"'
        return web.Response(
            text=f"vllm:num_requests_running{{{labels}}} {self.num_running}.0\n"
            f"vllm:generation_tokens_total{{{labels}}} {self.num_made}.0\n"
            f"vllm:num_requests_waiting{{{labels}}} {self.num_waiting:.1f}\n" + "#" * self.padding
        )

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.calls.append(Call(request.path, headers, body))
        try:
            if self.script is not None:
                return await self.script(self, request, body)
            return await self.answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response(self.whole(body, chat="chat" in request.path))
        response = await self.begin_stream(request)
        for chunk in self.chunks(body, chat="chat" in request.path):
            await send(response, chunk)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def begin_stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    def usage(self, body: dict[str, Any], num_output: int) -> dict[str, Any]:
        prompt = body.get("prompt") or (body.get("kv_transfer_params") or {}).get(
            "prompt_token_ids", [0]
        )
        num_prompt = sum(map(len, prompt)) if isinstance(prompt[0], list) else len(prompt)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def whole(self, body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        words = self.words[: body.get("max_tokens") or len(self.words)]
        num_choices = body.get("n") or 1
        text = "".join(words)
        choices = [
            {
                "index": i,
                **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
                "logprobs": self._logprobs(body, words),
                "finish_reason": "stop" if words == self.words else "length",
                "stop_reason": None,
            }
            for i in range(num_choices)
        ]
        return {
            "id": "cmpl-engine",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": self.model,
            "choices": choices,
            "usage": self.usage(body, len(words) * num_choices),
            "kv_transfer_params": {"private": True},
        }

    def chunks(self, body: dict[str, Any], *, chat: bool) -> list[dict[str, Any]]:
        num_choices = body.get("n") or 1
        options = body.get("stream_options") or {}
        head = {
            "id": "cmpl-engine",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1,
            "model": self.model,
        }
        chunks: list[dict[str, Any]] = []
        words = self.words[: body.get("max_tokens") or len(self.words)]
        for k, word in enumerate(words):
            last = k == len(words) - 1
            reason = "stop" if words == self.words else "length"
            for i in range(num_choices):
                choice = {
                    "index": i,
                    **({"delta": {"content": word}} if chat else {"text": word}),
                    "logprobs": self._logprobs(body, (word,)),
                    "finish_reason": reason if last else None,
                }
                chunk: dict[str, Any] = head | {"choices": [choice]}
                if options.get("continuous_usage_stats"):
                    usage = self.usage(body, k + 1)
                    del usage["prompt_tokens_details"]
                    chunk["usage"] = usage
                chunks.append(chunk)
        if options.get("include_usage"):
            usage = self.usage(body, len(words) * num_choices)
            chunks.append(head | {"choices": [], "usage": usage})
        return chunks

    def _logprobs(self, body: dict[str, Any], words: tuple[str, ...]) -> dict[str, Any] | None:
        num_top = body.get("logprobs")
        if num_top is None or num_top is True:
            return None
        return {
            "text_offset": [0] * len(words),
            "tokens": list(words),
            "token_logprobs": [-0.5] * len(words),
            "top_logprobs": [
                {word: -0.5, **{f"other{k}": -1.0 - k for k in range(num_top)}} for word in words
            ],
        }


async def send(response: web.StreamResponse, chunk: object) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


# --- scripts ------------------------------------------------------------------------------------


async def hang(
    engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Never answers."""
    engine.hanging.set()
    await asyncio.Event().wait()
    raise AssertionError


def refuse(status: int, message: str = "no", **headers: str) -> Script:
    """Answers with an error as vLLM writes it."""

    async def script(
        engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": error}, status=status, headers=said)

    return script


async def drop(
    engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Closes the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def die_after(num_chunks: int) -> Script:
    """Streams some chunks, then breaks the connection."""

    async def script(
        engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await engine.begin_stream(request)
        for chunk in engine.chunks(body, chat=False)[:num_chunks]:
            await send(response, chunk)
        assert request.transport is not None
        request.transport.abort()
        return response

    return script


def stream_then_hang(num_chunks: int) -> Script:
    """Streams some chunks, then nothing."""

    async def script(
        engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await engine.begin_stream(request)
        for chunk in engine.chunks(body, chat=False)[:num_chunks]:
            await send(response, chunk)
        return await hang(engine, request, body)

    return script


async def error_in_stream(
    engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """One chunk, an error event, the end mark: vLLM's way to fail within a stream."""
    response = await engine.begin_stream(request)
    await send(response, engine.chunks(body, chat=False)[0])
    error = {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}
    await send(response, {"error": error})
    await response.write(b"data: [DONE]\n\n")
    return response
