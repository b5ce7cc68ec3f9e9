"""Events: what happens to a request, as its driver reports it.

Reasons of fallbacks, by stage: the labels of `prfaas_fallback_total`, with their meanings.

The table in `docs/failures.md` has the same reasons; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

from prfaas.core.transfer.transfer_state import TransferEnd


class PrefillFailure(StrEnum):
    """Reason for a prefill leg without KV cache; labels a metric."""

    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    """The connection broke before the answer was whole."""
    STATUS_1XX = "status_1xx"
    STATUS_2XX = "status_2xx"
    STATUS_3XX = "status_3xx"
    STATUS_4XX = "status_4xx"
    STATUS_5XX = "status_5xx"
    BAD_ANSWER = "bad_answer"
    REFUSED = "refused"
    """The engine that decodes would refuse the request."""
    NO_LAYOUT = "no_layout"
    TOO_MANY_BLOCKS = "too_many_blocks"
    """More blocks than a ticket or a pull can name."""
    POOL_DOWN = "pool_down"
    """The pool node that fetches the blocks is not connected."""

    @classmethod
    def of_status(cls, status: int) -> PrefillFailure:
        """The failure of an answer with this HTTP status; what is beyond 599 counts as 5xx."""
        return cls(f"status_{min(max(status // 100, 1), 5)}xx")


class DecodeFailure(StrEnum):
    """Reason for the early end of a decode leg; labels a metric."""

    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    STATUS_5XX = "status_5xx"
    ERROR = "error"
    """The engine reported an error within its stream."""


class Blocks(StrEnum):
    """Blocks that a request waits for."""

    HAND_OFF = "hand_off"
    """Hand-off of the prompt, from the prefill engine to the pool of the decode engine."""
    PULL = "pull"
    """Pull of a cached prefix from another cluster, for a local prefill."""


class Outcome(StrEnum):
    """End of a request; every request has exactly one."""

    RUNNING = "running"
    FINISHED = "finished"
    REJECTED = "rejected"
    """The client's fault: 4xx."""
    FAILED = "failed"
    """Ours or an engine's: 5xx, or an error within a stream."""
    TIMED_OUT = "timed_out"
    """It took longer than the client or the gateway allows: 504."""
    CANCELLED = "cancelled"
    """The client left."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. An event that its state has no use for is late, and changes nothing."""


@dataclass(frozen=True, slots=True)
class Begun(Event):
    """The route stands: the first event."""


@dataclass(frozen=True, slots=True)
class PrefillDone(Event):
    """The prefill leg has answered: the KV cache is computed, and in transit."""


@dataclass(frozen=True, slots=True)
class PrefillFailed(Event):
    """The prefill leg has failed."""

    kind: PrefillFailure
    may_have_died: bool = False
    """The engine had the prompt, and may have ended over it."""
    is_suspect: bool = False
    """The engine reported a failure at this request: its fault or the request's."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class DecodeWarmed(Event):
    """The engine that decodes has the tokens so far, or failed to take them."""


@dataclass(frozen=True, slots=True)
class TransferEnded(Event):
    """A pool reported the end of blocks that were in transit."""

    blocks: Blocks
    kind: TransferEnd
    at_destination: bool = True
    """The pool that receives reported it, which is the last word."""
    num_bytes: int = 0
    """Bytes of the blocks that have arrived; 0 if nobody counted."""
    is_whole: bool = False
    """Committed with every block of the prompt: the engine has computed all of it."""


@dataclass(frozen=True, slots=True)
class PullNotAsked(Event):
    """The pool that was to fetch the prefix could not be asked."""


@dataclass(frozen=True, slots=True)
class PoolLost(Event):
    """The event stream of one of the two pools is lost: the blocks cannot be tracked."""

    blocks: Blocks


@dataclass(frozen=True, slots=True)
class TurnCame(Event):
    """Another engine may be tried with a prompt that an engine may have died of."""


@dataclass(frozen=True, slots=True)
class EngineBroke(Event):
    """The decode leg has failed."""

    kind: DecodeFailure
    may_have_died: bool = False
    """The engine had the prompt, and may have ended over it."""
    is_suspect: bool = False
    """The engine reported a failure at this request: its fault or the request's."""
    can_continue: bool = True
    """Another engine can go on; False if something has reached the client that only this engine
    could continue."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken(Event):
    """The first token of a decode leg's stream has come; an answer that comes whole has none. Or a
    prefill leg has given the first token of the answer, whole or not."""


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The answer is complete."""

    found_tokens: int
    """Prefix that the engine that decodes found."""
    cached_tokens: int
    """Prefix that the engine that prefills found; the same where that is one."""


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """The request is over without its answer."""

    outcome: Outcome
    """`REJECTED` by an engine, `CANCELLED` by its client, `TIMED_OUT`, or `FAILED`."""


