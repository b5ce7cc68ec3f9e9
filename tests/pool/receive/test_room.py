"""Memory that a hostile source with a valid certificate can make a node hold."""

import itertools
import secrets
from pathlib import Path

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.pool.receive.inbound_transfers import PEER_SHARE, ReceiveLimits
from prfaas.pool.store.arena import LooseMemory
from prfaas.pool.store.block_store import BlockStore
from prfaas.wire.fragments import ReceivedBlock, block_digest, encode_prefix
from prfaas.wire.messages.link import Abort, Accepted, Arrived, Commit, Committed, Refused
from tests.pool.conftest import World
from tests.pool.mirror import Mirror
from tests.pool.sites import (
    HASHES,
    LAYOUT,
    MEMORY,
    PROMPT,
    Peer,
    Site,
    content,
    offer,
    source,
    until,
)

SHARE = MEMORY // PEER_SHARE
BLOCK = SHARE // 2 + 1
"""Of these, one peer may hold one, and no second."""
FRESH = itertools.cycle(HASHES)
"""Names of blocks that every ticket allows."""


def begun(transfer: bytes, num_bytes: int, sent: int = 1) -> bytes:
    """The first fragment of a block that nobody has heard of."""
    key, data = BlockKey(0, next(FRESH)), bytes(num_bytes)
    block = OutgoingBlock(transfer, (LAYOUT.layout_id, key), b"d" * 32, data)
    return encode_prefix(Fragment(block, 0, sent)) + data[:sent]


def say(peer: Peer, data: bytes) -> None:
    assert peer.data is not None
    peer.data.write(data)


async def bring_one(pd: Site, identities: Path, peer: Peer) -> None:
    """An honest transfer over the same connections."""
    transfer, data = secrets.token_bytes(16), bytearray(content(PROMPT[0]))
    digest = block_digest(LAYOUT.layout_id, PROMPT[0], data)
    peer.channel.send(offer(identities, transfer))
    peer.bring(ReceivedBlock(transfer, LAYOUT.layout_id, PROMPT[0], digest, data))
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=1))
    await until(lambda: bool(peer.of(Committed)))
    assert PROMPT[0] in pd.held()
    peer.channel.close("done")


LIMITS = ReceiveLimits(peer_bytes_min=0)


