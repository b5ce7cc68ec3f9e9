"""Request bodies within limits; large bodies are parsed without blocking other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from prfaas.errors import RequestError

BODY_TIMEOUT_S = web.AppKey("body_timeout_s", float)
"""Time limit for a request body, during which it holds one of the gateway's places."""
BIG_BYTES = 256 * 1024
"""A body up to this is parsed in a millisecond or two: waking a thread is not worth it."""
DIGITS_MAX = 16
T = TypeVar("T")


async def read_body(request: web.Request) -> bytes:
    """The body of a request.

    Raises:
        RequestError: 400, its Content-Encoding is invalid; 408, it does not arrive.
        web.HTTPException: 413, it is larger than allowed.
    """
    most, said = request.client_max_size, request.content_length
    if said is not None and said > most:
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=said)
    timeout_s = request.config_dict[BODY_TIMEOUT_S]
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await request.read()
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestError(
            f"the request body did not arrive within {timeout_s:g} s; send it faster", status=408
        ) from None
    except web.RequestPayloadError:
        raise RequestError("the request body does not match its Content-Encoding") from None


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
        RequestError: 408, it does not arrive; 400, its Content-Encoding is invalid, or `parse`
            refuses it.
        web.HTTPException: 413, it is larger than allowed.
    """
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
