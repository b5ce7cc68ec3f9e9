"""Web pages of other origins (CORS): those that the operator lists may use the paths of clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from aiohttp import hdrs, web

from prfaas.errors import RequestError

ANY = "*"
_METHODS = "GET, POST, OPTIONS"
_AGE_S = "600"
_EXPOSED = "X-Request-Id, X-Prfaas-Path, X-Prfaas-Reason, X-Prfaas-Fallback, Retry-After"


class Origins:
    """Answers the question that a browser asks before a request, and marks answers for it.

    Args:
        listed: Origins as browsers name them, or `*` for all.
        is_clients: Returns True for a path of clients; pages never use those of operators.
    """

    def __init__(self, listed: Collection[str], is_clients: Callable[[str], bool]) -> None:
        self._listed, self._is_clients = frozenset(listed), is_clients

    @web.middleware
    async def check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Pass a request, or answer the question before it, which has no key."""
        origin = request.headers.get(hdrs.ORIGIN)
        asks = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if origin is None or request.method != hdrs.METH_OPTIONS or not asks:
            return await handler(request)
        if not self._takes(request, origin):
            raise RequestError(
                f"pages of {origin[:80]!r} may not ask for {request.path[:80]}: "
                "gateway.allowed_origins lists those that may use the paths of clients",
                status=403,
            )
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted,
            hdrs.ACCESS_CONTROL_MAX_AGE: _AGE_S,
        }
        return web.Response(status=204, headers=headers)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page of a listed origin read an answer."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self._listed:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self._takes(request, origin):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    def _takes(self, request: web.Request, origin: str) -> bool:
        is_listed = origin in self._listed or ANY in self._listed
        return is_listed and self._is_clients(request.path)
