"""Every error in OpenAI's shape, those of the router and of admission (429, 503) included."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from prfaas.errors import ERROR_TYPES, EngineError, PrfaasError, RequestError
from prfaas.gateway.http.responses import error_object, json_response

_log = logging.getLogger(__name__)


REASON_HEADER = "X-Prfaas-Reject-Reason"


class UnavailableError(PrfaasError):
    """The request cannot be served now, but possibly later or elsewhere: 503."""


class PromptBreaksEnginesError(PrfaasError):
    """Engines died with this prompt in them: it is given to no other one, and answered with 500."""


class RejectedError(RequestError):
    """Too much is asked for now.

    Args:
        message: Which limit, and what it allows.
        reason: One of a bounded set: it labels a metric and goes to the client.
        retry_after_s: When it is worth another try, whole seconds, at least 1.
    """

    def __init__(self, message: str, reason: str, retry_after_s: int) -> None:
        super().__init__(message, status=429)
        self.reason = reason
        self.retry_after_s = retry_after_s


_RETRY_LATER = {"Retry-After": "1"}
RETRY_S_MAX = 3600
"""Upper limit of an engine's value."""
_TRANSIENT = (429, 503)
_SECONDS = re.compile(r"[0-9]{1,9}")
_PATH_CHARS_MAX = 200
SERVED = "/v1/chat/completions, /v1/completions, /v1/models, /tokenize and /detokenize"


class TimedOutError(PrfaasError):
    """The request took longer than it may."""


def status_of(error: Exception) -> int:
    """HTTP status of an error."""
    match error:
        case RequestError() | web.HTTPException():
            return error.status
        case UnavailableError():
            return 503
        case TimedOutError():
            return 504
        case EngineError():
            return 502
        case _:
            return 500


def error_body(error: Exception) -> dict[str, object]:
    """OpenAI's error object for an error. Internal details stay in the log."""
    status = status_of(error)
    match error:
        case RequestError():
            return error_object(str(error), error.error_type, error.param, status)
        case web.HTTPRequestEntityTooLarge():
            message, kind = error.text or error.reason, ERROR_TYPES[status]
        case web.HTTPException():
            message, kind = error.reason, type(error).__name__.removeprefix("HTTP") + "Error"
        case PromptBreaksEnginesError():
            message, kind = str(error), "PromptBreaksEnginesError"
        case PrfaasError():
            message, kind = str(error), ERROR_TYPES.get(status, ERROR_TYPES[502])
        case _:
            message, kind = "the gateway failed; see its log", "InternalServerError"
    return error_object(message, kind, None, status)


def error_response(error: Exception, headers: Mapping[str, str]) -> web.Response:
    """The HTTP answer for an error."""
    status = status_of(error)
    return json_response(error_body(error), status, {**headers, **_headers(error, status)})


def _headers(error: Exception, status: int) -> Mapping[str, str]:
    """Headers of an error for the client."""
    if isinstance(error, RejectedError):
        return {"Retry-After": str(error.retry_after_s), REASON_HEADER: error.reason}
    if isinstance(error, PromptBreaksEnginesError):
        # OpenAI's clients retry a 500 by default.
        return {REASON_HEADER: "breaks_engines", "X-Should-Retry": "false"}
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, UnavailableError):
        return {**_RETRY_LATER, REASON_HEADER: "unavailable"}
    return retry_headers(status)


def retry_headers(status: int, said: str = "") -> Mapping[str, str]:
    """Value of `Retry-After` of an answer with this status.

    Args:
        said: `Retry-After` of the engine; ignored unless whole seconds.
    """
    if status not in _TRANSIENT:
        return {}
    if not _SECONDS.fullmatch(said):
        return _RETRY_LATER
    return {"Retry-After": str(min(int(said), RETRY_S_MAX))}


@web.middleware
async def openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answers what no handler has answered: unknown routes, wrong methods."""
    if request.path.endswith("/") and request.match_info.http_exception is not None:
        # As vLLM's server does. One slash before it, or this would lead to another host.
        url = request.rel_url.with_path(f"/{request.path.strip('/')}", keep_query=True)
        if url.path != "/":
            return web.Response(status=307, headers={"Location": str(url)})
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        place = f"{request.method} {request.path[:_PATH_CHARS_MAX]}"
        kind = type(error).__name__.removeprefix("HTTP") + "Error"
        message = f"{error.reason}: {place}"
        if error.status == 404:
            message += f"; served are {SERVED}"
        body = error_object(message, kind, None, error.status)
        return json_response(body, error.status, headers)
    except PrfaasError as error:
        return error_response(error, {})
    except Exception as error:
        _log.exception("request_failed path=%r", request.path[:_PATH_CHARS_MAX])
        return error_response(error, {})
