"""Admission: every request is authorised here before its handler runs, and a client's request is
held to the limits of its tenant and a fair share of the gateway's slots.

Three kinds of paths: open ones, those of clients (a tenant's key), and everything else, which is
the operators' (an operator's key, or this machine alone). A new route is the operators' unless it
is listed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns

from aiohttp import hdrs, web

from prfaas.config.deployment import Deployment
from prfaas.config.tenants import OperatorRank, is_loopback, open_doors
from prfaas.core.admission.concurrency_slots import ConcurrencySlots
from prfaas.core.admission.quotas import Limit, Over, Quota, TokenBucket, WrongKeys
from prfaas.core.facts import FactStream
from prfaas.core.request.facts import ChangeAsked, RequestRefused
from prfaas.errors import RequestError
from prfaas.gateway.console.routes import PAGE_PATHS
from prfaas.gateway.http.errors import RejectedError, UnavailableError
from prfaas.gateway.openai.fields import bad
from prfaas.gateway.routing.change_log import acting_operator
from prfaas.gateway.tenancy.tenants import ApiKeys, Tenant, Tenants
from prfaas.units import NS_PER_S
from prfaas.wire.plain_http import SERVER

TENANT = web.RequestKey("tenant", Tenant)
"""Tenant of a client's request; set for every path of clients."""
OPERATOR = web.RequestKey("operator", str)
"""Name of the operator who asks for a public path; empty for others."""
SESSION_PATH = "/console/api/session"
"""Signing in, which checks the key itself."""
OPENAPI_PATH = "/openapi.json"
OPEN_PATHS = frozenset(
    {"/health", "/ping", "/version", OPENAPI_PATH, "/console", SESSION_PATH, *PAGE_PATHS}
)
"""Public paths; the console's page has no data without an operator key."""
CLIENT_PATHS = frozenset({"/tokenize", "/detokenize"})
CLIENT_PREFIX = "/v1/"
QUESTIONS = frozenset({"/kv/lookup", "/console/api/what-if"})
"""Paths of operators whose POST requests change nothing."""
WITHOUT_KEY = "without_key"
"""Name of operators where no key is required."""
_READS = ("GET", "HEAD")
_SCHEME = "bearer "
_LOCAL_HOST = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_log = logging.getLogger(__name__)


