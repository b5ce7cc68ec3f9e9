"""Reasons of fallbacks, by stage: the labels of `prfaas_fallback_total`, with their meanings.

The table in `docs/failures.md` has the same reasons; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.core.transfer.transfer_state import TransferEnd

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
