"""Authorisation: every request passes here before its handler runs.

Three kinds of paths: open ones, those of clients (a tenant's key), and everything else, which is
the operators' (an operator's key, or this machine alone). A new route is the operators' unless it
is listed here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from time import monotonic_ns

from aiohttp import web

from prfaas.config.deployment import Deployment
from prfaas.config.tenants import OperatorRank, is_loopback, open_doors
from prfaas.core.admission.quotas import WrongKeys
from prfaas.core.facts import FactStream
from prfaas.core.request.facts import ChangeAsked, RequestRefused
from prfaas.errors import RequestError
from prfaas.gateway.console.routes import PAGE_PATHS
from prfaas.gateway.http.errors import RejectedError
from prfaas.gateway.routing.change_log import acting_operator
from prfaas.gateway.tenancy.tenants import ApiKeys, Tenant, Tenants

TENANT = web.RequestKey("tenant", Tenant)
"""Tenant of a client's request; set for every path of clients."""
OPERATOR = web.RequestKey("operator", bool)
"""True if the client of a public path has the access of operators."""
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/console", *PAGE_PATHS})
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
        self._operators = ApiKeys(deployment.operator_keys)
        self._ranks = {name: each.rank for name, each in deployment.operators.items()}
        self._is_local = is_loopback(table.listen)
        for warning in open_doors(
            table.listen,
            tenants=tenants.default is None,
            operator_keys=bool(self._operators),
            tls=table.tls is not None,
        ):
            _log.warning(warning)

    @web.middleware
    async def check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Pass a request, or answer 401 or 403; a change that no log takes is answered 503."""
        try:
            operator = self._check(request)
        except RequestError as error:
            raise self._refused(request, error) from None
        if not operator or request.method in _READS:
            return await handler(request)
        try:
            self._facts.may(ChangeAsked(operator))
        except RequestError as error:
            raise self._refused(request, error, operator) from None
        token = acting_operator.set(operator)
        try:
            return await handler(request)
        except RequestError as error:
            raise self._refused(request, error, operator) from error.__cause__
        finally:
            acting_operator.reset(token)
            await self._facts.kept()

    def _refused(
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
            request[OPERATOR] = self._is_operators(request)
            return ""
        if is_for_clients(path):
            tenant = self._tenants.of_key(key := _key(request))
            if tenant is None:
                raise _unauthorized(key, "an API key")
            request[TENANT] = tenant
            return ""
        return self._operator(request)

    def _is_operators(self, request: web.Request) -> bool:
        try:
            self._operator(request)
        except RequestError:
            return False
        return True

    def _operator(self, request: web.Request) -> str:
        key, host = _key(request), request.host
        if name := self._operators.owner(key):
            rank = self._ranks.get(name, OperatorRank.CHANGE)
            if rank is OperatorRank.CHANGE or _needed(request) in (rank, OperatorRank.METRICS):
                return name
            raise RequestError(
                f"operator {name} has the rank {rank.value!r}; this needs a key of an operator "
                f"with the rank {_needed(request).value!r}",
                status=403,
            )
        if self._tenants.default is None and self._tenants.of_key(key) is not None:
            raise RequestError("this is for operators; a tenant's key does not open it", status=403)
        if self._operators:
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


def _key(request: web.Request) -> str:
    """The key that a request shows; empty without one."""
    shown = request.headers.get("Authorization", "")
    is_bearer = shown[: len(_SCHEME)].lower() == _SCHEME
    return shown[len(_SCHEME) :].strip() if is_bearer else ""


def _unauthorized(key: str, wanted: str) -> RequestError:
    what = "the key is not known here" if key else "there is no key"
    return RequestError(f'{what}; send {wanted} as "Authorization: Bearer KEY"', status=401)
