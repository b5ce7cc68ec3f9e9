"""Failures on the way: links, pools, engines, memory, clients that leave."""

import asyncio
import secrets

import pytest

from prfaas.wire.fragments import ReceivedBlock, block_digest
from prfaas.wire.messages.engine import HIT, MISS, ON_ITS_WAY
from prfaas.wire.messages.link import Abort, Arrived, Commit

from .conftest import World
from .sites import LAYOUT, PROMPT, content, dial, offer, source, subscribe, until

ABORTED = {"direction": "received", "state": "aborted"}


async def test_a_killed_source_ends_the_transfer_and_what_arrived_stays(world: World) -> None:
    prfaas, pd, prefill, decode = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:3], transfer)
    await until(lambda: len(pd.held()) == 3)
    assert await decode.look_up(PROMPT[:4], transfer) == [HIT] * 3 + [ON_ITS_WAY]
    await prfaas.kill()
    await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
    assert await decode.look_up(PROMPT[:4], transfer) == [HIT] * 3 + [MISS]
    assert await decode.load(PROMPT[:3]) == [True] * 3


async def test_a_cut_link_ends_the_transfer_at_both_ends_and_heals(world: World) -> None:
    prfaas, pd, prefill, decode = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:3], transfer)
    await until(lambda: len(pd.held()) == 3)
    world.relay.cut()
    await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted") == 1)
    assert prfaas.metric("link_up", peer="pd-pool") == 0
    assert await decode.look_up(PROMPT[3:4], transfer) == [MISS]
    late = prefill.push()
    assert await prefill.store(PROMPT[3:5], late)
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted") == 2)

    world.relay.is_plugged = True
    await world.linked(prfaas, pd)
    again = prefill.push()
    assert await prefill.store(PROMPT, again)
    prefill.push_done(again)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed") == 1)
    assert pd.held() == set(PROMPT)
    assert prfaas.metric("link_up", peer="pd-pool") == 1


