"""State of one request in the gateway: its answer so far, and the counts of its usage.

An answer may be begun by one engine and continued by another, without a gap or a repetition.

    first engine     t1 t2 t3 t4 t5 |  dies
    client has       the text of t1 to t4, and that of t5 unless a stop string may begin in it
    second engine    prompt + t1 ... t5 | t6 t7 ...

The engine that prefills is the first one of an answer whose first token it gives: a hand-over has
the seam of a broken stream. But a greedy answer is made again from its prompt, and its client gets
what is new: engines round otherwise where a token is a part of the prompt, and might choose others.

The prompt of the second engine is the first one's and every token whose text is complete. Text that
the first engine still held back, because a stop string may begin in it, is sent by the gateway. It
watches for stop strings that begin before the seam; those behind it the second engine sees itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.core.request.actions import FellBack
from prfaas.core.request.events import Outcome
from prfaas.gateway.http.json_codec import JsonObject, as_count, as_object
from prfaas.gateway.http.responses import ANSWER_BYTES_MAX, AnswerTooLongError, ClientStream
from prfaas.gateway.openai.requests import ClientRequest, Replies, replies_for
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_records import RequestRecord
from prfaas.gateway.telemetry.tracing import RequestTrace
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.logs import log_event

_log = logging.getLogger(__name__)


_ID_BYTES = 32
"""Memory of a token id."""


class OtherTextError(Exception):
    """An answer that is made again begins otherwise."""


class StreamedAnswer:
    """State of one answer: generated tokens, and the part sent to the client.

    Args:
        is_greedy: Each engine makes the same one.
    """

    def __init__(self, stops: list[str], *, is_greedy: bool = False) -> None:
        self._stops, self.is_greedy = stops, is_greedy
        self._had = ""
        """Text of an answer made again that the client has and that has not come again."""
        self._first: tuple[list[int], str] | None = None
        """Token of a prefill leg, and what the client has of its text."""
        self._pieces: list[str] = []
        """Texts of the tokens since the first one of a prefill leg, as their engine told them."""
        self._longest = max(map(len, stops), default=1)
        self._sent: list[str] = []
        self._waiting = ""
        self._old_chars = 0
        self._num_bytes = 0
        self.token_ids: list[int] = []
        """All tokens, of all engines."""
        self.finish_reason: str | None = None
        """Reason of completion; None while incomplete."""
        self.created: object = None
        """Start time from the first engine."""
        self.stop_end: int | None = None
        """End of a stop string found by the gateway, in characters."""
        self.first_text: str | None = None
        """Text of the token of a prefill leg, as its engine has it; None without one."""

    def told(self, token_ids: list[int], text: str, created: object, reason: str | None) -> None:
        """Another process has relayed so much of it."""
        self.token_ids, self._sent, self._num_bytes = token_ids, [text], len(text)
        self.created, self.finish_reason = created, reason

    @property
    def is_repeated(self) -> bool:
        """Return True while the client has all that comes."""
        return bool(self._had)

    @property
    def text(self) -> str:
        """The part sent to the client."""
        return "".join(self._sent)

    @property
    def pieces(self) -> list[str] | None:
        """Text of each token; None if an engine may have held text back, or told several at once:
        then only a tokenizer knows it."""
        is_known = not self._stops and len(self._pieces) == len(self.token_ids)
        return list(self._pieces) if is_known else None

    def begin(self, choice: JsonObject, *, is_last: bool) -> bool | None:
        """Prepare the first text of a prefill leg as what another engine goes on with; see `cut`.

        Args:
            is_last: The leg was asked for all tokens that the answer may have.

        Returns:
            True if the answer has ended; None if nothing can be made of it.
        """
        ids, text = choice.get("token_ids"), choice.get("text")
        is_whole = choice.get("finish_reason") is not None or not self._stops
        if self.cut(choice, is_last=is_last):
            return True
        if not isinstance(ids, list) or not isinstance(text, str) or not text:
            # Without text it is a part of a character, after which no engine can begin.
            return None
        ids = [*self.token_ids, *ids]
        self.first_text = text if is_whole and len(ids) == 1 else None
        self._first = ids, choice["text"]
        return False

    def cut(self, choice: JsonObject, *, is_last: bool) -> bool:
        """Have a choice of a prefill leg end nothing, and hold text back in which a stop string may
        begin; True, and nothing changes, if the answer ends with it."""
        reason = choice.get("finish_reason")
        if reason is None:
            return False
        if is_last or reason != "length":
            return True
        text = choice.get("text") or ""
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        begins = (at for at in starts for stop in self._stops if stop.startswith(text[at:]))
        choice |= {"text": text[: min(begins, default=len(text))]}
        choice |= {"finish_reason": None, "stop_reason": None}
        return False

    def again(self) -> bool:
        """Have the next leg make the answer from its beginning; False if it has to go on from the
        tokens so far."""
        if not self.is_greedy or self._first is None or len(self.text) > len(self._first[1]):
            return False
        self._had, self.token_ids, self._sent, self._pieces = self._first[1], [], [], []
        return True

    def _leave_out(self, choice: JsonObject) -> None:
        """Leave out what the client has; OtherTextError if this is another text."""
        assert self._first is not None  # noqa: S101 (what it has is of this token)
        text = choice.get("text") or ""
        is_over = choice.get("finish_reason") and len(text) < len(self._had)
        if is_over or text[: len(self._had)] != self._had[: len(text)]:
            self.is_greedy, self._had = False, ""
            self.token_ids, self._sent = list(self._first[0]), [self._first[1]]
            raise OtherTextError
        choice["text"], self._had = text[len(self._had) :], self._had[len(text) :]

    def take(self, chunk: JsonObject) -> JsonObject:
        """A chunk of an engine's, as the client gets it: without token ids, and watched;
        AnswerTooLongError if there is more to remember than the gateway takes."""
        self.created = chunk.get("created") if self.created is None else self.created
        chunk["created"] = self.created
        for choice in chunk.get("choices") or ():
            ids, text = choice.get("token_ids") or (), choice.get("text") or ""
            # Only the gateway asked for them: in vLLM's answer they are null.
            choice["prompt_token_ids"] = choice["token_ids"] = None
            self._num_bytes += _ID_BYTES * len(ids) + len(text)
            if self._num_bytes > ANSWER_BYTES_MAX:
                raise AnswerTooLongError("the engine's stream", ANSWER_BYTES_MAX)
            self.token_ids += ids
            if self._first is not None and len(ids) == 1:
                self._pieces.append(text)
            if self._old_chars:
                self._watch(choice)
            self._sent.append(choice.get("text") or "")
            if self._had:
                self._leave_out(choice)
            self.finish_reason = choice.get("finish_reason")
        return chunk

    def move(self, texts: list[str]) -> int:
        """The engine is gone: go on behind the last token whose text is complete; ValueError if
        that is not what was sent.

        Returns:
            Tokens that another engine is given as a part of its prompt.
        """
        whole, sent = "".join(texts), self.text
        if not whole.startswith(sent):
            raise ValueError("the tokens do not give the text that was sent")
        while texts and not texts[-1]:
            texts.pop()
        del self.token_ids[len(texts) :]
        self._pieces = list(texts)
        self._sent, self._waiting = [sent], whole[len(sent) :]
        self._old_chars = len(self._waiting)
        return len(self.token_ids)

    @property
    def is_stopped(self) -> bool:
        """Return True if the held text contains a stop string: no engine has to continue."""
        return self._found() is not None

    def _watch(self, choice: JsonObject) -> None:
        """Hold back what a stop string from before the seam may still make disappear."""
        self._waiting += choice.get("text") or ""
        # The engine cuts off the stop string that it found, which may end another one.
        stopped_by = choice.get("stop_reason")
        found = self._found(stopped_by if isinstance(stopped_by, str) else "")
        if found is not None:
            start, stop = found
            self.stop_end = sum(map(len, self._sent)) + start + len(stop)
            choice |= {"text": self._waiting[:start], "finish_reason": "stop", "stop_reason": stop}
        elif choice.get("finish_reason") or len(self._waiting) >= self._old_chars + self._longest:
            choice["text"] = self._waiting
        else:
            choice["text"] = ""
            return
        self._waiting, self._old_chars = "", 0

    def _found(self, stopped_by: str = "") -> tuple[int, str] | None:
        """Start and text of the stop string that ends first, if it begins before the seam; of those
        that end together it is the first of the request's, as in vLLM.

        Args:
            stopped_by: The stop string that the engine found and cut off.
        """
        text = self._waiting + stopped_by
        starts = [(text.find(stop), stop) for stop in self._stops]
        found = [(start, stop) for start, stop in starts if start >= 0]
        first = min(found, key=lambda each: each[0] + len(each[1]), default=None)
        return first if first is not None and first[0] < self._old_chars else None


@dataclass(slots=True)
class UsageCorrection:
    """Corrects the decode leg's counts.

    To the decode engine, blocks that came over the link are cached tokens. The client
    sees only tokens that were cached before its request: at most those that the prefill leg found,
    and where that leg failed half-way, at most those of the decode engine's pool. The tokens that a
    chat created in caches follow from that: the rest of the prompt, up to its last full block."""

    record: RequestRecord
    cached_max: int | None = None
    """Upper bound; None on the local path."""
    decode_cached: int | None = None
    """Tokens that the decode leg found, once known."""
    cache_end: int | None = None
    """Place where the last whole block of the prompt ends, tokens; None while not known."""
    num_moved: int = 0
    """Tokens of the answer that the decode engine was given with its prompt."""

    def corrected(self, usage: object) -> JsonObject:
        """The final usage object of a decode leg, as the client gets it."""
        counts = self.shifted(usage)
        details = as_object(counts.get("prompt_tokens_details"))
        self.decode_cached = cached = as_count(details.get("cached_tokens"))
        if self.cached_max is not None:
            cached = min(cached, self.cached_max)
        num_prompt, num_output = counts.get("prompt_tokens"), counts.get("completion_tokens")
        self.record.counted(as_count(num_prompt), as_count(num_output), cached)
        quality = {"kv_quality": self.record.quality} if self.record.quality.is_lossy else {}
        return counts | {"prompt_tokens_details": self._details(details, cached)} | quality

    def _details(self, details: JsonObject, cached: int) -> JsonObject:
        """Details of an answer: null keys in a whole one, none in a stream, as in vLLM 0.32."""
        created = details.get("created_cache_tokens")
        if self.record.api == "chat":
            if created is not None:
                created = as_count(created) + (self.decode_cached or 0) - cached
            elif self.cache_end is not None:
                created = max(0, self.cache_end - cached)
        changed = {"cached_tokens": cached, "created_cache_tokens": created}
        if self.record.stream:
            kept = details | changed
            return {key: value for key, value in kept.items() if value is not None}
        return {"multimodal_tokens": None} | details | changed

    def shifted(self, usage: object) -> JsonObject:
        """Counts of an engine that continues, as if one engine had made the whole answer."""
        counts = as_object(usage)
        if not self.num_moved:
            return counts
        return counts | {
            "prompt_tokens": as_count(counts.get("prompt_tokens")) - self.num_moved,
            "completion_tokens": as_count(counts.get("completion_tokens")) + self.num_moved,
        }


IGNORED_HEADER = "X-Prfaas-Ignored"
"""Names the fields of a body that had no effect."""
PULL = "pull"
"""Stage of fallbacks that leave the local path local; they are counted as pulls."""


@dataclass(slots=True)
class Exchange:
    """State of one request."""

    client: ClientRequest
    tenant: Tenant
    record: RequestRecord
    stream: ClientStream
    trace: RequestTrace
    """Its place in a trace, and the headers of it that go to both legs."""
    metrics: GatewayMetrics
    usage: UsageCorrection = field(init=False)
    replies: Replies = field(init=False)
    answer: StreamedAnswer | None = None
    """Part that was sent of a stream that another engine could continue; None for others."""
    on_first_token: Callable[[], None] | None = None
    """Called once a leg, when its first token has come."""
    on_finished: Callable[[], None] | None = None
    """Called once, when the answer is complete."""
    held: list[JsonObject] = field(default_factory=list)
    """Chunks that end an answer and wait for what the engine sends after them."""

    def __post_init__(self) -> None:
        self.usage = UsageCorrection(self.record)
        self.replies = replies_for(self.client, self.record.request_id)

    @property
    def is_answered(self) -> bool:
        """Return True if the last token has arrived, although the engine did not end its stream."""
        return self.answer is not None and self.answer.finish_reason is not None

    @property
    def has_tokens(self) -> bool:
        """Return True if engines have made tokens that another one goes on from."""
        return self.answer is not None and bool(self.answer.token_ids)

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
        self.record.ended(Outcome.FINISHED)
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
