"""Records of requests of every course, for the list of the console."""

from __future__ import annotations

from prfaas.core.dispatch.types import RefusalReason
from prfaas.core.request.actions import FellBack
from prfaas.core.request.events import Outcome
from prfaas.core.routing.decision import Decision, Path, Reason
from prfaas.gateway.telemetry.request_records import Records, RequestRecord
from prfaas.units import NS_PER_MS

COURSES: tuple[tuple[tuple[int, str, str, str], ...], ...] = (
    (),
    (),
    ((900, "prefill", "late", "the prefill leg was ended: late"),),
    ((700, "transfer", "link_lost", "the link was down for longer than a transfer waits"),),
    ((3000, "decode", "broken", "ClientPayloadError"),),
    (),
    (),
)
TENANTS = ("search", "support", "batch")


def fill(records: Records, count: int, newest_unix_s: float, step_s: float = 0.05) -> None:
    """Add `count` requests that came in every `step_s`, the last one now."""
    for number in range(count):
        records.add(made(number, newest_unix_s - (count - 1 - number) * step_s))


def made(number: int, at_unix_s: float) -> RequestRecord:
    """One request; its number decides its course."""
    is_long, ms = number % 3 == 0, number * 7919 % 1000
    fallbacks = COURSES[number % len(COURSES)]
    is_remote = is_long or bool(fallbacks)
    num_tokens = 30_000 + ms if is_remote else 900 + ms
    record = RequestRecord(
        f"request-{number:06}",
        "chat",
        TENANTS[number % 3],
        stream=True,
        started_unix_s=at_unix_s,
        num_prompt_tokens=num_tokens,
        num_output_tokens=60 + ms % 40,
        cached_tokens=num_tokens // 4,
        decided_ns=(3 + ms % 20) * NS_PER_MS,
        ttft_ns=(1500 + ms if is_remote else 150 + ms // 4) * NS_PER_MS,
        e2e_ns=(4000 + ms) * NS_PER_MS,
        prefill_engine="prefill" if is_remote else None,
        decode_engine="decode",
        outcome=Outcome.FINISHED,
        decision=Decision(
            Path.REMOTE if is_remote else Path.LOCAL,
            Reason.ABOVE_THRESHOLD if is_remote else Reason.BELOW_THRESHOLD,
            num_tokens,
            19_400,
        ),
        trace_id=f"{number:032x}",
    )
    if is_remote:
        record.prefill_ns = 1200 * NS_PER_MS
    record.fallbacks = tuple(
        (at * NS_PER_MS, FellBack(stage, reason, why)) for at, stage, reason, why in fallbacks
    )
    if number % 97 == 5:
        record.refusal, record.outcome = RefusalReason.PREDICTED_LATE, Outcome.FAILED
        record.error, record.ttft_ns, record.e2e_ns = "503 Service Unavailable", None, 9 * NS_PER_MS
        record.fallbacks, record.num_output_tokens = (), 0
    return record
