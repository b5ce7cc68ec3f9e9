"""Request bodies within limits; large bodies are parsed without blocking other requests.

A compressed body is inflated here, once its request has been admitted, on another thread, and no
further than a body may be long.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from typing import TypeVar

from aiohttp import hdrs, web

from prfaas.errors import RequestError

BODY_TIMEOUT_S = web.AppKey("body_timeout_s", float)
"""Time limit for a request body, during which it holds one of the gateway's places."""
BIG_BYTES = 256 * 1024
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
    try:
        async with asyncio.timeout(timeout_s) as limit:
            data = await request.read()
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestError(
            f"the request body did not arrive within {timeout_s:g} s; send it faster", status=408
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(most) from None
    except web.RequestPayloadError:
        raise RequestError("the request body ends too early, or is no chunked one") from None
    if coding == "identity" or not data:
        return data
    try:
        return await asyncio.to_thread(_inflated, data, coding, most)
    except zlib.error:
        raise RequestError("the request body does not match its Content-Encoding") from None


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
