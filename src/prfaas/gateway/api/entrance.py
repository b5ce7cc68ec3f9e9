"""Admission: limits of tenants, then a fair share of the gateway's slots."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import hdrs, web

from prfaas.core.admission.concurrency_slots import ConcurrencySlots
from prfaas.core.admission.quotas import Limit, Over, Quota, TokenBucket
from prfaas.gateway.api.auth import TENANT
from prfaas.gateway.http.errors import RejectedError, UnavailableError
from prfaas.gateway.openai.fields import bad
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.units import NS_PER_S
from prfaas.wire.plain_http import SERVER

GATEWAY_FULL = "gateway_full"
RETRY_FULL_S = 1
_log = logging.getLogger(__name__)
_WORDS = {
    Limit.REQUESTS: "{} requests per minute are allowed and have been used",
    Limit.TOKENS: "{} tokens per minute are allowed and have been used",
    Limit.IN_FLIGHT: "{} requests at once are allowed, counted by their prompts times n",
}


class AdmittedRequest:
    """A request that was admitted, with all its sequences."""

    def __init__(self, places: ConcurrencySlots, tenant: Tenant) -> None:
        self._places, self._tenant = places, tenant
        self.num_sequences = 1

    def widen(self, num_sequences: int) -> None:
        """Count a request by its sequences, once they are known.

        Args:
            num_sequences: Prompts times answers to each.

        Raises:
            RequestError: 400, it alone is over a limit.
            RejectedError: 429.
        """
        more, quota = num_sequences - self.num_sequences, self._tenant.quota
        if more <= 0:
            return
        allowed = quota.limits.requests_in_flight or self._places.num_places
        if num_sequences > min(allowed, self._places.num_places):
            raise bad(
                f"the request asks for {num_sequences} answers (prompts times n); at most "
                f"{min(allowed, self._places.num_places)} at once are allowed. Send fewer prompts "
                "in each request",
                "n",
            )
        over = quota.over_at_once(more)
        if over is not None:
            raise _over(over)
        if not self._places.enter(self._tenant.name, time.monotonic_ns(), more):
            raise _full(self._places)
        quota.widen(more)
        self.num_sequences = num_sequences


class RequestAdmission:
    """Admits requests."""

    def __init__(self, places: ConcurrencySlots) -> None:
        self._places = places
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_inside = 0
        self.is_leaving = False
        """True once load balancers are to send requests elsewhere; those that come are served."""
        self.is_closed = False

    async def leave(self, seconds: float) -> None:
        """Have load balancers notice before a request is refused, which takes them so long."""
        self.is_leaving = True
        _log.info("health answers 503; new requests are accepted for %g s", seconds)
        await asyncio.sleep(seconds)

    async def close(self, limit_s: float) -> None:
        """Stop admission, and wait until all requests have ended."""
        self.is_leaving = self.is_closed = True
        _log.info("no new requests are accepted; %d are running", self._num_inside)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._empty.wait()

    @contextmanager
    def enter(self, tenant: Tenant) -> Iterator[AdmittedRequest]:
        """A request is in for as long as the context is open.

        Raises:
            RejectedError: 429.
            UnavailableError: The gateway is about to stop.
        """
        if self.is_closed:
            raise UnavailableError("this gateway is about to stop; another one takes requests")
        now_ns = time.monotonic_ns()
        over = tenant.quota.over(now_ns)
        if over is not None:
            raise _over(over)
        if not self._places.enter(tenant.name, now_ns):
            raise _full(self._places)
        tenant.quota.enter(now_ns)
        entry = AdmittedRequest(self._places, tenant)
        self._num_inside += 1
        self._empty.clear()
        try:
            yield entry
        finally:
            tenant.quota.leave(entry.num_sequences)
            self._places.leave(entry.num_sequences)
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the server's name, and OpenAI's headers with the remaining limits, to an answer.

        Once the gateway is about to stop, it is the last one of its connection.
        """
        response.headers[hdrs.SERVER] = SERVER
        if (tenant := request.get(TENANT)) is not None:
            response.headers.update(limit_headers(tenant.quota, time.monotonic_ns()))
        if self.is_leaving:
            response.force_close()
            response.headers["Connection"] = "close"


def limit_headers(quota: Quota, now_ns: int) -> dict[str, str]:
    """`x-ratelimit-*` for the limits that there are."""
    headers: dict[str, str] = {}
    for what, bucket in (("requests", quota.requests), ("tokens", quota.tokens)):
        if bucket is not None:
            headers |= _headers(what, bucket, now_ns)
    return headers


def _headers(what: str, bucket: TokenBucket, now_ns: int) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(bucket.units),
        f"x-ratelimit-remaining-{what}": str(bucket.left(now_ns)),
        f"x-ratelimit-reset-{what}": f"{bucket.full_in_ns(now_ns) / NS_PER_S:.3f}s",
    }


def _full(places: ConcurrencySlots) -> RejectedError:
    return RejectedError(
        f"the gateway serves {places.num_taken} of at most {places.num_places} requests, counted "
        "by their prompts times n, and shares what is left between its tenants; try again in "
        f"{RETRY_FULL_S} s",
        GATEWAY_FULL,
        RETRY_FULL_S,
    )


def _over(over: Over) -> RejectedError:
    retry_s = max(1, -(-over.retry_after_ns // NS_PER_S))
    used = _WORDS[over.limit].format(over.allowed)
    return RejectedError(f"{used}; try again in {retry_s} s", over.limit.value, retry_s)
