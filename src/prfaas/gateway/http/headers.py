"""Headers of a client that mean something here; all others stay outside."""

from __future__ import annotations

import math
import re
import uuid
from dataclasses import dataclass

from aiohttp import web

from prfaas.errors import RequestError
from prfaas.units import NS_PER_S

TIMEOUT_HEADER = "X-Request-Timeout"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Return the time limit of a request.

    Attributes:
        seconds: From its arrival to its last byte.
    """

    seconds: float
    source: str


def request_id(request: web.Request) -> str:
    """The client's name for its request, or a new one."""
    wanted = request.headers.get("X-Request-Id", "")
    return wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex


def time_limit(request: web.Request, most_ns: int) -> TimeLimit:
    """The client's deadline, or the gateway's if that is earlier.

    Raises:
        RequestError: 400, the header is no positive number.
    """
    most = TimeLimit(most_ns / NS_PER_S, "gateway.request_timeout")
    text = request.headers.get(TIMEOUT_HEADER)
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
