"""HTTP requests that a worker hands on to the decider as they are, and their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import aiohttp
from aiohttp import hdrs, web

from prfaas.gateway.http.errors import UnavailableError

CLIENT_HEADER = "X-Prfaas-Client"
"""Scheme and address of a client; from a client it is left out."""
DECIDER = "http://decider"
_PER_HOP = frozenset(
    name.lower()
    for name in (
        *(hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.PROXY_AUTHENTICATE, hdrs.PROXY_AUTHORIZATION),
        *(hdrs.TE, hdrs.TRAILER, hdrs.TRANSFER_ENCODING, hdrs.UPGRADE, hdrs.EXPECT),
        CLIENT_HEADER,
    )
)
_BODILESS = (204, 304)


@web.middleware
async def behind(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Makes a request that a worker hands on its client's."""
    scheme, _, address = request.headers.get(CLIENT_HEADER, "").partition(" ")
    return await handler(request.clone(scheme=scheme or "http", remote=address))


class HandingOn:
    """Hands requests on.

    Args:
        path: Socket of the decider.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Begin to make connections."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._path), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING),
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def hand_on(self, request: web.Request) -> web.StreamResponse:
        """Return the decider's answer, which has been sent.

        Raises:
            UnavailableError: The decider does not answer.
        """
        if self._session is None:
            raise RuntimeError("the worker was not started")
        headers = [(name, value) for name, value in _kept(request.headers.items())]
        headers.append((CLIENT_HEADER, f"{request.scheme} {request.remote or ''}"))
        # What was read is kept by the request; anything else streams through.
        body = await request.read() if request.content.is_eof() else request.content
        try:
            async with self._session.request(
                request.method,
                DECIDER + request.rel_url.raw_path_qs,
                headers=headers,
                data=body or None,
                skip_auto_headers=(hdrs.CONTENT_TYPE,),
                allow_redirects=False,
            ) as answer:
                return await _relayed(request, answer)
        except aiohttp.ClientError as error:
            raise UnavailableError(
                f"the deciding process of the gateway does not answer: {type(error).__name__}; "
                "try again"
            ) from None


async def _relayed(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in _kept(answer.headers.items()):
        response.headers.add(name, value)
    if answer.headers.get(hdrs.CONNECTION, "").lower() == "close":
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"
    await response.prepare(request)
    if request.method != hdrs.METH_HEAD and answer.status not in _BODILESS:
        async for part in answer.content.iter_any():
            await response.write(part)
    await response.write_eof()
    return response


def _kept(headers: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    return ((name, value) for name, value in headers if name.lower() not in _PER_HOP)
