"""Blocks that travel: from one engine's memory through two pools into another's."""

import asyncio
import secrets

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.wire.messages.engine import HIT, MISS, ON_ITS_WAY, Push
from prfaas.wire.messages.link import Release

from .conftest import World
from .sites import HASHES, LAYOUT, PADDING, PROMPT, content, subscribe, until

RECEIVED = {"direction": "received"}


async def test_what_one_engine_stored_another_loads_byte_for_byte(world: World) -> None:
    prfaas, pd, prefill, decode = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    assert pd.held() == set(PROMPT)
    assert await decode.load(PROMPT) == [True] * len(PROMPT)
    for row, key in enumerate(PROMPT):
        assert decode.row(row, key.group) == content(key)
        assert decode.padding(row, key.group) == {PADDING}
    for group, count in (("0", 8), ("1", 2)):
        assert prfaas.metric("pool_blocks_stored_total", group=group) == count
        assert pd.metric("pool_blocks_loaded_total", group=group) == count


async def test_bytes_sent_are_bytes_received_and_padding_stays_at_home(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    data = sum(len(content(key)) for key in PROMPT)
    assert prfaas.metric("link_bytes_total", peer="pd-pool", direction="sent") == data
    assert pd.metric("link_bytes_total", peer="prfaas-pool", direction="received") == data
    blocks = [pd.node.store.get(LAYOUT.layout_id, key) for key in PROMPT]
    assert [bytes(block.data) for block in blocks if block] == [content(key) for key in PROMPT]


async def test_blocks_of_an_earlier_request_are_sent_with_the_rest(world: World) -> None:
    _, pd, prefill, decode = await world.two_sites()
    assert await prefill.store(PROMPT[:4])
    transfer = prefill.push()
    assert await prefill.store(PROMPT[2:6], transfer)
    unknown = BlockKey(0, b"\xff" * 32)
    prefill.push_done(transfer, rest=[*PROMPT[:2], unknown])
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    assert pd.held() == set(PROMPT[:6])
    assert await decode.look_up([*PROMPT[:7], unknown]) == [HIT] * 6 + [MISS] * 2


async def test_only_what_the_transfer_needs_is_pushed(world: World) -> None:
    _, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:4])
    assert await prefill.store(PROMPT[4:], transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    assert pd.held() == set(PROMPT[4:])


async def test_a_block_is_on_its_way_until_the_commit(world: World) -> None:
    _, pd, prefill, decode = await world.two_sites()
    transfer = prefill.push()
    assert await decode.look_up(PROMPT[:2], transfer) == [ON_ITS_WAY] * 2
    assert await prefill.store(PROMPT[:1], transfer)
    await until(lambda: pd.held() == {PROMPT[0]})
    assert await decode.look_up(PROMPT[:2], transfer) == [HIT, ON_ITS_WAY]
    assert await decode.look_up(PROMPT[:2]) == [HIT, MISS]
    prefill.push_done(transfer)
    await until(lambda: pd.node.inbound.known.num_open == 0)
    assert await decode.look_up(PROMPT[:2], transfer) == [HIT, MISS]


@pytest.mark.parametrize("ends", ["commit", "abort", "expiry"])
async def test_who_waits_for_blocks_is_told_once_that_no_more_come(world: World, ends: str) -> None:
    _, pd, prefill, decode = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:1], transfer)
    await until(lambda: pd.held() == {PROMPT[0]})
    for _ in range(2):
        assert await decode.look_up(PROMPT[:2], transfer) == [HIT, ON_ITS_WAY]
    assert decode.over == []
    match ends:
        case "commit":
            prefill.push_done(transfer)
        case "abort":
            pd.node.inbound.aborted(transfer, "nobody waits")
        case "expiry":
            pd.node.inbound.known.get(transfer).deadline_ns = 0  # type: ignore[union-attr]
            pd.node.inbound.expire()
    await until(lambda: decode.over)
    assert await decode.look_up(PROMPT[:2], transfer) == [HIT, MISS]
    assert decode.over == [transfer]


async def test_nothing_is_on_its_way_from_where_nobody_is_connected(world: World) -> None:
    _, _, _, decode = await world.two_sites()
    transfer = secrets.token_bytes(16)
    assert await decode.look_up(PROMPT[:1], transfer, source="nobody") == [MISS]
    assert await decode.look_up(PROMPT[:1], transfer, source="") == [MISS]
    assert await decode.look_up(PROMPT[:1], transfer) == [ON_ITS_WAY]