async def test_unfinished_blocks_of_one_peer_take_no_more_than_its_share(world: World) -> None:
    pd = await world.start_pd(receive=LIMITS)
    peer = await source(pd, world.identities)
    first, second = secrets.token_bytes(16), secrets.token_bytes(16)
    for transfer in (first, second):
        peer.channel.send(offer(world.identities, transfer, bytes_max=MEMORY // 4))
    await until(lambda: len(peer.of(Accepted)) == 2)
    say(peer, begun(first, BLOCK))
    await until(lambda: pd.node.link_port.data.unfinished_bytes == BLOCK)
    for _ in range(20):
        say(peer, begun(second, BLOCK))
    await until(lambda: bool(peer.of(Abort)))
    [told] = peer.of(Abort)
    assert isinstance(told, Abort)
    assert (told.transfer_id, told.kind) == (second, TransferEnd.NO_ROOM)
    assert pd.node.link_port.data.unfinished_bytes == BLOCK
    assert pd.node.inbound.known.is_open(first)
    peer.channel.send(Abort(transfer_id=first, reason="enough"))
    await bring_one(pd, world.identities, peer)


async def test_a_block_larger_than_all_memory_takes_none(world: World) -> None:
    pd = await world.start_pd(receive=LIMITS)
    peer = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    say(peer, begun(transfer, 2 * MEMORY))
    await until(lambda: bool(peer.of(Abort)))
    assert pd.node.store.room.loose_bytes == 0
    peer.channel.send(offer(world.identities, transfer))
    await until(lambda: len(peer.of(Abort)) == 2)
    assert pd.node.inbound.known.num_open == 0
    await bring_one(pd, world.identities, peer)


async def test_blocks_before_their_offers_take_no_more_than_a_share(world: World) -> None:
    pd = await world.start_pd(receive=LIMITS)
    peer = await source(pd, world.identities)
    for _ in range(3):
        key, data = BlockKey(0, secrets.token_bytes(32)), bytearray(BLOCK)
        digest = block_digest(LAYOUT.layout_id, key, data)
        transfer = secrets.token_bytes(16)
        peer.bring(ReceivedBlock(transfer, LAYOUT.layout_id, key, digest, data))
    await until(lambda: len(peer.of(Abort)) == 2)
    assert pd.metric("pool_blocks_dropped_total", reason="no_room") == 2
    # The thread that reads lets go of a dropped block just after it has told so.
    await until(lambda: pd.node.store.room.loose_bytes <= SHARE)
    await bring_one(pd, world.identities, peer)


async def test_memory_beside_the_store_has_a_limit_and_comes_back() -> None:
    held = BlockStore(100, Mirror(), loose_bytes_max=100)
    key = BlockKey(0, b"k" * 32)
    assert held.put(b"L" * 32, key, bytes(80), b"d" * 32)
    buffers = [held.room.receive_buffer(60) for _ in range(2)]
    assert [buffer is not None for buffer in buffers] == [True, False]
    assert held.room.loose_bytes == 60
    assert held.room.receive_buffer(101) is None
    held.room.keep_room()
    assert (b"L" * 32, key) not in held
    inside = held.room.receive_buffer(60)
    assert isinstance(inside, memoryview)
    del buffers
    assert held.room.loose_bytes == 60


def test_loose_memory_counts_what_is_still_seen() -> None:
    loose = LooseMemory(100)
    view = memoryview(loose.allocate(100) or b"")[10:20]
    assert loose.allocate(1) is None
    assert loose.used_bytes == 100
    del view
    assert loose.allocate(100) is not None


async def test_one_transfer_too_many_is_refused_and_the_open_ones_go_on(world: World) -> None:
    pd = await world.start_pd(receive=ReceiveLimits(transfers_max=2))
    peer = await source(pd, world.identities)
    opened = [secrets.token_bytes(16) for _ in range(2)]
    for transfer in [*opened, secrets.token_bytes(16)]:
        peer.channel.send(offer(world.identities, transfer))
    await until(lambda: bool(peer.of(Refused)))
    [told] = peer.of(Refused)
    assert told.reason == "no_room"
    assert all(pd.node.inbound.known.is_open(transfer) for transfer in opened)
    peer.channel.send(Abort(transfer_id=opened[0], reason="enough"))
    await until(lambda: pd.node.inbound.known.num_open == 1)
    peer.channel.send(offer(world.identities, secrets.token_bytes(16)))
    await until(lambda: len(peer.of(Accepted)) == 3)
    assert not pd.node.inbound.known.is_offered(opened[0], "prfaas-pool")
    assert pd.node.inbound.known.is_open(opened[1])
    for taken in peer.of(Accepted):
        peer.channel.send(Abort(transfer_id=taken.transfer_id, reason="enough"))
    await until(lambda: pd.node.inbound.known.num_open == 0)
    peer.channel.close("done")


async def test_a_block_of_another_size_gives_way_to_an_engines(world: World) -> None:
    """It came before there was an engine that knows the layout."""
    pd = await world.start_pd(receive=LIMITS)
    assert pd.node.store.put(LAYOUT.layout_id, PROMPT[0], bytearray(7), b"d" * 32)
    engine = await world.engine("pd-pool")
    assert await engine.load(PROMPT[:1]) == [False]
    assert await engine.store(PROMPT[:1])
    assert await engine.load(PROMPT[:1]) == [True]


def num_arrived(peer: Peer) -> int:
    """Blocks that were acknowledged."""
    return sum(len(one.keys) for one in peer.of(Arrived))


async def test_a_fragment_that_came_again_leaves_no_second_copy_of_its_block(world: World) -> None:
    """A connection that is lost just before its block was whole: its sender cannot know."""
    limits = ReceiveLimits(peer_bytes_min=0, unfinished_blocks_max=2)
    pd = await world.start_pd(receive=limits)
    peer = await source(pd, world.identities)
    transfer, port = secrets.token_bytes(16), pd.node.link_port
    for count, key in enumerate(PROMPT[:4], 1):
        data = bytearray(content(key))
        digest = block_digest(LAYOUT.layout_id, key, data)
        whole = OutgoingBlock(transfer, (LAYOUT.layout_id, key), digest, data)
        again = Fragment(whole, 0, 10)
        peer.bring(ReceivedBlock(transfer, LAYOUT.layout_id, key, digest, data))
        say(peer, encode_prefix(again) + again.data)
        if count == 1:
            peer.channel.send(offer(world.identities, transfer))
        await until(lambda: num_arrived(peer) == count)  # noqa: B023
        await until(lambda: port.data.unfinished_bytes == 0)
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=4))
    await until(lambda: bool(peer.of(Committed)))
    peer.channel.close("done")
