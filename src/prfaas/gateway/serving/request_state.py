"""Record of one request in the gateway."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.core.request.actions import FellBack
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.http.responses import ClientStream
from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.openai.responses import Replies, replies_for
from prfaas.gateway.serving.continuation import StreamedAnswer
from prfaas.gateway.serving.usage import UsageCorrection
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_record import RequestRecord
from prfaas.gateway.telemetry.tracing import RequestTrace
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.logs import log_event

_log = logging.getLogger(__name__)
IGNORED_HEADER = "X-Prfaas-Ignored"
"""Names the fields of a body that had no effect."""
PULL = "pull"
"""Stage of fallbacks that leave the local path local; they are counted as pulls."""


@dataclass(slots=True)
class Exchange:
    """State of one request.

    Attributes:
        trace: Its place in a trace, and the headers of it that go to both legs.
        answer: What has been sent of a stream that another engine could continue; None for others.
        on_first_token: Called once a leg, when its first token has come.
        on_finished: Called once, when the answer is complete.
        held: Chunks that end an answer and wait for what the engine sends after them.
    """

    client: ClientRequest
    tenant: Tenant
    record: RequestRecord
    stream: ClientStream
    trace: RequestTrace
    metrics: GatewayMetrics
    usage: UsageCorrection = field(init=False)
    replies: Replies = field(init=False)
    answer: StreamedAnswer | None = None
    on_first_token: Callable[[], None] | None = None
    on_finished: Callable[[], None] | None = None
    held: list[JsonObject] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.usage = UsageCorrection(self.record)
        self.replies = replies_for(self.client, self.record.request_id)

    @property
    def is_answered(self) -> bool:
        """Return True if the last token has arrived, although the engine did not end its stream."""
        return self.answer is not None and self.answer.finish_reason is not None

    def take_held(self, system_fingerprint: object = None) -> list[JsonObject]:
        """The chunks that were held back; vLLM writes its fingerprint into them."""
        held, self.held = self.held, []
        if system_fingerprint is None:
            return held
        return [chunk | {"system_fingerprint": system_fingerprint} for chunk in held]

    def leg_headers(self, leg: str) -> dict[str, str]:
        """Headers of a leg, "p" or "d"; nothing else of the client's gets to an engine."""
        return {"X-Request-Id": f"{self.record.request_id}-{leg}", **self.trace.headers}

    def fall_back(self, fallback: FellBack) -> None:
        """The route was left, or did not pay off: note it, log it, and count it for remote ones."""
        self.record.fell_back(fallback)
        log_event(
            _log,
            logging.WARNING,
            "fell_back",
            request_id=self.record.request_id,
            stage=fallback.stage,
            reason=fallback.reason,
            why=fallback.why,
        )
        if fallback.stage != PULL:
            self.metrics.fell_back(self.record)

    def first_token(self) -> None:
        """Something of the answer has come; the first of a stream counts as its TTFT."""
        if self.on_first_token is not None:
            self.on_first_token()
            self.on_first_token = None

    def finish(self) -> None:
        """The answer is complete."""
        self.first_token()
        self.record.finished()
        if self.on_finished is not None:
            self.on_finished()


def reply_headers(record: RequestRecord) -> dict[str, str]:
    """Headers with the path of the request."""
    headers = {"X-Request-Id": record.request_id}
    if record.ignored:
        headers[IGNORED_HEADER] = ", ".join(record.ignored)
    if record.decision is not None:
        headers["X-Prfaas-Path"] = record.path
        headers["X-Prfaas-Reason"] = record.refusal or record.decision.reason.value
    if record.fallback is not None:
        headers["X-Prfaas-Fallback"] = record.fallback.label
    return headers
