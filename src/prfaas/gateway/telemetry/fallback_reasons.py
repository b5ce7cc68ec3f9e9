"""Reasons of fallbacks, by stage: the labels of `prfaas_fallback_total`, and what they mean.

The table in `docs/failures.md` has the same reasons; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.core.transfer.transfer_state import TransferEnd

OTHER = "other"
_TRANSFER: Mapping[str, str] = {
    TransferEnd.REFUSED.value: "a pool node refused it: `prfaas_tickets_refused_total{end,reason}`",
    TransferEnd.EXPIRED.value: "the time of its ticket was over",
    TransferEnd.LINK_LOST.value: "the link was down for longer than a transfer outlives",
    TransferEnd.PEER_RESTARTED.value: "the pool at the other end came back without it",
    TransferEnd.NOT_WANTED.value: "the receiving pool does not know it",
    TransferEnd.MISCOUNTED.value: "more blocks came than were announced",
    TransferEnd.NO_ROOM.value: "the receiving pool had no memory for it",
    TransferEnd.ENGINE_LOST.value: "the engine that computed the blocks was gone",
    TransferEnd.PURGED.value: "a purge of its source was under way",
    TransferEnd.ABORTED.value: "a gateway gave it up",
    "pool_down": "the gateway lost the event stream of one of the two pool nodes",
    "late": "the gateway left it: computing was going to be sooner",
    "timeout": "it was still under way when decode had waited for `transfer_timeout`",
    "unknown": "it ended well, and decode found less of it than it should",
}
REASONS: Mapping[str, Mapping[str, str]] = {
    "prefill": {
        "unreachable": "no connection to the engine, or it dropped the request unanswered",
        "engine_lost": "its pool node lost the engine",
        "broken": "the connection broke within the answer",
        "bad_answer": "the answer is too long, or no JSON",
        "status_1xx": "the engine answered so",
        "status_2xx": "the engine answered so, and not 200",
        "status_3xx": "the engine answered so",
        "status_4xx": "the engine answered so",
        "status_5xx": "the engine answered so",
        "stalled": "it took many times as long as such prefills do",
        "late": "the gateway left it: a local prefill was going to be sooner",
        "timeout": "no answer within `prefill_timeout`",
        "refused": "the decode engine refuses its fields: the client's fault, in no alarm",
        "no_layout": "no engine has announced the layout of its blocks",
        "too_many_blocks": "the prompt has more blocks than a ticket can name",
    },
    "transfer": _TRANSFER,
    "decode": {
        "unreachable": "no connection to the engine, or it dropped the request unanswered",
        "broken": "the connection broke, or the stream ended without its end mark",
        "error": "the engine reported an error within its stream, or its answer is too long",
        "status_5xx": "the engine answered so",
    },
    "pull": {**_TRANSFER, "not_asked": "the receiving pool node could not be asked"},
}
"""Meanings by stage and reason."""


def label(stage: str, reason: str) -> str:
    """A reason as the label of a metric: itself, or `OTHER` where the table has no such reason."""
    return reason if reason in REASONS.get(stage, {}) else OTHER
