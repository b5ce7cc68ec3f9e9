"""One trace from the gateway to both pool nodes, as a collector receives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.otlp import attributes, collecting

from .deployment import LONG, running
from .worlds import MODEL

pytestmark = pytest.mark.timeout(180)
TRACE = "a" * 32


async def test_one_trace_holds_gateway_and_both_pool_nodes(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with collecting() as (seen, endpoint):
        table = {"endpoint": endpoint}
        async with running(tmp_path, checkpoint, identities, tracing=table) as world:
            for flags, prompt in (("00", [7, *LONG]), ("01", LONG)):
                context = f"00-{TRACE}-{'b' * 16}-{flags}"
                await world.complete(prompt, headers={"traceparent": context})
                assert (await world.record())["path"] == "remote"
    # Of the request that nobody records there is nothing, or these would not be the only ones.
    whole, transfer = seen.named(f"text_completion {MODEL}"), seen.named("kv transfer")
    sent, received = seen.named("kv send"), seen.named("kv receive")
    assert {span.trace_id.hex() for span in seen.spans} == {TRACE}
    assert whole.parent_span_id.hex() == "b" * 16
    assert transfer.parent_span_id == whole.span_id
    assert sent.parent_span_id == received.parent_span_id == transfer.span_id
    who = [seen.senders[span.span_id] for span in (transfer, sent, received)]
    assert who == [
        ("prfaas-gateway", "gateway"),
        ("prfaas-pool", "prfaas-pool"),
        ("prfaas-pool", "pd-pool"),
    ]
    told = [attributes(span) for span in (transfer, sent, received)]
    for name in ("id", "state"):
        assert len({found[f"prfaas.transfer.{name}"] for found in told}) == 1
    assert len({found["prfaas.kv.bytes"] for found in told}) == 1
    assert told[0]["prfaas.transfer.state"] == "committed"
    for span in (sent, received):
        assert [event.name for event in span.events] == ["first block", "last block"]
        assert transfer.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.events[0].time_unix_nano
        assert span.events[1].time_unix_nano <= span.end_time_unix_nano
