"""Request bodies within limits, headers and origins; large bodies block no other requests.

A compressed body is inflated here, once its request has been admitted, on another thread, and no
further than a body may be long.

Headers that mean nothing here stay outside. Web pages of other origins (CORS) may use the paths of
clients if the operator lists them.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import hdrs, web

from prfaas.errors import RequestError
from prfaas.units import NS_PER_S

TIMEOUT_HEADER = "X-Request-Timeout"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Return the time limit of a request."""

    seconds: float
    """From its arrival to its last byte."""
    source: str


def request_id(request: web.Request) -> str:
    """The client's name for its request, or a new one."""
    wanted = request.headers.get("X-Request-Id", "")
    return wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex


def time_limit(headers: Mapping[str, str], most_ns: int) -> TimeLimit:
    """The client's deadline, or the gateway's if that is earlier; RequestError (400) if the header
    is no positive number."""
    most = TimeLimit(most_ns / NS_PER_S, "gateway.request_timeout")
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return most
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(
            f"{TIMEOUT_HEADER} must be a positive number of seconds, got {text[:20]!r}",
            param=TIMEOUT_HEADER,
        )
    return most if seconds >= most.seconds else TimeLimit(seconds, TIMEOUT_HEADER)


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
    def check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Awaitable[web.StreamResponse]:
        """Pass a request, or answer the question before it, which has no key.

        No coroutine: one of each open stream would wait in it.
        """
        origin = request.headers.get(hdrs.ORIGIN)
        asks = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if origin is None or request.method != hdrs.METH_OPTIONS or not asks:
            return handler(request)
        return self._answer(request, origin)

    async def _answer(self, request: web.Request, origin: str) -> web.Response:
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


BODY_TIMEOUT_S = web.AppKey("body_timeout_s", float)
"""Time limit for a request body, during which it holds one of the gateway's places."""
KEEPS_BODY = web.AppKey("keeps_body", bool)
"""True where requests are handed on after they were read."""
BIG_BYTES = 1_000_000
"""A body up to this is parsed in a millisecond or two: waking a thread is not worth it."""
DIGITS_MAX = 16
_CODINGS = {
    "identity": 0,
    "gzip": 16 + zlib.MAX_WBITS,
    "x-gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}
"""Supported encodings of a body, and how `zlib` calls them."""
_JSON = re.compile(r"application/(json|octet-stream|[\w.+-]+\+json)", re.ASCII)
"""Types of bodies that are taken for JSON. No web page can send one without asking first (CORS)."""
T = TypeVar("T")


async def read_body(request: web.Request) -> bytes:
    """The body of a request.

    Raises:
        RequestError: 400, its Content-Encoding is invalid; 408, it does not arrive; 413, it is
            larger than allowed; 415, its Content-Encoding is not supported.
    """
    most, said = request.client_max_size, request.content_length
    coding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if coding not in _CODINGS:
        raise RequestError(
            f"Content-Encoding {coding[:40]!r} is not supported; send one of {', '.join(_CODINGS)}",
            status=415,
        )
    if said is not None and said > most:
        raise _too_large(most)
    timeout_s = request.config_dict[BODY_TIMEOUT_S]
    limit = asyncio.timeout(timeout_s)
    try:
        if request.content.is_eof():
            data = await _received(request, most)
        else:
            async with limit:
                data = await _received(request, most)
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestError(
            f"the request body did not arrive within {timeout_s:g} s; send it faster", status=408
        ) from None
    except web.RequestPayloadError:
        raise RequestError("the request body ends too early, or is no chunked one") from None
    if coding == "identity" or not data:
        return data
    try:
        return await asyncio.to_thread(_inflated, data, coding, most)
    except zlib.error:
        raise RequestError("the request body does not match its Content-Encoding") from None


async def _received(request: web.Request, bytes_max: int) -> bytes:
    """All of a body; `request.read()` would keep it for as long as the request runs."""
    if request.config_dict.get(KEEPS_BODY, False):
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(bytes_max) from None
    parts, num_bytes = [], 0
    async for part in request.content.iter_any():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > bytes_max:
            raise _too_large(bytes_max)
    return b"".join(parts)


def _inflated(data: bytes, coding: str, bytes_max: int) -> bytes:
    """A compressed body.

    Raises:
        RequestError: 413, it has more than `bytes_max` bytes.
        zlib.error: It is invalid.
    """
    bits = _CODINGS[coding]
    if coding == "deflate" and data[0] & 0xF != zlib.DEFLATED:
        bits = -bits  # Some clients leave out the header.
    inflater = zlib.decompressobj(bits)
    body = inflater.decompress(data, bytes_max + 1)
    if len(body) > bytes_max:
        raise _too_large(bytes_max)
    if not inflater.eof:
        raise zlib.error("the end is missing")
    return body


def _too_large(bytes_max: int) -> RequestError:
    return RequestError(
        f"the body has more than {bytes_max} bytes, the limit that gateway.body_bytes_max sets; "
        "send less, or have the operator raise it",
        status=413,
    )


async def read_small(request: web.Request, bytes_max: int) -> bytes:
    """The body of a request that has no reason to be large.

    Raises:
        RequestError: 413, it has more than `bytes_max` bytes; 408, it does not come.
    """
    said = request.content_length or 0
    data = b"" if said > bytes_max else await read_body(request)
    if max(said, len(data)) > bytes_max:
        raise RequestError(f"the body has more than {bytes_max} bytes", status=413)
    return data


async def read(request: web.Request, parse: Callable[[bytes], T]) -> T:
    """Return the result of `parse` for the body of a request; for a large one on another thread.

    Raises:
        RequestError: 415, it is not JSON by its Content-Type; 400, `parse` refuses it; and those of
            `read_body`.
    """
    if hdrs.CONTENT_TYPE in request.headers and not _JSON.fullmatch(request.content_type):
        raise RequestError(
            f"Content-Type {request.content_type[:40]!r} is not supported; send application/json",
            status=415,
        )
    data = await read_body(request)
    if len(data) <= BIG_BYTES:
        return parse(data)
    return await asyncio.to_thread(parse, data)


def query_number(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """A whole number of a request's query, or `default` if absent.

    Raises:
        RequestError: 400, it is not a whole number, or not from `low` to `high`.
    """
    text = request.query.get(name, str(default))
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX else -1
    if not low <= value <= high:
        raise RequestError(
            f"{name} must be between {low} and {high}, got {text[:20]!r}", param=name
        )
    return value