@dataclass(frozen=True, slots=True)
class Woke(Event):
    """The instant has come that the last `WakeAt` named."""


AnyEvent = (
    Begun
    | PrefillDone
    | PrefillFailed
    | DecodeWarmed
    | TransferEnded
    | PullNotAsked
    | PoolLost
    | TurnCame
    | EngineBroke
    | FirstToken
    | Finished
    | Stopped
    | Woke
)
EVENTS: tuple[type[Event], ...] = get_args(AnyEvent)
"""All kinds of events."""


OTHER = "other"
_TRANSFER: Mapping[str, str] = {
    TransferEnd.REFUSED.value: "a pool node refused it: `prfaas_tickets_refused_total{end,reason}`",
    TransferEnd.EXPIRED.value: "its ticket expired",
    TransferEnd.LINK_LOST.value: "the link was down for longer than a transfer waits",
    TransferEnd.PEER_RESTARTED.value: "the pool at the other end restarted and lost it",
    TransferEnd.NOT_WANTED.value: "the receiving pool has no such transfer",
    TransferEnd.MISCOUNTED.value: "more blocks arrived than were announced",
    TransferEnd.NO_ROOM.value: "the receiving pool had no memory for it",
    TransferEnd.ENGINE_LOST.value: "the engine that computed the blocks was gone",
    TransferEnd.PURGED.value: "a purge of its source was running",
    TransferEnd.ABORTED.value: "a gateway aborted it",
    "pool_down": "the gateway lost the event stream of one of the two pool nodes",
    "late": "the gateway abandoned it: computing would be faster",
    "timeout": "it was still running after decode had waited for `transfer_timeout`",
    "unknown": "it was committed, but decode found fewer blocks than expected",
}
REASONS: Mapping[str, Mapping[str, str]] = {
    "prefill": {
        "unreachable": "no connection to the engine, or it dropped the request unanswered",
        "engine_lost": "its pool node lost the engine",
        "broken": "the connection broke within the answer",
        "bad_answer": "the answer is too long or is not JSON",
        "status_1xx": "the engine answered with this status",
        "status_2xx": "the engine answered with this status in place of 200",
        "status_3xx": "the engine answered with this status",
        "status_4xx": "the engine answered with this status",
        "status_5xx": "the engine answered with this status",
        "stalled": "it took many times as long as similar prefills",
        "late": "the gateway abandoned it: a local prefill would be faster",
        "timeout": "no answer within `prefill_timeout`",
        "refused": "the decode engine refuses its fields: an error of the client, in no alert",
        "no_layout": "no engine has announced the layout of its blocks",
        "too_many_blocks": "the prompt has more blocks than a ticket or a pull can name",
        "pool_down": "the decode engine's pool node, which fetches the blocks, was not connected",
    },
    "transfer": _TRANSFER,
    "decode": {
        "unreachable": "no connection to the engine, or it dropped the request unanswered",
        "broken": "the connection broke, or the stream ended without its end mark",
        "error": "the engine reported an error within its stream, or its answer is too long",
        "status_5xx": "the engine answered with this status",
    },
    "pull": {
        **_TRANSFER,
        "not_asked": "the receiving pool node was not reachable, or more blocks than a pull names",
    },
}
"""Meanings by stage and reason."""


def label(stage: str, reason: str) -> str:
    """Return a reason as the label of a metric, or `OTHER` if the table has no such reason."""
    return reason if reason in REASONS.get(stage, {}) else OTHER
