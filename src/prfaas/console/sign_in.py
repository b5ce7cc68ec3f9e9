"""Signing in to the console: an operator's key against a cookie that scripts do not see.

A session of a browser stands for the key and does not hold it.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Annotated

import msgspec
from aiohttp import hdrs, web

from prfaas.config.tenants import OperatorRank
from prfaas.core.admission.quotas import WrongKeys
from prfaas.errors import RequestError
from prfaas.gateway.api.auth import OPERATOR, SESSION_PATH, WITHOUT_KEY, Access
from prfaas.gateway.api.operator_api import json_body
from prfaas.gateway.http.errors import RejectedError
from prfaas.gateway.http.responses import json_response
from prfaas.gateway.tenancy.tenants import KEY_CHARS_MAX, key_hash
from prfaas.logs import log_event
from prfaas.units import NS_PER_S

ID_BYTES = 32
"""Random bytes of a session's id."""
ID_CHARS_MAX = 64
PER_KEY_MAX = 16
"""BrowserSessions of one key; a further one ends the oldest."""
AGE_MAX_NS = 12 * 3600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """One browser that has signed in."""

    key_hash: str
    """Of its operator's key, as in the deployment file."""
    until_ns: int
    """Instant at which it ends."""


class BrowserSessions:
    """The sessions of one gateway. A restart ends all.

    Only the hash of an id is kept, so the time of a lookup tells nothing about ids.
    """

    def __init__(self, age_max_ns: int = AGE_MAX_NS) -> None:
        self._age_max_ns = age_max_ns
        self._by_id: dict[bytes, BrowserSession] = {}

    def begin(self, key_hash: str, now_ns: int) -> str:
        """Begin one, and return its id, which is secret."""
        self._by_id = {i: each for i, each in self._by_id.items() if each.until_ns > now_ns}
        same = [name for name, each in self._by_id.items() if each.key_hash == key_hash]
        for name in same[: max(len(same) - PER_KEY_MAX + 1, 0)]:
            del self._by_id[name]
        session_id = secrets.token_urlsafe(ID_BYTES)
        self._by_id[_digest(session_id)] = BrowserSession(key_hash, now_ns + self._age_max_ns)
        return session_id

    def key_hash(self, session_id: str, now_ns: int) -> str:
        """Return the hash of the key that a session stands for; empty if there is none."""
        if not session_id or len(session_id) > ID_CHARS_MAX:
            return ""
        found = self._by_id.get(_digest(session_id))
        return found.key_hash if found is not None and found.until_ns > now_ns else ""

    def end(self, session_id: str) -> None:
        """End one, if there is one."""
        self._by_id.pop(_digest(session_id), None)

    def __len__(self) -> int:
        return len(self._by_id)


def _digest(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode(errors="replace")).digest()


_OWN_SITE = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` of the console's page, and of an address that was typed in."""
_log = logging.getLogger(__name__)


class KeyBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /console/api/session`."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=KEY_CHARS_MAX)]


@dataclass(frozen=True, slots=True)
class SignIn:
    """The sessions of one gateway, and the path at which they begin and end."""

    access: Access
    gateway: str
    """Its name. Cookies know no ports: two gateways of one host need two names."""
    trace_page: str | None = None
    """Address of a trace, with `{trace_id}`; None if there is no viewer."""
    sessions: BrowserSessions = field(default_factory=BrowserSessions)
    tries: WrongKeys = field(default_factory=WrongKeys)
    """Wrong keys, by address. A right one always opens: all browsers behind a proxy have one."""

    @property
    def cookie(self) -> str:
        """Name of the cookie."""
        return f"prfaas_{hashlib.sha256(self.gateway.encode()).hexdigest()[:8]}"

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes; requests with the cookie have the rights of its key from now on."""
        self.access.session_key = self._session_key
        router.add_get(SESSION_PATH, self._show)
        router.add_post(SESSION_PATH, self._begin)
        router.add_delete(SESSION_PATH, self._end)

    def _session_key(self, request: web.Request) -> str:
        session_id = request.cookies.get(self.cookie, "")
        found = self.sessions.key_hash(session_id, monotonic_ns())
        if found:
            _check_origin(request)
        return found

    async def _show(self, request: web.Request) -> web.Response:
        """Name and rank of the browser's session, and if a key is needed."""
        name = request[OPERATOR]
        is_named = bool(name) and name != WITHOUT_KEY
        return json_response(
            {
                "needs_key": bool(self.access.operators),
                "operator": name if is_named else None,
                "rank": self.access.rank(name).value if name else None,
                "trace_page": self.trace_page if name else None,
            }
        )

    async def _begin(self, request: web.Request) -> web.Response:
        _check_origin(request)
        body = await json_body(request, KeyBody)
        if not self.access.operators:
            message = "this gateway has no operator keys: there is nothing to sign in with"
            raise RequestError(message, status=409)
        name = self.access.operators.owner(body.key.strip())
        if name is None and (wait_s := self.tries.wrong(request.remote or "", monotonic_ns())):
            message = "too many wrong keys from this address"
            raise self.access.refused(request, RejectedError(message, "wrong_keys", wait_s))
        if name is None:
            message = "this is no operator's key; `prfaas tenant key` makes keys, and the "
            message += "deployment file has their hashes in [operators] or gateway.operator_keys"
            raise self.access.refused(request, RequestError(message, status=401))
        rank = self.access.rank(name)
        if rank is OperatorRank.METRICS:
            message = f"operator {name} has the rank 'metrics', which opens /metrics alone"
            raise self.access.refused(request, RequestError(message, status=403), name)
        self.sessions.end(request.cookies.get(self.cookie, "")[:ID_CHARS_MAX])
        session_id = self.sessions.begin(key_hash(body.key.strip()), monotonic_ns())
        log_event(_log, logging.INFO, "signed_in", operator=name, address=request.remote or "")
        response = json_response({"operator": name, "rank": rank.value})
        # Behind a proxy that ends TLS the connection here is none of TLS, and the browser's is.
        is_secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
        response.set_cookie(
            self.cookie,
            session_id,
            path="/",
            secure=is_secure,
            httponly=True,
            samesite="Strict",
        )
        return response

    async def _end(self, request: web.Request) -> web.Response:
        _check_origin(request)
        self.sessions.end(request.cookies.get(self.cookie, "")[:ID_CHARS_MAX])
        response = json_response({"operator": None})
        response.del_cookie(self.cookie, path="/", httponly=True, samesite="Strict")
        return response


def _check_origin(request: web.Request) -> None:
    """Refuse what a page of another origin sends; RequestError (403).

    `SameSite` alone does not: a page at another port of this host is of the same site.
    """
    origin, site = request.headers.get(hdrs.ORIGIN), request.headers.get("Sec-Fetch-Site")
    is_own = site in _OWN_SITE if site is not None else None
    if is_own is None and origin is not None:
        is_own = origin.partition("://")[2] == request.host
    if is_own is None:
        is_own = request.method in ("GET", "HEAD")
    if not is_own:
        shown = (origin or "nobody")[:80]
        raise RequestError(
            f"a session of the console is for its own page, not for one of {shown!r}; scripts "
            'send their key: "Authorization: Bearer KEY"',
            status=403,
        )
