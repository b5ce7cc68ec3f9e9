"""Spans of pool nodes, as a collector receives them."""

import asyncio

from opentelemetry.proto.trace.v1.trace_pb2 import Status

from prfaas.core.transfer.facts import RECEIVED, SENT, TransferDone
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd, TransferEvent
from prfaas.pool.process.transfer_spans import TransferSpans
from tests.otlp import attributes, collecting
from tests.pool.conftest import World
from tests.pool.sites import PROMPT, until

TRACE, PARENT = "a" * 32, "b" * 16
CONTEXT = f"00-{TRACE}-{PARENT}-01"
UNIX_NS = 1_700_000_000 * 10**9


def a_transfer(trace: str = CONTEXT) -> Transfer:
    return Transfer(b"t" * 16, "far-pool", 1_000, 10**12, trace=trace)


async def test_a_span_is_what_the_pool_knows_of_its_transfer() -> None:
    async with collecting() as (seen, endpoint):
        spans = TransferSpans(endpoint, "near-pool", lambda: UNIX_NS)
        transfer = a_transfer()
        for at_ns in (3_000, 4_000, 6_000):
            transfer.moved(10, at_ns)
        transfer.apply(TransferEvent.SEND)
        transfer.apply(TransferEnd.COMMITTED)
        spans.ended(TransferDone(RECEIVED, transfer, 9_000))
        await asyncio.to_thread(spans.close)
    span = seen.named("kv receive")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert seen.senders[span.span_id] == ("prfaas-pool", "near-pool")
    assert span.start_time_unix_nano == UNIX_NS - 8_000
    assert span.end_time_unix_nano == UNIX_NS
    moments = [(event.name, event.time_unix_nano) for event in span.events]
    assert moments == [("first block", UNIX_NS - 6_000), ("last block", UNIX_NS - 3_000)]
    assert attributes(span) == {
        "prfaas.transfer.id": (b"t" * 16).hex(),
        "prfaas.transfer.state": "committed",
        "prfaas.kv.bytes": 30,
        "prfaas.kv.blocks": 3,
        "prfaas.pool.source": "far-pool",
        "prfaas.pool.destination": "near-pool",
    }
    assert span.status.code == Status.STATUS_CODE_UNSET


async def test_what_did_not_arrive_is_an_error_with_a_short_reason() -> None:
    async with collecting() as (seen, endpoint):
        spans = TransferSpans(endpoint, "near-pool")
        transfer = a_transfer()
        transfer.num_missing = 2
        transfer.apply(TransferEnd.ABORTED, "x" * 1000)
        spans.ended(TransferDone(SENT, transfer, 9_000))
        await asyncio.to_thread(spans.close)
    span = seen.named("kv send")
    found = attributes(span)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert (found["prfaas.transfer.reason"], found["prfaas.kv.blocks_missing"]) == ("x" * 200, 2)
    assert found["prfaas.pool.source"] == "near-pool"
    assert not span.events


async def test_a_collector_that_is_gone_costs_transfers_nothing(
    world: World, unused_tcp_port: int
) -> None:
    where = f"http://127.0.0.1:{unused_tcp_port}/v1/traces"
    _, pd, prefill, decode = await world.two_sites(tracing=where)
    for _ in range(3):
        transfer = prefill.push(trace=CONTEXT)
        assert await prefill.store(PROMPT, transfer)
        prefill.push_done(transfer)
    ended = {"direction": "received", "state": "committed"}
    await until(lambda: pd.metric("transfers_total", **ended) == 3)
    assert await decode.load(PROMPT) == [True] * len(PROMPT)


async def test_nothing_is_sent_of_what_nobody_traces() -> None:
    async with collecting() as (seen, endpoint):
        spans = TransferSpans(endpoint, "near-pool")
        spans.ended(TransferDone(SENT, a_transfer(trace=""), 9_000))
        await asyncio.to_thread(spans.close)
    assert not seen.raw
