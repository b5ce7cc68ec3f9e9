"""HTTP connections to engines: one request on each at a time, kept between requests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import aiohttp

from prfaas.gateway.engines.engine import Engine, EngineUnreachableError
from prfaas.gateway.http.json_codec import JsonObject, to_json
from prfaas.wire.plain_http import EngineResponse
from prfaas.wire.sockets import request_socket

KEEPALIVE_S = 3.0
"""Below the 5 s after which uvicorn closes an idle connection under our hands."""

READ_OUT_S = 1.0
"""Time limit of data after the end mark of an answer before the connection is closed."""


class EngineConnections:
    """The connections of a process to its engines.

    Args:
        tls: For engines behind https.
        connect_s: Time limit of a connection, seconds.
    """

    def __init__(self, tls: ssl.SSLContext, connect_s: float) -> None:
        self._tls, self._connect_s = tls, connect_s
        self.by_name: dict[str, Engine] = {}
        self.num_decoding = 0
        """Engines of PD clusters, up or down."""
        self._session: aiohttp.ClientSession | None = None
        self._ending: dict[aiohttp.ClientResponse, asyncio.TimerHandle] = {}
        """Answers whose end mark has come and whose end has not."""

    def start_session(self) -> aiohttp.ClientSession:
        """Begin to make connections."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEPALIVE_S,
                ssl=self._tls,
                socket_factory=request_socket,
            ),
            response_class=EngineResponse,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        for response in list(self._ending):
            self._release(response)
        if self._session is not None:
            await self._session.close()

    def post(
        self, engine: Engine, path: str, body: JsonObject, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Run one leg. Leaving with an error, or once the caller has closed the answer, closes the
        connection, which makes the engine abort.

        Raises:
            EngineUnreachableError: There was no connection or no answer.
        """
        return self._kept(self.open(engine, path, body, headers))

    @asynccontextmanager
    async def _kept(
        self, opening: Awaitable[aiohttp.ClientResponse]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        response = await opening
        try:
            yield response
        except BaseException:
            response.close()
            raise
        self.keep(response)

    async def open(
        self, engine: Engine, path: str, body: JsonObject, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Post a request, and return the head of the answer; EngineUnreachableError without one."""
        rank = {} if engine.rank is None else {"X-data-parallel-rank": str(engine.rank)}
        try:
            return await self._http.post(
                engine.url + path,
                data=to_json(body),
                headers={"Content-Type": "application/json", **headers, **rank},
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            reason = f"{type(error).__name__}: {error}"
            took_it = not isinstance(error, aiohttp.ClientConnectorError)
            raise EngineUnreachableError(
                f"engine {engine.name}: {reason}", had_request=took_it, reason=reason
            ) from None

    def keep(self, response: aiohttp.ClientResponse) -> None:
        """Use a connection again once its answer ends, which it does soon behind the end mark."""
        if not response.closed:
            loop = asyncio.get_running_loop()
            self._ending[response] = loop.call_later(READ_OUT_S, self._release, response)
            response.content.on_eof(partial(self._release, response))

    def _release(self, response: aiohttp.ClientResponse) -> None:
        """Give a connection back; one whose answer has not ended is closed."""
        if (timer := self._ending.pop(response, None)) is not None:
            timer.cancel()
            response.release()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the engines were not started")
        return self._session
