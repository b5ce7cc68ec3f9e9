"""Bodies of requests: read, and parsed without stopping everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from prfaas.errors import RequestError

BIG_BYTES = 256 * 1024
"""A body up to this is parsed in a millisecond or two: waking a thread is not worth it."""
T = TypeVar("T")


async def read_body(request: web.Request) -> bytes:
    """The body of a request.

    Raises:
        RequestError: 400, it is not encoded as it says.
        web.HTTPException: 413, it is larger than allowed.
    """
    try:
        return await request.read()
    except web.RequestPayloadError:
        raise RequestError(
            "the request body can not be read as its Content-Encoding says"
        ) from None


async def read(request: web.Request, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of the body of a request; of a large one on another thread.

    Raises:
        RequestError: 400, it is not encoded as it says, or `parse` refuses it.
        web.HTTPException: 413, it is larger than allowed.
    """
    data = await read_body(request)
    if len(data) <= BIG_BYTES:
        return parse(data)
    return await asyncio.to_thread(parse, data)
