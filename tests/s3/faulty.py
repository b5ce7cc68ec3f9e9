"""An HTTP proxy that does to answers of an S3 server what servers and networks do."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

import aiohttp
from aiohttp import web
from yarl import URL

from prfaas.wire.plain_http import listen

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}
_RESET = struct.pack("ii", 1, 0)


class Fault(StrEnum):
    """Fault of an answer."""

    ERRORS = "errors"
    """Status 500."""
    BUSY = "busy"
    """Status 503, slow down."""
    SLOW = "slow"
    """The answer comes long after every deadline."""
    BLACKHOLE = "blackhole"
    """No answer at all."""
    RESET = "reset"
    """The connection is reset in place of an answer."""
    CUT = "cut"
    """The connection ends in the middle of the body."""
    TRUNCATED = "truncated"
    """The body lacks its end, and says so in its length."""
    ALTERED = "altered"
    """A bit of the body is another one."""
    LIES = "lies"
    """Success, and nothing was done: for requests that delete objects."""


SLOW_S = 60.0


class FaultyS3:
    """The proxy.

    Attributes:
        fault: What happens to requests; None passes them on.
        methods: The requests that it happens to; those for lists are `LIST`.
        faults_left: How many more faults happen; None is no limit.
        requests: Number of requests by method.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.fault: Fault | None = None
        self.methods = frozenset({"GET", "LIST", "PUT", "POST", "DELETE"})
        self.faults_left: int | None = None
        self.requests: Counter[str] = Counter()
        self.port = 0
        self._http: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Endpoint of the server."""
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FaultyS3]:
        """Serve on a free port."""
        app = web.Application(client_max_size=128 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        listener = await listen(runner, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        async with aiohttp.ClientSession(auto_decompress=False) as self._http:
            yield self
            listener.close()
            await runner.cleanup()
            await asyncio.sleep(0)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        method = "LIST" if "list-type" in request.query else request.method
        self.requests[method] += 1
        fault = self.fault if method in self.methods and self.faults_left != 0 else None
        if fault and self.faults_left is not None:
            self.faults_left -= 1
        match fault:
            case Fault.ERRORS:
                return web.Response(status=500)
            case Fault.BUSY:
                return web.Response(status=503)
            case Fault.SLOW | Fault.BLACKHOLE:
                await asyncio.sleep(SLOW_S)
            case Fault.RESET:
                return _reset(request)
            case Fault.LIES:
                keys = re.findall(r"<Key>[^<]*</Key>", (await request.read()).decode())
                done = "".join(f"<Deleted>{key}</Deleted>" for key in keys)
                return web.Response(text=f"<DeleteResult>{done}</DeleteResult>")
        return await self._passed_on(request, fault)

    async def _passed_on(self, request: web.Request, fault: Fault | None) -> web.StreamResponse:
        assert self._http is not None
        url = URL(f"http://127.0.0.1:{self._target}{request.raw_path}", encoded=True)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        body = io.BytesIO(await request.read())
        async with self._http.request(request.method, url, headers=headers, data=body) as reply:
            data = await reply.read()
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
            status = reply.status
        if fault is Fault.ALTERED and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if fault is Fault.TRUNCATED:
            data = data[: len(data) // 2]
        if fault is not Fault.CUT or len(data) < 2:
            return web.Response(status=status, headers=kept, body=data)
        answer = web.StreamResponse(status=status, headers=kept)
        answer.content_length = len(data)
        await answer.prepare(request)
        await answer.write(data[: len(data) // 2])
        return _reset(request, answer)


def _reset(request: web.Request, answer: web.StreamResponse | None = None) -> web.StreamResponse:
    transport = request.transport
    if transport is not None:
        with contextlib.suppress(OSError):
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()
    return answer or web.Response()
