"""Refused requests: 429 or 503, with reason and `Retry-After`."""

from __future__ import annotations

from prfaas.errors import PrfaasError, RequestError

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
