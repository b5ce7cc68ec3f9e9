"""A link slower than its sender: blocks wait, pinned, and are let go whatever happens then."""

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.wire.fragments import block_digest
from prfaas.wire.messages.link import Abort

from .conftest import World
from .sites import LAYOUT, Engine, Site, dial, until

BLOCK_BYTES = 1 << 20
KEYS = [BlockKey(0, bytes([n]) * 32) for n in range(32)]
ROOM = len(KEYS) * BLOCK_BYTES


def pins(site: Site) -> int:
    blocks = [site.node.store.get(*name) for name in list(site.node.store.names())]
    return sum(block.pins for block in blocks if block)


async def stalled(world: World) -> tuple[Site, Site, Engine, Engine, bytes]:
    """Two sites with a transfer between them that is stuck half way."""
    pd = await world.start_pd(memory_bytes=ROOM)
    prfaas = await world.start("prfaas-pool", memory_bytes=ROOM)
    await world.linked(prfaas, pd)
    prefill, decode = await world.engine("prfaas-pool"), await world.engine("pd-pool")
    for key in KEYS:
        data = bytearray([key.block_hash[0]]) * BLOCK_BYTES
        digest = block_digest(LAYOUT.layout_id, key, data)
        assert prfaas.node.store.put(LAYOUT.layout_id, key, data, digest)
    world.relay.flows.clear()
    transfer = prefill.push(bytes_max=ROOM)
    prefill.push_done(transfer, rest=KEYS)
    sent = {"peer": "pd-pool", "direction": "sent"}
    await until(lambda: prfaas.metric("link_bytes_total", **sent) and pins(prfaas))
    return prfaas, pd, prefill, decode, transfer


async def test_what_waits_is_pinned_and_arrives_when_the_link_flows_again(world: World) -> None:
    prfaas, pd, *_ = await stalled(world)
    waiting = pins(prfaas)
    assert waiting == len(KEYS)
    other = BlockKey(0, b"\xff" * 32)
    for _ in KEYS:
        prfaas.node.store.put(LAYOUT.layout_id, other, bytearray(BLOCK_BYTES), b"d" * 32)
    assert pins(prfaas) == waiting
    world.relay.flows.set()
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    assert pd.held() == set(KEYS)
    await until(lambda: pins(prfaas) == 0)


async def test_a_link_cut_half_way_lets_everything_go(world: World) -> None:
    prfaas, pd, _, _, _ = await stalled(world)
    world.relay.cut()
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted"))
    assert pins(prfaas) == 0
    await until(lambda: not pd.node.inbound.channels.is_connected("prfaas-pool"))
    await until(lambda: pd.node.inbound.known.num_open == 0)
    assert pd.held() < set(KEYS)


async def test_a_source_killed_half_way_leaves_what_arrived(world: World) -> None:
    prfaas, pd, *_ = await stalled(world)
    world.relay.flows.set()
    await until(pd.held)
    await prfaas.kill()
    await until(lambda: pd.node.inbound.known.num_open == 0)
    for key in pd.held():
        block = pd.node.store.get(LAYOUT.layout_id, key)
        assert block is not None
        assert bytes(block.data) == bytes([key.block_hash[0]]) * BLOCK_BYTES


async def test_a_transfer_given_up_half_way_lets_its_blocks_go_at_once(world: World) -> None:
    prfaas, _, _, _, transfer = await stalled(world)
    gateway = await dial(prfaas, world.identities, "gateway")
    gateway.channel.send(Abort(transfer_id=transfer, reason="client left"))
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted"))
    assert pins(prfaas) == 0
    gateway.channel.close("done")
    world.relay.flows.set()


@pytest.mark.parametrize("cut", [False, True])
async def test_the_next_transfer_after_a_stall_commits(world: World, cut: bool) -> None:
    prfaas, pd, prefill, _, transfer = await stalled(world)
    if cut:
        world.relay.cut()
        await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted"))
        world.relay.is_plugged = True
        await world.linked(prfaas, pd)
    else:
        gateway = await dial(pd, world.identities, "gateway")
        gateway.channel.send(Abort(transfer_id=transfer, reason="client left"))
        await until(lambda: pd.metric("transfers_total", direction="received", state="aborted"))
        world.relay.flows.set()
        gateway.channel.close("done")
        await until(lambda: prfaas.node.links["pd-pool"].num_open == 0)
    again = prefill.push(bytes_max=ROOM)
    prefill.push_done(again, rest=KEYS)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    assert pd.held() == set(KEYS)
