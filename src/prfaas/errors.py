"""Every error prfaas raises on purpose, by who has to act.

    PrfaasError
    ├── ConfigError      the operator: a file, a flag, a port, a missing checkpoint
    ├── RequestError     the client: carries the HTTP status of the answer
    ├── PeerError        the other side of a connection broke the protocol
    ├── TransferError    the network, or a peer that went away
    └── EngineError      an inference engine failed or is not there

A message says what happened, the offending value, the limit or what was expected, and the next
step.
"""

from __future__ import annotations

from typing import TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


class PrfaasError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(PrfaasError):
    """The operator has to change something before this can work."""


ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "TooManyRequestsError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
"""OpenAI's `error.type` by HTTP status."""


class RequestError(PrfaasError):
    """The client sent something that cannot be served.

    Args:
        message: What is wrong, with the value and the limit.
        status: HTTP status of the answer: one of `ERROR_TYPES`.
        param: Name of the offending request field, if one field is to blame.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.error_type = ERROR_TYPES[status]


class PeerError(PrfaasError):
    """The other side sent bytes that the protocol does not allow."""


class TransferError(PrfaasError):
    """Blocks could not be moved: the link is down, the peer refused, the time is over."""


class EngineError(PrfaasError):
    """An engine could not be reached or answered with an error."""


def words_of(error: BaseException) -> str:
    """Return what an error says; in words of ours where it has none, as a time-out."""
    if isinstance(error, TimeoutError) and not error.strerror:
        return str(error) or "no answer in time"
    return str(error) or type(error).__name__


def without_frames(error: ErrorT) -> ErrorT:
    """Return an error that can be kept, without its traceback and causes.

    Their frames would keep what they work on, such as the memory of a block, until the garbage
    collector finds the cycle.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