class Access:
    """The rules. Refusals are reported; a change is asked for, and on record before its answer."""

    def __init__(
        self,
        deployment: Deployment,
        tenants: Tenants,
        facts: FactStream,
    ) -> None:
        table = deployment.gateway
        self._tenants, self._facts, self._wrong_keys = tenants, facts, WrongKeys()
        self.operators = ApiKeys(deployment.operator_keys)
        self.session_key: Callable[[web.Request], str] = lambda _: ""
        """Returns the hash of the key that the session of a request's browser was begun with, or
        nothing; RequestError if the page of another site sent it."""
        self._ranks = {name: each.rank for name, each in deployment.operators.items()}
        self._is_local = is_loopback(table.listen)
        for warning in open_doors(
            table.listen,
            tenants=tenants.default is None,
            operator_keys=bool(self.operators),
            tls=table.tls is not None,
        ):
            _log.warning(warning)

    @web.middleware
    def check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Awaitable[web.StreamResponse]:
        """Pass a request, or answer 401 or 403; a change that no log takes is answered 503."""
        try:
            operator = self._check(request)
        except RequestError as error:
            raise self.refused(request, error) from None
        if not operator or request.method in _READS:
            return handler(request)
        return self._change(request, handler, operator)

    async def _change(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
        operator: str,
    ) -> web.StreamResponse:
        try:
            self._facts.may(ChangeAsked(operator))
        except RequestError as error:
            raise self.refused(request, error, operator) from None
        token = acting_operator.set(operator)
        try:
            return await handler(request)
        except RequestError as error:
            raise self.refused(request, error, operator) from error.__cause__
        finally:
            acting_operator.reset(token)
            await self._facts.kept()

    def may_go_on(self, request: web.Request) -> bool:
        """Return True while the key, or the session, of an open stream would open it again."""
        return bool(self._operator_or_nobody(request))

    def rank(self, operator: str) -> OperatorRank:
        """Return the rank of an operator, by the name of the key."""
        return self._ranks.get(operator, OperatorRank.CHANGE)

    def refused(
        self, request: web.Request, error: RequestError, operator: str = ""
    ) -> RequestError:
        """Report a refusal; of the request only its method, route and address."""
        resource = getattr(request.match_info.route, "resource", None)
        route = str(resource.canonical) if resource is not None else ""
        address = request.remote or ""
        fact = RequestRefused(request.method[:16], route, error.status, address, operator)
        self._facts.report(fact)
        return error

    def _check(self, request: web.Request) -> str:
        """Return the name of the operator; empty for clients."""
        path = request.path
        if path in OPEN_PATHS:
            request[OPERATOR] = self._operator_or_nobody(request)
            return ""
        if is_for_clients(path):
            tenant = self._tenants.of_key(key := shown_key(request))
            if tenant is None:
                raise _unauthorized(key, "an API key")
            request[TENANT] = tenant
            return ""
        return self._operator(request)

    def _operator_or_nobody(self, request: web.Request) -> str:
        try:
            return self._operator(request)
        except RequestError:
            return ""

    def _operator(self, request: web.Request) -> str:
        key, host = shown_key(request), request.host
        name = self.operators.owner(key)
        if name is None and not key and self.operators:
            name = self.operators.owner_of(self.session_key(request))
        if name:
            rank = self.rank(name)
            if rank is OperatorRank.CHANGE or _needed(request) in (rank, OperatorRank.METRICS):
                return name
            raise RequestError(
                f"operator {name} has the rank {rank.value!r}; this needs a key of an operator "
                f"with the rank {_needed(request).value!r}",
                status=403,
            )
        if self._tenants.default is None and self._tenants.of_key(key) is not None:
            raise RequestError("this is for operators; a tenant's key does not open it", status=403)
        if self.operators:
            if key and (wait_s := self._wrong_keys.wrong(request.remote or "", monotonic_ns())):
                raise RejectedError("too many wrong operator keys", "wrong_keys", wait_s)
            raise _unauthorized(key, "an operator's key")
        if self._tenants.default is None and not self._is_local:
            raise RequestError(
                "this is for operators, and gateway.operator_keys names no key", status=401
            )
        if self._is_local and not _LOCAL_HOST.fullmatch(host):
            # The name of a web page elsewhere may lead here; its scripts send that name.
            raise RequestError(
                f"without gateway.operator_keys this answers to 127.0.0.1 and localhost, not to "
                f"{host[:80]!r}; ask for it by one of these, or set a key",
                status=403,
            )
        return WITHOUT_KEY


def _needed(request: web.Request) -> OperatorRank:
    """The lowest rank that may send a request. A new route that is not read needs the highest."""
    is_read = request.method in _READS
    if is_read and request.path == "/metrics":
        return OperatorRank.METRICS
    is_question = request.method == "POST" and request.path in QUESTIONS
    return OperatorRank.VIEW if is_read or is_question else OperatorRank.CHANGE


def is_for_clients(path: str) -> bool:
    """Return True for a path that a tenant's key opens."""
    return path in CLIENT_PATHS or path.startswith(CLIENT_PREFIX)


def shown_key(request: web.Request) -> str:
    """The key that a request shows; empty without one."""
    shown = request.headers.get("Authorization", "")
    is_bearer = shown[: len(_SCHEME)].lower() == _SCHEME
    return shown[len(_SCHEME) :].strip() if is_bearer else ""


def _unauthorized(key: str, wanted: str) -> RequestError:
    what = "the key is not known here" if key else "there is no key"
    return RequestError(f'{what}; send {wanted} as "Authorization: Bearer KEY"', status=401)


GATEWAY_FULL = "gateway_full"
RETRY_FULL_S = 1
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
        """Add the headers of all answers to an answer."""
        response.headers.update(self.headers(request.get(TENANT)))
        if self.is_leaving:
            response.force_close()

    def headers(self, tenant: Tenant | None) -> dict[str, str]:
        """Return the server's name, and OpenAI's headers with the remaining limits of a tenant.

        Once the gateway is about to stop, an answer is the last one of its connection.
        """
        headers: dict[str, str] = {hdrs.SERVER: SERVER}
        if tenant is not None:
            headers |= limit_headers(tenant.quota, time.monotonic_ns())
        return headers | {hdrs.CONNECTION: "close"} if self.is_leaving else headers


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
