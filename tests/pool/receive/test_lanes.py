"""Lanes: several threads that move the bytes of one link."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.receive.block_assembly import Assembly, FragmentReader
from prfaas.wire.fragments import FragmentPrefix, ReceivedBlock, encode_prefix
from prfaas.wire.sealed.records import ConnectionNumbers, SealError
from tests.pool.conftest import World
from tests.pool.hands import BLOCKS_MAX, DATA, DIGEST, KEY, LAYOUT_ID, PART, Hand, prefix
from tests.pool.link_rig import MEMORY, Rig
from tests.pool.sites import LOOPBACK, Site, until
from tests.pool.taps import Tap

LANES, CONNECTIONS = 4, 8
OFFSETS = range(0, len(DATA), PART)


async def linked(world: World, encryption: LinkEncryption, **settings: object) -> Rig:
    both = {"memory_bytes": MEMORY, "link_encryption": encryption, "link_lanes": LANES} | settings
    pd = await world.start_pd(**both)
    prfaas = await world.start("prfaas-pool", link_connections={"pd-pool": CONNECTIONS}, **both)
    rig = Rig(world.relay, prfaas, pd, world.identities)  # type: ignore[arg-type]
    await until(lambda: rig.link.telemetry.num_connections == CONNECTIONS)
    return rig


def lanes_in_use(site: Site) -> int:
    return sum(lane.thread_id is not None for lane in site.node.link_room.io.lanes)


@pytest.mark.parametrize("codec", [LinkCodec.RAW, LinkCodec.ALWAYS])
async def test_sealed_connections_are_spread_over_the_lanes(world: World, codec: LinkCodec) -> None:
    rig = await linked(world, LinkEncryption.SEALED, link_codec=codec)
    transfer = rig.begin()
    blocks = rig.push(transfer, 12)
    rig.link.finish(transfer)
    await rig.all_there(blocks)
    assert [lanes_in_use(site) for site in (rig.prfaas, rig.pd)] == [LANES, LANES]


@pytest.mark.parametrize("encryption", [LinkEncryption.TLS, LinkEncryption.NETWORK])
async def test_connections_that_write_into_blocks_as_they_read_share_a_lane(
    world: World, encryption: LinkEncryption
) -> None:
    """Their fragments have a place in a block while they wait for the network."""
    rig = await linked(world, encryption)
    transfer = rig.begin()
    blocks = rig.push(transfer, 4)
    rig.link.finish(transfer)
    await rig.all_there(blocks)
    assert lanes_in_use(rig.pd) == 1


async def test_what_was_on_a_lost_connection_arrives_over_other_lanes(
    world: World,
    tap: Tap,
) -> None:
    """Fragments come twice: the receiver may still have those of a connection that is gone."""
    settings = {"memory_bytes": MEMORY, "link_encryption": LinkEncryption.SEALED}
    pd = await world.start("pd-pool", link_lanes=LANES, **settings)
    tap.target = pd.port
    prfaas = await world.start(
        "prfaas-pool",
        link_lanes=LANES,
        link_connections={"pd-pool": CONNECTIONS},
        peers={"pd-pool": (LOOPBACK, tap.port)},
        **settings,
    )
    rig = Rig(tap, prfaas, pd, world.identities)  # type: ignore[arg-type]
    await until(lambda: rig.link.telemetry.num_connections == CONNECTIONS)
    left = [3]

    def cut_three(number: int, data: bytes) -> bytes | None:
        is_data = tap.carried[number][:4] == b"PFKS"
        left[0] -= is_data
        return None if is_data and left[0] >= 0 else data

    tap.change = cut_three
    transfer = rig.begin()
    blocks = rig.push(transfer, 12)
    rig.link.finish(transfer)
    await rig.all_there(blocks)
    assert left[0] < 0


def test_a_fragment_that_another_lane_opens_is_waited_for() -> None:
    assembly = Assembly(bytearray, 1000, BLOCKS_MAX)
    busy, later = Hand(assembly), Hand(assembly)
    busy.is_elsewhere = True
    place = busy.claim(0)
    assert place is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(later.claim, 0)
        place[:] = DATA[:PART]
        assembly.written(prefix(0), busy)
        assert waiting.result() is None


def test_a_fragment_that_another_lane_gave_up_is_taken_over() -> None:
    assembly = Assembly(bytearray, 1000, BLOCKS_MAX)
    busy, later = Hand(assembly), Hand(assembly)
    busy.is_elsewhere = True
    busy.claim(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(later.claim, 0)
        assembly.release(prefix(0), busy)
        assert waiting.result() is not None


def test_a_fragment_that_another_lane_never_gives_up_is_dropped() -> None:
    assembly = Assembly(bytearray, 1000, BLOCKS_MAX)
    busy, later = Hand(assembly), Hand(assembly)
    busy.is_elsewhere = True
    busy.claim(0)
    assert later.claim(0) is None


def encoded(offset: int) -> bytes:
    """A fragment of the block as it is sent."""
    name = LAYOUT_ID, KEY
    block = OutgoingBlock(b"t" * 16, name, DIGEST, memoryview(DATA))
    one = Fragment(block, offset, min(PART, len(DATA) - offset))
    return encode_prefix(one) + bytes(one.data)


class Taker:
    """Owner of a connection that takes everything."""

    peer, link, num_bytes = "prfaas-pool", "l", 0
    decoding = SimpleNamespace(came=lambda *_: None)

    def __init__(self) -> None:
        self.blocks: list[ReceivedBlock] = []

    def takes(self, _: FragmentPrefix) -> bool:
        return True

    def no_room(self, _: FragmentPrefix) -> None:
        raise AssertionError("there is room")

    def deliver(self, block: ReceivedBlock, _: FragmentReader) -> bool:
        self.blocks.append(block)
        return True


async def test_a_stalled_connection_gives_way_to_one_on_another_lane() -> None:
    """As after a change from TLS to sealed: one holds its place while it waits for the network."""
    assembly, takers = Assembly(bytearray, 1000, BLOCKS_MAX), [Taker(), Taker()]
    io, pairs = IoThread(2), [socket.socketpair() for _ in takers]

    async def read(taker: Taker, connection: socket.socket) -> None:
        connection.setblocking(False)
        reader = FragmentReader(taker, connection, assembly, None, 1 << 20)  # type: ignore[arg-type]
        try:
            await reader.ended
        finally:
            reader.stop()

    for lane, taker, (_, connection) in zip(io.lanes, takers, pairs, strict=True):
        lane.call(lambda on=lane, t=taker, c=connection: on.start(read(t, c)))
    streams = [encoded(offset) for offset in OFFSETS]
    pairs[0][0].sendall(streams[0][:-5])
    await until(lambda: assembly.unfinished_bytes > 0)

    pairs[1][0].sendall(b"".join(streams))

    await until(lambda: bool(takers[1].blocks))
    pairs[0][0].sendall(streams[0][-5:])
    for sender, _ in pairs:
        sender.shutdown(socket.SHUT_WR)
    await until(lambda: assembly.unfinished_bytes == 0)
    await io.close()
    (block,) = takers[1].blocks
    assert bytes(block.data) == DATA
    assert not takers[0].blocks
    for pair in pairs:
        for each in pair:
            each.close()


def test_what_was_written_into_a_block_that_was_dropped_does_not_count_in_the_next() -> None:
    """Its bytes are in other memory: the new block would be complete without them."""
    assembly = Assembly(bytearray, 1000, BLOCKS_MAX)
    late, other = Hand(assembly), Hand(assembly)
    late.claim(0)
    assembly.forget(prefix(0).transfer_id)
    for offset in OFFSETS[1:]:
        other.write(offset)
    assert assembly.written(prefix(0), late) is None
    block = other.write(0)
    assert block is not None
    assert block.is_intact


def test_lanes_that_bring_the_same_fragments_make_each_block_once_and_right() -> None:
    for _ in range(200):
        assembly, start = Assembly(bytearray, 1000, BLOCKS_MAX), threading.Barrier(LANES)

        def bring(
            first: int, assembly: Assembly = assembly, start: threading.Barrier = start
        ) -> list[ReceivedBlock]:
            hand, made = Hand(assembly), []
            hand.is_elsewhere = True
            start.wait()
            for index in range(len(OFFSETS)):
                block = hand.write(OFFSETS[(index + first) % len(OFFSETS)])
                if block is not None:
                    made.append(block)
            return made

        with ThreadPoolExecutor(LANES) as pool:
            made = [block for blocks in pool.map(bring, range(LANES)) for block in blocks]
        assert made
        assert all(block.is_intact for block in made)


def test_a_number_is_used_once_however_many_lanes_claim_it() -> None:
    numbers, count = ConnectionNumbers(), 500

    def claim(number: int) -> bool:
        try:
            numbers.claim(number)
        except SealError:
            return False
        return True

    with ThreadPoolExecutor(LANES) as pool:
        claims = list(pool.map(claim, [number for number in range(count) for _ in range(LANES)]))
    assert sum(claims) == count


async def test_the_lanes_of_a_node_end_with_it() -> None:
    io, begun = IoThread(LANES), threading.Barrier(LANES + 1)
    lanes = [io.take_lane() for _ in range(LANES)]
    assert lanes == io.lanes
    for lane in lanes:
        lane.call(begun.wait)
    await asyncio.to_thread(begun.wait)
    assert len({lane.thread_id for lane in lanes}) == LANES
    await io.close()
    assert not any(lane.call(print) for lane in lanes)
    assert not io.has_failed
