"""Spans, as a collector receives them."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path

from prfaas.wire.tickets import TicketOpener
from tests.gateway.conftest import World, running
from tests.otlp import Collector, attributes

TRACE = "a" * 32
PARENT = f"00-{TRACE}-{'b' * 16}-01"
SECRET = "sesame open "


def context_of_pools(world: World, identities: Path) -> str:
    """The W3C context in the ticket of the last prefill leg."""
    order = world.prefill.calls[-1].body["kv_transfer_params"]["prfaas"]
    opener = TicketOpener(identities / "ca.pem", frozenset({"gateway"}))
    return opener.open(base64.b64decode(order["ticket"]), time.time_ns()).trace


async def ask(world: World, num_tokens: int, **headers: str) -> None:
    body = {"model": "tiny", "prompt": (SECRET * num_tokens)[:num_tokens], "max_tokens": 3}
    async with world.http.post(f"{world.url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200


async def test_a_request_is_one_trace_from_client_to_engines(
    checkpoint: Path, identities: Path, tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    seen, endpoint = collector
    table = {"tracing": {"endpoint": endpoint}}
    async with running(checkpoint, identities, tmp_path / "state", **table) as world:
        await ask(world, 300, traceparent=PARENT, tracestate="vendor=1")
        to_engines = [e.calls[-1].headers["traceparent"] for e in (world.prefill, world.decode)]
        assert world.decode.calls[-1].headers["tracestate"] == "vendor=1"
        context = context_of_pools(world, identities)
    whole = seen.named("text_completion tiny")
    assert whole.trace_id.hex() == TRACE
    assert whole.parent_span_id.hex() == "b" * 16
    assert to_engines == [f"00-{TRACE}-{whole.span_id.hex()}-01"] * 2
    below = {span.name: span for span in seen.spans if span.parent_span_id == whole.span_id}
    assert set(below) == {"decide", "prefill leg", "kv transfer", "decode leg"}
    assert context == f"00-{TRACE}-{below['kv transfer'].span_id.hex()}-01"
    for span in below.values():
        assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    found = attributes(whole)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.input_tokens"] == 300
    assert found["prfaas.path"] == "remote"
    assert attributes(below["prefill leg"])["prfaas.engine"] == "prefill"
    assert SECRET.encode() not in seen.raw


async def test_sampling_follows_the_client_and_then_the_ratio(
    checkpoint: Path, identities: Path, tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    seen, endpoint = collector
    table = {"tracing": {"endpoint": endpoint, "sample_ratio": 0.0}}
    async with running(checkpoint, identities, tmp_path / "state", **table) as world:
        await ask(world, 20)
        await ask(world, 20, traceparent=PARENT)
        await ask(world, 20, traceparent=PARENT[:-1] + "0")
    assert [span.trace_id.hex() for span in seen.spans] == [TRACE] * 3
    assert {span.name for span in seen.spans} == {"text_completion tiny", "decide", "decode leg"}


async def test_a_collector_that_is_gone_costs_requests_nothing(
    checkpoint: Path, identities: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    table = {"tracing": {"endpoint": f"http://127.0.0.1:{unused_tcp_port}/v1/traces"}}
    async with running(checkpoint, identities, tmp_path / "state", **table) as world:
        await asyncio.gather(*(ask(world, 20) for _ in range(5)))


async def test_without_a_collector_the_client_s_context_goes_through(
    world: World, identities: Path
) -> None:
    await ask(world, 300, traceparent=PARENT, tracestate="vendor=1")
    headers = world.decode.calls[-1].headers
    assert (headers["traceparent"], headers["tracestate"]) == (PARENT, "vendor=1")
    assert context_of_pools(world, identities) == PARENT
    for wanted in ({"traceparent": PARENT[:-1] + "0"}, {"traceparent": f"{PARENT}-more"}, {}):
        await ask(world, 300, **wanted)
        assert context_of_pools(world, identities) == ""
