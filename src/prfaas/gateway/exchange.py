"""One request on its way through the gateway: what it is, and what is noted about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.errors import EngineError
from prfaas.gateway.answering import ClientStream
from prfaas.gateway.engines import SuspectError
from prfaas.gateway.jsons import JsonObject
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.records import Fallback, Outcome, Record
from prfaas.gateway.replies import Replies, replies_for
from prfaas.gateway.requests import ClientRequest
from prfaas.gateway.seam import Answer
from prfaas.gateway.tenants import Tenant
from prfaas.gateway.tracing import Trace
from prfaas.gateway.transfers import PrefixPull, TransferView
from prfaas.gateway.usage import Usage
from prfaas.logs import log_event

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Exchange:
    """State of one request.

    Attributes:
        client: What was asked.
        tenant: Whose it is.
        record: Takes what happens.
        stream: Where a stream is written to.
        trace: Its place in a trace, and the headers of it that go to both legs.
        metrics: Count what happens.
        usage: Corrects the token counts.
        replies: Translates the engine's answer.
        answer: What has been sent of a stream that another engine could continue; None for others.
        transfer: Blocks on their way; None on the local path, and once given up.
        pull: Prefix that is fetched for a prefill at home; None without.
        final_tokens: Prefix that decode should find once the transfer is complete.
        on_first_token: Called once, when the first token has come.
        suspects: Engines that failed at it, by their fault or its own.
        suspicion: Digest of its prompt while it runs as one after which an engine died.
        watch: Looks whether the remote path is late, until the first token.
        held: Chunks that end an answer and wait for what the engine sends after them.
    """

    client: ClientRequest
    tenant: Tenant
    record: Record
    stream: ClientStream
    trace: Trace
    metrics: Metrics
    usage: Usage = field(init=False)
    replies: Replies = field(init=False)
    answer: Answer | None = None
    transfer: TransferView | None = None
    pull: PrefixPull | None = None
    final_tokens: int = 0
    on_first_token: Callable[[], None] | None = None
    suspects: list[str] = field(default_factory=list)
    suspicion: bytes | None = None
    watch: asyncio.Task[None] | None = None
    held: list[JsonObject] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.usage = Usage(self.record)
        self.replies = replies_for(self.client, self.record.request_id)

    @property
    def is_answered(self) -> bool:
        """Whether the last token has come, although the engine did not end its stream."""
        return self.answer is not None and self.answer.finish_reason is not None

    @property
    def is_short(self) -> bool:
        """Whether decode has computed what is still on its way."""
        transfer = self.transfer
        if transfer is None or transfer.has_arrived:
            return False
        return (self.usage.decode_cached or 0) < self.final_tokens

    @property
    def awaited(self) -> TransferView | None:
        """What the next leg at home has to wait for: its hand-off, or a prefix that is pulled."""
        return self.transfer or self.awaited_pull

    @property
    def awaited_pull(self) -> TransferView | None:
        """A prefix on its way."""
        return None if self.pull is None or self.pull.outcome else self.pull.transfer

    def take_held(self, system_fingerprint: object = None) -> list[JsonObject]:
        """The chunks that were held back; vLLM writes its fingerprint into them."""
        held, self.held = self.held, []
        if system_fingerprint is None:
            return held
        return [chunk | {"system_fingerprint": system_fingerprint} for chunk in held]

    def leg_headers(self, leg: str) -> dict[str, str]:
        """Headers of a leg, "p" or "d"; nothing else of the client's gets to an engine."""
        return {"X-Request-Id": f"{self.record.request_id}-{leg}", **self.trace.headers}

    def suspect(self, engine: str, error: EngineError) -> None:
        """A leg ended with an error; an engine that failed at this request is remembered."""
        if isinstance(error, SuspectError):
            self.suspects.append(engine)

    def fall_back(self, fallback: Fallback, message: str) -> None:
        """The remote path was left, or did not pay off: note it, count it, log it."""
        self._note(fallback, message)
        self.metrics.fell_back(self.record)

    def lose_pull(self, reason: str, message: str) -> None:
        """A prefix that was to be fetched is computed, or part of it: note and log it."""
        self._note(Fallback("pull", reason), message)

    def _note(self, fallback: Fallback, message: str) -> None:
        self.record.fallback = fallback
        log_event(
            _log,
            logging.WARNING,
            "fell_back",
            request_id=self.record.request_id,
            stage=fallback.stage,
            reason=fallback.reason,
            why=message,
        )

    def first_token(self) -> None:
        """Something of the answer has come; the first of a stream counts as its TTFT."""
        self.stop_watching()
        if self.on_first_token is not None:
            self.on_first_token()
            self.on_first_token = None

    def stop_watching(self) -> None:
        """The remote path can not be left any more, nor a pull."""
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None
        if self.pull is not None:
            self.pull.stop()

    def finish(self) -> None:
        """The answer is complete: judge the transfer by what decode found."""
        self.first_token()
        self.record.outcome, self.record.e2e_ns = Outcome.FINISHED, self.record.age_ns()
        found = self.usage.decode_cached or 0
        if self.transfer is not None and found < self.final_tokens:
            message = f"decode found {found} of {self.final_tokens} tokens"
            self.fall_back(Fallback("transfer", self.transfer.failure), message)


def reply_headers(record: Record) -> dict[str, str]:
    """Headers that tell the client where its request went."""
    headers = {"X-Request-Id": record.request_id}
    if record.decision is not None:
        headers["X-Prfaas-Path"] = record.path
        headers["X-Prfaas-Reason"] = record.refusal or record.decision.reason.value
    if record.fallback is not None:
        headers["X-Prfaas-Fallback"] = f"{record.fallback.stage}/{record.fallback.reason}"
    return headers
