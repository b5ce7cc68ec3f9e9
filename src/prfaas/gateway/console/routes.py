"""The console's addresses: the built page, a stream of what happens, the last hour."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from aiohttp import web

from prfaas.errors import RequestError
from prfaas.gateway.console.history import SAMPLES_MAX, LiveState
from prfaas.gateway.console.state import ConsoleReader
from prfaas.gateway.http.request_body import query_number
from prfaas.gateway.http.responses import STREAM_HEADERS, encode_event, json_response
from prfaas.tasks import cancel_all

PAGE = "index.html"
PAGE_PATHS = frozenset(
    f"/console/{name}" for name in ("", "console.js", "console.css", "learn.html")
)
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_INLINE = re.compile(rb"<(script type=.module.|style)>(.*?)</(?:script|style)>", re.DOTALL)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    content_type: str
    """Without the charset, which is UTF-8."""
    body: bytes
    packed: bytes
    etag: str
    policy: str
    """Its Content-Security-Policy."""

    def response(self, request: web.Request) -> web.Response:
        """Answer a request for it; 304 where the browser has it already."""
        headers = {**_HEADERS, "Content-Security-Policy": self.policy, "ETag": self.etag}
        if request.headers.get("If-None-Match") == self.etag:
            return web.Response(status=304, headers=headers)
        body = self.body
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = self.packed, "gzip"
        return web.Response(
            body=body, headers=headers, content_type=self.content_type, charset="utf-8"
        )


@cache
def assets() -> dict[str, Asset]:
    """All files by name; `index.html` is the page."""
    folder = resources.files("prfaas.gateway.console").joinpath("assets")
    found = {}
    for entry in folder.iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            packed = gzip.compress(body, 9, mtime=0)
            found[entry.name] = Asset(_TYPES[suffix], body, packed, etag, _policy(body))
    return found


def _policy(body: bytes) -> str:
    """The Content-Security-Policy of a file: of inline scripts and styles, only its own may run."""
    own = {b"script": "'self'", b"style": "'self'"}
    for tag, text in _INLINE.findall(body):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        own[tag.split()[0]] += f" 'sha256-{digest}'"
    return (
        f"default-src 'none'; script-src {own[b'script']}; style-src {own[b'style']}; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


class Console:
    """The console of one gateway."""

    def __init__(
        self,
        parts: ConsoleReader,
        pages_max: int,
        interval_s: float,
        may: Callable[[web.Request], bool],
    ) -> None:
        self._parts, self._pages_max, self._interval_s = parts, pages_max, interval_s
        self._may = may
        self.history = parts.history
        self._live = LiveState(lambda: encode_event(parts.state()))
        self._control_ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take samples."""
        self._control_ticker = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Stop."""
        if self._control_ticker is not None:
            await cancel_all([self._control_ticker])

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/console", _to_page)
        router.add_get("/console/", _file)
        router.add_get("/console/api/state", self._state)
        router.add_get("/console/api/events", self._events)
        router.add_get("/console/api/history", self._last_hour)
        router.add_get("/console/{name}", _file)

    async def _beat(self) -> None:
        while True:
            self.history.add(self._parts.sample())
            self._live.beat()
            await asyncio.sleep(self._interval_s)

    async def _state(self, _: web.Request) -> web.Response:
        return json_response(self._parts.state())

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """The state, once a second; all pages get the same reading."""
        if self._live.num_followers >= self._pages_max:
            raise RequestError(
                f"{self._pages_max} consoles are open, which is the limit; close one", status=429
            )
        with self._live.following(), contextlib.suppress(ConnectionResetError):
            response, number = web.StreamResponse(headers=STREAM_HEADERS), 0
            await response.prepare(request)
            while self._may(request):
                number, event = await self._live.after(number)
                await response.write(event)
        return response

    async def _last_hour(self, request: web.Request) -> web.Response:
        """Samples of the last `seconds`; an hour without it."""
        seconds = query_number(request, "seconds", SAMPLES_MAX, 1, SAMPLES_MAX)
        samples = self.history.since(time.time() - seconds)
        response = json_response(
            {"interval_s": self._interval_s, "samples": [each.as_json() for each in samples]}
        )
        response.enable_compression()
        return response


async def _to_page(_: web.Request) -> web.Response:
    return web.Response(status=308, headers={"Location": "/console/"})


async def _file(request: web.Request) -> web.Response:
    found = assets().get(request.match_info.get("name", PAGE))
    if found is None:
        raise web.HTTPNotFound
    return found.response(request)