async def test_a_push_to_a_pool_nobody_knows_is_dropped_and_counted(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push("somewhere")
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    assert prfaas.metric("pool_blocks_dropped_total", reason="unknown_peer") == 1
    assert prfaas.held() == set(PROMPT)
    assert pd.held() == set()


async def test_many_transfers_at_once_all_arrive(world: World) -> None:
    _, pd, prefill, _ = await world.two_sites()
    prompts = [[BlockKey(0, HASHES[20 * n + m]) for m in range(20)] for n in range(20)]
    transfers = [prefill.push() for _ in prompts]
    for keys, transfer in zip(prompts, transfers, strict=True):
        assert await prefill.store(keys, transfer)
    for transfer in transfers:
        prefill.push_done(transfer)
    done = {"direction": "received", "state": "committed"}
    await until(lambda: pd.metric("transfers_total", **done) == len(prompts))
    assert pd.held() == {key for keys in prompts for key in keys}


async def test_what_arrived_is_a_usable_prefix(world: World) -> None:
    _, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    index = PrefixIndex()
    index.end_snapshot("pd-pool")
    for layout_id, key in pd.node.store.names():
        index.add("pd-pool", layout_id, [key])
    hashes = [bytes([n]) * 32 for n in range(9)]
    assert index.usable_hit("pd-pool", LAYOUT, hashes, 140) == 128


async def test_engines_of_one_pool_hand_blocks_over_without_a_link(world: World) -> None:
    pd = await world.start_pd()
    prefill, decode = await world.engine("pd-pool"), await world.engine("pd-pool")
    transfer = secrets.token_bytes(16)
    assert await decode.look_up(PROMPT[:1], transfer, source="pd-pool") == [MISS]
    assert prefill.send(Push(transfer_id=transfer, peer="pd-pool"))
    assert await prefill.store(PROMPT[:2], transfer)
    assert await decode.look_up(PROMPT[:3], transfer, source="pd-pool") == [HIT] * 2 + [ON_ITS_WAY]
    prefill.push_done(transfer)
    await until(lambda: decode.over == [transfer])
    assert await prefill.store(PROMPT[2:3])
    assert await decode.look_up(PROMPT[:4], transfer, source="pd-pool") == [HIT] * 3 + [MISS]
    assert pd.metric("pool_blocks_dropped_total", reason="unknown_peer") == 0


async def test_a_hand_over_ends_with_the_engine_that_stores(world: World) -> None:
    await world.start_pd()
    prefill, decode = await world.engine("pd-pool"), await world.engine("pd-pool")
    transfer = secrets.token_bytes(16)
    assert prefill.send(Push(transfer_id=transfer, peer="pd-pool"))
    assert await prefill.store(PROMPT[:1], transfer)
    assert await decode.look_up(PROMPT[1:2], transfer, source="pd-pool") == [ON_ITS_WAY]
    world.engines.remove(prefill)
    await asyncio.to_thread(prefill.close)
    while await decode.look_up(PROMPT[1:2], transfer, source="pd-pool") != [MISS]:
        pass


async def test_what_arrived_is_not_the_first_to_go_until_somebody_loaded_it(world: World) -> None:
    """Blocks of a prompt that decode waits for outlive prefixes that were used after them."""
    size = sum(len(content(key)) for key in PROMPT)
    _, pd, prefill, decode = await world.two_sites(memory_bytes=2 * size)
    transfer = prefill.push(bytes_max=size)
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed") == 1)
    assert pd.metric("pool_leased_blocks") == len(PROMPT)
    others = [BlockKey(0, bytes([100 + n]) * 32) for n in range(20)]
    assert await decode.store(others)
    assert set(PROMPT) <= pd.held()
    assert await decode.load(PROMPT) == [True] * len(PROMPT)
    assert pd.metric("pool_leased_blocks") == 0
    assert await decode.store([BlockKey(0, bytes([150 + n]) * 32) for n in range(20)])
    assert not set(PROMPT) & pd.held()


async def test_a_lease_ends_with_a_transfer_that_is_given_up(world: World) -> None:
    _, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:3], transfer)
    await until(lambda: pd.metric("pool_leased_blocks") == 3)
    pd.node.inbound.aborted(transfer, "client left")
    assert pd.metric("pool_leased_blocks") == 0
    assert pd.held() == set(PROMPT[:3])
    pd.node.store.lease((LAYOUT.layout_id, PROMPT[0]), pd.node.settings.clock_ns() + 10**8)
    await until(lambda: pd.metric("pool_leased_blocks") == 0)


async def test_a_lease_ends_where_a_commit_and_the_end_of_waiting_cross(world: World) -> None:
    """A gateway that leaves a late path tells so, whether or not the last block came meanwhile."""
    _, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed") == 1)
    assert pd.metric("pool_leased_blocks") == len(PROMPT)
    pd.node.inbound.aborted(transfer, "the blocks are late")
    assert pd.metric("pool_leased_blocks") == 0
    assert pd.held() == set(PROMPT)


@pytest.mark.parametrize("is_done", [True, False])
async def test_no_lease_outlives_the_request_it_was_for(world: World, is_done: bool) -> None:
    """An engine that has blocks in its own memory does not load them; the transfer goes on."""
    _, pd, prefill, _ = await world.two_sites()
    gateway = await subscribe(pd, world.identities)
    transfer = prefill.push()
    assert await prefill.store(PROMPT if is_done else PROMPT[:3], transfer)
    if is_done:
        prefill.push_done(transfer)
        await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") == 1)
    await until(lambda: pd.metric("pool_leased_blocks") == (len(PROMPT) if is_done else 3))
    gateway.channel.send(Release(transfer_id=transfer))
    await until(lambda: pd.metric("pool_leased_blocks") == 0)
    if not is_done:
        assert await prefill.store(PROMPT[3:], transfer)
        prefill.push_done(transfer)
        await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") == 1)
    assert pd.held() == set(PROMPT)
    assert pd.metric("pool_leased_blocks") == 0
    gateway.channel.close("done")
