"""The built page, held in memory, compressed once."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from aiohttp import web

PAGE = "index.html"
PAGE_PATHS = frozenset({"/console/", "/console/console.js", "/console/console.css"})
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page.

    Attributes:
        content_type: Without the charset, which is UTF-8.
    """

    content_type: str
    body: bytes
    packed: bytes
    etag: str

    def response(self, request: web.Request) -> web.Response:
        """Answer a request for it; 304 where the browser has it already."""
        headers = {**_HEADERS, "ETag": self.etag}
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
            found[entry.name] = Asset(_TYPES[suffix], body, gzip.compress(body, 9, mtime=0), etag)
    return found
