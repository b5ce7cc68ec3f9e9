"""vLLM's or SGLang's HTTP surface over one instance, or the data-parallel ranks of an engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from prfaas import __version__
from prfaas.engines.timing.api.bodies import Body, read_body
from prfaas.engines.timing.api.generation import AnswerGeneration, lengths_of, prompts_in
from prfaas.engines.timing.api.metrics import TimingMetrics
from prfaas.engines.timing.api.replies import Json, Replies, error_body
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.instance import TimedInstance
from prfaas.errors import ConfigError, RequestError
from prfaas.series import CONTENT_TYPE
from prfaas.wire.plain_http import listen, name_server

BODY_BYTES_MAX = 64 << 20
SHUTDOWN_S = 0.5
RANK_HEADER = "X-data-parallel-rank"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves one instance, and those of the ranks that joined it.

    Args:
        model: Name that is served.
        max_model_len: Longest sequence, tokens.
        stream_interval: Tokens per chunk of a stream, after the first.
    """

    def __init__(
        self,
        instance: TimedInstance,
        vocabulary: Vocabulary,
        model: str,
        max_model_len: int,
        stream_interval: int = 1,
    ) -> None:
        self.instance = instance
        self._vocabulary, self._model = vocabulary, model
        self._max_model_len, self._interval = max_model_len, stream_interval
        self.ranks = [self]
        """Data-parallel ranks behind the URL of this server, itself the first."""
        self._join(TimingMetrics(model))
        self._created = int(time.time())
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
        app.on_response_prepare.append(name_server)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._tell_metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        if instance.layout.takes_orders:
            app.router.add_post("/v1/chat/completions/render", self._render)
            app.router.add_post("/reset_prefix_cache", self._reset)
        else:
            app.router.add_post("/flush_cache", self._reset)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        self._listener: asyncio.Server | None = None

    def _join(self, metrics: TimingMetrics) -> None:
        self._metrics = metrics
        self._rank = metrics.add(self.instance)

    def add_rank(self, other: Server) -> None:
        """Serve another instance behind this URL, as the next rank; its server does not listen."""
        self.ranks.append(other)
        other._join(self._metrics)

    @property
    def num_requests(self) -> int:
        """Requests of its instance that wait or run."""
        return self.instance.num_waiting + self.instance.scheduler.num_running

    async def start(self, host: str, port: int) -> str:
        """Listen; ConfigError if the address is taken; returns base URL."""
        await self._runner.setup()
        try:
            self._listener = await listen(self._runner, host, port)
        except OSError as error:
            raise ConfigError(
                f"{self.instance.name} cannot listen on {host}:{port}: {error}"
            ) from None
        return f"http://{host}:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop serving."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        await self.instance.close()

    async def _health(self, _request: web.Request) -> web.Response:
        """Well once the pool node has taken the instance, as vLLM's start-up waits for its tier."""
        return web.Response(status=200)

    async def _version(self, _request: web.Request) -> web.Response:
        return _json({"version": f"prfaas {__version__}, timing engine: computes nothing"})

    async def _models(self, _request: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "prfaas timing engine",
            "root": self._model,
            "parent": None,
            "max_model_len": self._max_model_len,
            "permission": [],
        }
        return _json({"object": "list", "data": [card]})

    async def _tell_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body, raw = read_body(await request.read(), self._model)
        tokens = (await prompts_in(body, raw, self._vocabulary, chat=body.messages is not None))[0]
        texts = (
            [self._vocabulary.decode([t]) for t in tokens] if raw.get("return_token_strs") else None
        )
        return _json(
            {
                "count": len(tokens),
                "max_model_len": self._max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    async def _render(self, request: web.Request) -> web.Response:
        """A chat as vLLM's request of token ids."""
        body, raw = read_body(await request.read(), self._model)
        prompts = await prompts_in(body, raw, self._vocabulary, chat=True)
        most = lengths_of(body, prompts, self._max_model_len, chat=True)[0]
        return _json(
            {
                "request_id": secrets.token_hex(16),
                "token_ids": prompts[0],
                "sampling_params": {"max_tokens": most},
                "model": self._model,
                "stream": bool(body.stream),
            }
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        _, raw = read_body(await request.read(), self._model)
        tokens = raw.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise RequestError("tokens must be token ids", param="tokens")
        return _json({"prompt": self._vocabulary.decode(tokens)})

    async def _reset(self, _request: web.Request) -> web.Response:
        for server in self.ranks:
            await server.instance.forget()
        return _json({"success": True})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        return await self._rank_of(request)._answer_here(request, chat=chat)

    def _rank_of(self, request: web.Request) -> Server:
        """The rank that a request names in the header `X-data-parallel-rank`, or the idlest one."""
        text = request.headers.get(RANK_HEADER)
        if text is None:
            return min(self.ranks, key=lambda server: server.num_requests)
        if not text.isdecimal() or int(text) >= len(self.ranks):
            raise RequestError(f"data_parallel_rank {text} is out of range [0, {len(self.ranks)})")
        return self.ranks[int(text)]

    async def _answer_here(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        body, raw = read_body(await request.read(), self._model)
        prompts = await prompts_in(body, raw, self._vocabulary, chat=chat)
        lengths = lengths_of(body, prompts, self._max_model_len, chat=chat)
        given = request.headers.get("X-Request-Id", "")
        request_id = given or secrets.token_hex(16)
        # A client may use an id twice.
        unique = f"{request_id}-{secrets.token_hex(4)}"
        generation = AnswerGeneration(
            self.instance, self._vocabulary, body, unique, prompts, lengths, self._interval
        )
        replies = Replies(request_id, self._model, int(time.time()), body, prompts, chat=chat)
        try:
            return await self._run(request, body, generation, replies)
        finally:
            seconds = time.monotonic() - generation.started
            reasons = [choice.finish_reason or "abort" for choice in generation.choices]
            for reason in reasons or ["abort"]:
                self._metrics.ended(self._rank, reason, seconds)

    async def _run(
        self, request: web.Request, body: Body, generation: AnswerGeneration, replies: Replies
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        grown = generation.run()
        try:
            is_first = True
            async for changed in grown:
                if is_first:
                    self._metrics.first_token(self._rank, time.monotonic() - generation.started)
                    is_first = False
                if not body.stream:
                    continue
                if response is None:
                    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                    await response.prepare(request)
                for chunk in replies.chunks(changed, generation.usage):
                    await response.write(_event(chunk))
        finally:
            await grown.aclose()  # type: ignore[attr-defined]
        if response is None:
            return _json(replies.whole(generation.choices, generation.usage))
        if body.include_usage:
            await response.write(_event(replies.last(generation.usage)))
        await response.write(b"data: [DONE]\n\n")
        return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in vLLM's shape."""
    try:
        return await handler(request)
    except RequestError as error:
        body = error_body(str(error), error.error_type, error.param, error.status)
        return _json(body, error.status)
    except web.HTTPException as error:
        kind = "NotFoundError" if error.status == 404 else "BadRequestError"
        return _json(error_body(error.reason, kind, None, error.status), error.status)


def _event(chunk: Json) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )
