"""The index follows the pools: snapshot, events, gaps, silence, strangers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.prefix_index import PrefixIndex, SourceState
from prfaas.core.resilience.circuit_breaker import BreakerOutcome
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import PeerError, words_of
from prfaas.gateway.pools.subscription import Subscription
from prfaas.gateway.routing.transfer_tracker import VIEWS_MAX, Transfers
from prfaas.wire.messages.base import Ping
from prfaas.wire.messages.codec import AnyMessage
from prfaas.wire.messages.gateway import (
    Evicted,
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    TransferEnded,
)
from tests.gateway.conftest import LAYOUT, World, until

KEYS = [BlockKey(0, bytes([i]) * 32) for i in range(6)]
LAYOUT_ID = LAYOUT.layout_id


def subscription() -> tuple[Subscription, PrefixIndex]:
    index = PrefixIndex()
    made = Subscription("p", index, Transfers())
    made.begin()
    return made, index


def end(next_seq: int = 5) -> SnapshotEnd:
    return SnapshotEnd(epoch="e", next_seq=next_seq)


def stored(seq: int, *keys: BlockKey) -> Stored:
    return Stored(seq=seq, layout_id=LAYOUT_ID, keys=[(k.group, k.block_hash) for k in keys])


def test_a_snapshot_counts_once_it_is_complete() -> None:
    made, index = subscription()
    keys = [(key.group, key.block_hash) for key in KEYS]
    for part in (keys[:3], keys[3:]):
        made.receive(Snapshot(epoch="e", next_seq=5, layout_id=LAYOUT_ID, keys=part))
        assert not made.is_live
    made.receive(Ping())
    made.receive(end())
    assert made.is_live
    assert index.num_blocks("p") == 6
    made.receive(Evicted(seq=5, layout_id=LAYOUT_ID, keys=keys[:2]))
    assert index.num_blocks("p") == 4
    made.lose()
    assert index.num_blocks("p") == 4
    assert index.state("p") is SourceState.DEGRADED
    made.begin()
    assert index.num_blocks("p") == 0
    assert index.state("p") is SourceState.REBUILDING


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ([], stored(5)),
        ([end()], stored(6)),
        ([end()], stored(4)),
        ([end(), stored(5)], stored(5)),
        ([end()], end()),
        ([end()], Snapshot(epoch="e", next_seq=5, layout_id=LAYOUT_ID, keys=[])),
        ([], PoolState(seq=5, layouts={}, links={})),
    ],
)
def test_out_of_order(before: list[AnyMessage], message: AnyMessage) -> None:
    made, _ = subscription()
    for earlier in before:
        made.receive(earlier)
    with pytest.raises(PeerError):
        made.receive(message)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS)), max_size=30))
def test_any_history_leaves_what_was_stored_last(history: list[tuple[bool, BlockKey]]) -> None:
    made, index = subscription()
    made.receive(end(0))
    held: set[BlockKey] = set()
    for seq, (is_store, key) in enumerate(history):
        kind = Stored if is_store else Evicted
        made.receive(kind(seq=seq, layout_id=LAYOUT_ID, keys=[(key.group, key.block_hash)]))
        held = held | {key} if is_store else held - {key}
        assert index.num_blocks("p") == len(held)


async def test_transfers_of_others_do_not_fill_memory() -> None:
    transfers = Transfers()
    for i in range(2 * VIEWS_MAX):
        transfers.open(i.to_bytes(16, "big"), "a", "b")
        transfers.ended("b", ended_event(bytes(15) + b"x"))
    assert len(transfers._views) == VIEWS_MAX


def ended_event(transfer_id: bytes) -> TransferEnded:
    return TransferEnded(
        seq=0,
        transfer_id=transfer_id,
        direction="received",
        peer="a",
        kind=TransferEnd.COMMITTED,
        reason="",
        num_blocks=1,
        num_bytes=1,
        duration_ns=1,
        last_block_age_ns=0,
    )


# --- over the wire ---


async def test_a_new_connection_brings_a_new_snapshot(world: World) -> None:
    index, pool = world.gateway.index, world.pd_pool
    pool.store(LAYOUT, KEYS)
    await until(lambda: index.num_blocks("pd-pool") == 6)
    pool.evict(LAYOUT, KEYS[:1])
    await until(lambda: index.num_blocks("pd-pool") == 5)
    pool.blocks = [(LAYOUT_ID, key) for key in KEYS[:2]]
    pool.disconnect()
    await until(lambda: index.num_blocks("pd-pool") == 2)
    assert pool.num_subscriptions == 2


async def test_a_gap_makes_the_gateway_ask_anew(world: World) -> None:
    index, pool = world.gateway.index, world.pd_pool
    pool.store(LAYOUT, KEYS)
    await until(lambda: index.num_blocks("pd-pool") == 6)
    pool.seq()
    pool.store(LAYOUT, KEYS)
    await until(lambda: pool.num_subscriptions == 2)
    await until(lambda: world.gateway.pools.is_live("pd-pool"))
    assert index.num_blocks("pd-pool") == 0
    assert await world.metric('prfaas_index_state{pool="pd-pool",state="exact"}') == 1
    assert await world.metric('prfaas_pool_connected{pool="pd-pool"}') == 1


async def test_garbage_on_the_pools_port(world: World) -> None:
    await world.pd_pool.stop()

    async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello" * 100)
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", world.pd_pool.port)
    status, _ = await world.post({"prompt": "x" * 500})
    assert status == 200
    assert (await world.record())["reason"] == "pool_not_connected"
    server.close()
    await server.wait_closed()
    await world.pd_pool.start()
    await until(lambda: world.gateway.pools.is_live("pd-pool"))


async def test_garbage_within_tls(world: World) -> None:
    for channel in list(world.pd_pool._channels):
        assert channel._transport is not None
        channel._transport.write(b"garbage " * 10)
    await until(lambda: world.pd_pool.num_subscriptions == 2)
    await until(lambda: world.gateway.pools.is_live("pd-pool"))


async def test_a_stranger_on_the_pools_port(world: World, identities: Path) -> None:
    """Signed by our authority, but not the pool it should be."""
    pool = world.pd_pool
    await pool.stop()
    pool.name, pool.num_subscriptions = "stranger", 0
    await pool.start()
    client = world.gateway.pools._clients["pd-pool"]
    failures = 0

    def count(*_: object) -> None:
        nonlocal failures
        failures += 1

    client._on_close = count  # type: ignore[method-assign, assignment]
    await until(lambda: failures >= 1)
    assert not world.gateway.pools.is_live("pd-pool")
    assert pool.num_subscriptions == 0


async def test_a_silent_pool_is_given_up(world: World) -> None:
    """The scripted pool never pings back, so silence begins with its last event."""
    client = world.gateway.pools._clients["pd-pool"]
    assert client._channel is not None
    client._channel.heard_at -= 100
    await until(lambda: world.pd_pool.num_subscriptions == 2)


@pytest.mark.parametrize(
    ("num_missing", "told"), [(0, BreakerOutcome.GOOD), (1, BreakerOutcome.NOTHING)]
)
async def test_a_transfer_whose_source_lacked_blocks_is_no_success_of_its_link(
    world: World, monkeypatch: pytest.MonkeyPatch, num_missing: int, told: BreakerOutcome
) -> None:
    found: list[tuple[tuple[str, str], BreakerOutcome]] = []

    def ended(link: tuple[str, str], told: BreakerOutcome, _: int) -> None:
        found.append((link, told))

    monkeypatch.setattr(type(world.gateway.guards), "ended", staticmethod(ended))
    transfers = world.gateway.transfers
    transfers.open(b"t" * 16, "a", "b")
    event = msgspec.structs.replace(ended_event(b"t" * 16), num_missing=num_missing)
    transfers.ended("b", event)
    assert found == [(("a", "b"), told)]


async def test_a_pool_node_that_cannot_be_reached_is_logged_once_with_its_address(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"127.0.0.1:{world.pd_pool.port}"

    def told(event: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if r.getMessage().startswith(event)]

    def unreachable() -> list[str]:
        return [text for text in told("pool_disconnected") if address in text]

    with caplog.at_level(logging.INFO):
        await world.pd_pool.stop()
        await until(lambda: bool(unreachable()))
        client = world.gateway.pools.client("pd-pool")
        for _ in range(3):
            assert await client._connect() is None
        assert len(unreachable()) == 1
        await world.pd_pool.start()
        await until(lambda: bool(told("pool_connected")))


def test_errors_without_words_get_some() -> None:
    assert words_of(TimeoutError()) == "no answer in time"
    assert words_of(TimeoutError(110, "Connection timed out")) == "[Errno 110] Connection timed out"
    assert words_of(ConnectionResetError()) == "ConnectionResetError"