async def test_a_link_that_breaks_before_a_commit_is_told_comes_back_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last acknowledgements are lost with the connection; the commit is said again without."""
    pd = await world.start_pd(link_grace_ns=100 * 10**9)
    prfaas = await world.start("prfaas-pool", link_grace_ns=100 * 10**9)
    await world.linked(prfaas, pd)
    prefill = await world.engine("prfaas-pool")
    channel = pd.node.inbound.channels.of("prfaas-pool")
    assert channel is not None
    monkeypatch.setattr(channel, "send", lambda _: None)
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed") == 1)
    world.relay.cut()
    await until(lambda: not prfaas.node.links["pd-pool"].is_up)
    world.relay.is_plugged = True
    await world.linked(prfaas, pd)
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="committed") == 1)


async def test_a_restarted_receiver_is_found_again_and_is_another_epoch(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:1], transfer)
    await pd.kill()
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted") == 1)
    reborn = await world.start_pd()
    assert reborn.node.feed.epoch != pd.node.feed.epoch
    await world.linked(prfaas, reborn)
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: reborn.held() == set(PROMPT))


async def test_an_engine_comes_back_to_a_restarted_pool(world: World) -> None:
    _, pd, _, decode = await world.two_sites()
    assert await decode.store(PROMPT)
    await pd.kill()
    await until(lambda: not decode.client.is_connected)
    await world.start_pd()
    await decode.connected()
    assert await decode.look_up(PROMPT[:1]) == [MISS]
    assert await decode.store(PROMPT)
    assert await decode.load(PROMPT) == [True] * len(PROMPT)


async def test_a_killed_engine_takes_its_transfers_along(world: World) -> None:
    """Nothing more will come of them: decode need not wait for the deadline."""
    _, pd, prefill, decode = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:3], transfer)
    await until(lambda: len(pd.held()) == 3)
    world.engines.remove(prefill)
    await asyncio.to_thread(prefill.close)
    await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
    assert await decode.look_up(PROMPT[:4], transfer) == [HIT] * 3 + [MISS]


async def test_a_receiver_without_room_says_so_and_the_sender_stops(world: World) -> None:
    room = sum(len(content(key)) for key in PROMPT[:2])
    prfaas, pd, prefill, decode = await world.two_sites(memory_bytes=room)
    for key in PROMPT[:2]:
        assert await decode.store([key])
    blocks = [pd.node.store.get(*name) for name in list(pd.node.store.names())]
    for block in blocks:
        assert block is not None
        block.pins += 1
    transfer = prefill.push(bytes_max=len(content(PROMPT[2])))
    assert await prefill.store(PROMPT[2:3], transfer)
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted") == 1)
    assert pd.metric("transfers_total", **ABORTED) == 1
    assert pd.metric("pool_blocks_dropped_total", reason="no_room") == 1
    assert pd.held() == set(PROMPT[:2])
    for block in blocks:
        assert block is not None
        block.pins -= 1


async def test_a_sender_without_room_aborts_what_it_can_not_push(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    prfaas.node.store.room.arena.capacity_bytes = 1
    transfer = prefill.push()
    assert not await prefill.store(PROMPT, transfer)
    await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
    assert prfaas.metric("transfers_total", direction="sent", state="aborted") == 1
    assert prfaas.held() == pd.held() == set()


@pytest.mark.parametrize("where", ["prfaas-pool", "pd-pool"])
async def test_a_client_that_leaves_ends_the_transfer_at_both_ends(
    world: World, where: str
) -> None:
    prfaas, pd, prefill, decode = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:2], transfer)
    await until(lambda: len(pd.held()) == 2)
    told = prfaas if where == "prfaas-pool" else pd
    gateway = await dial(told, world.identities, "gateway")
    gateway.channel.send(Abort(transfer_id=transfer, reason="client left"))
    if told is pd:
        await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
        assert await prefill.store(PROMPT[2:4], transfer)
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted") == 1)
    await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
    assert prfaas.metric("transfers_total", **ABORTED) == 0
    assert await decode.look_up(PROMPT[:5], transfer) == [HIT, HIT, MISS, MISS, MISS]
    gateway.channel.close("done")


async def test_an_abort_before_the_offer_wins(world: World) -> None:
    _, pd, _, decode = await world.two_sites()
    gateway = await dial(pd, world.identities, "gateway")
    transfer = secrets.token_bytes(16)
    gateway.channel.send(Abort(transfer_id=transfer, reason="client left"))
    await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
    peer = await source(pd, world.identities)
    peer.channel.send(offer(world.identities, transfer))
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=0))
    assert await decode.look_up(PROMPT[:1], transfer) == [MISS]
    assert pd.metric("transfers_total", direction="received", state="committed") == 0
    gateway.channel.close("done")
    peer.channel.close("done")


async def test_a_commit_that_counts_less_than_came_is_an_abort(world: World) -> None:
    pd = await world.start_pd()
    gateway = await subscribe(pd, world.identities)
    peer = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    data = bytearray(content(PROMPT[0]))
    digest = block_digest(LAYOUT.layout_id, PROMPT[0], data)
    peer.channel.send(offer(world.identities, transfer))
    peer.bring(ReceivedBlock(transfer, LAYOUT.layout_id, PROMPT[0], digest, data))
    await until(lambda: bool(peer.of(Arrived)))
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=0))
    await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
    peer.channel.close("done")
    gateway.channel.close("done")


async def test_a_source_that_came_back_ends_what_its_old_connection_began(world: World) -> None:
    """A half-open connection can outlive its sender; the new hello says that it is dead."""
    pd = await world.start_pd()
    old = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    old.channel.send(offer(world.identities, transfer))
    await until(lambda: pd.node.inbound.known.num_open == 1)
    new = await source(pd, world.identities)
    await until(lambda: pd.metric("transfers_total", **ABORTED) == 1)
    await until(lambda: bool(old.closed))
    assert pd.node.inbound.channels.is_connected("prfaas-pool")
    fresh = secrets.token_bytes(16)
    new.channel.send(offer(world.identities, fresh))
    new.channel.send(Commit(transfer_id=fresh, num_blocks=0))
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed") == 1)
    new.channel.close("done")


async def test_a_transfer_expires(world: World) -> None:
    now = [0]
    prfaas, pd, prefill, decode = await world.two_sites()
    for node in (prfaas.node, pd.node):
        node.inbound._clock_ns = lambda: now[0]
        for link in node.links.values():
            link._clock_ns = lambda: now[0]
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:1], transfer)
    await until(lambda: len(pd.held()) == 1)
    now[0] = 10**15
    await until(lambda: pd.metric("transfers_total", direction="received", state="expired"))
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="expired"))
    assert await decode.look_up(PROMPT[:2], transfer) == [HIT, MISS]
