"""Codecs on a link between two pool nodes: every byte arrives, peers without them get raw."""

import asyncio
import dataclasses
import random
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from prfaas.core.codec.codecs import EXPONENT_WINDOW, EXPONENT_WINDOW_NUMBER, LinkCodec
from prfaas.core.kv.blocks import Plane
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.pool.codec.exponent_window import coded_bytes_max, encode
from prfaas.wire.fragments import encode_coded_prefix
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.codec import encode as frame
from prfaas.wire.messages.link import Decodes, Join, PoolHello, Resumed
from tests.lab.faults import Fault
from tests.pool.bfloat16_numbers import normal
from tests.pool.coded_pair import BLOCK_BYTES, MEMORY, MODEL, Pairs, a_block
from tests.pool.conftest import World
from tests.pool.sites import LAYOUT, LOOPBACK, Peer, Site, dial, offer, until


async def test_bfloat16_travels_coded_and_arrives_bit_by_bit(pair: Pairs) -> None:
    found = await pair(LinkCodec.ALWAYS, LinkCodec.AUTO)

    await found.move([a_block(number) for number in range(8)])

    block_bytes, wire_bytes = found.moved()
    assert block_bytes == 8 * BLOCK_BYTES
    assert block_bytes / wire_bytes > 1.32
    assert found.prfaas.metric("codec_seconds_total", direction="sent") > 0
    assert found.pd.metric("codec_seconds_total", direction="received") > 0
    link = found.prfaas.node.links["pd-pool"]
    await until(lambda: link.telemetry.coding_ratio > 1.05)
    await until(lambda: found.prfaas.metric("link_coding_ratio", peer="pd-pool") > 1.05)


async def test_state_and_noise_go_raw_beside_coded_blocks(pair: Pairs) -> None:
    found = await pair(LinkCodec.ALWAYS, LinkCodec.AUTO)
    noise = random.Random(0)

    await found.move(
        [a_block(number, number % 2) for number in range(6)]
        + [a_block(9 + n, 0, noise.randbytes(BLOCK_BYTES)) for n in range(3)]
    )

    block_bytes, wire_bytes = found.moved()
    saved = block_bytes - wire_bytes
    assert 3 * BLOCK_BYTES * 0.2 < saved <= 3 * BLOCK_BYTES * 0.25


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [(LinkCodec.ALWAYS, LinkCodec.RAW), (LinkCodec.RAW, LinkCodec.AUTO)],
)
async def test_a_peer_without_codecs_gets_raw(
    pair: Pairs, sender: LinkCodec, receiver: LinkCodec
) -> None:
    found = await pair(sender, receiver)

    await found.move([a_block(number) for number in range(4)])

    block_bytes, wire_bytes = found.moved()
    assert wire_bytes == block_bytes == 4 * BLOCK_BYTES


async def test_blocks_of_a_layout_that_nobody_announced_go_raw(pair: Pairs) -> None:
    found = await pair(LinkCodec.ALWAYS, LinkCodec.AUTO)
    found.prfaas.node.link_room.layouts._groups.clear()

    await found.move([a_block(0)])

    assert found.moved() == (BLOCK_BYTES, BLOCK_BYTES)


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.RESET, Fault.CORRUPT])
async def test_a_coded_transfer_survives_lost_connections(pair: Pairs, fault: Fault) -> None:
    found = await pair(LinkCodec.ALWAYS, LinkCodec.AUTO)
    moving = asyncio.create_task(found.move([a_block(number) for number in range(12)]))
    await until(lambda: found.proxy.num_bytes > 3 * BLOCK_BYTES)

    found.proxy.strike(fault, None)

    await moving


async def test_an_engine_announces_the_planes_of_its_blocks(world: World) -> None:
    site = await world.start_pd()
    await world.engine("pd-pool")

    await until(lambda: site.node.link_room.layouts.group(LAYOUT.layout_id, 0) is not None)


# --- hostile peers ---


def wire(
    data: bytes,
    transfer: bytes,
    *,
    codec: int = EXPONENT_WINDOW_NUMBER,
    stream: bytes | None = None,
    claimed: int | None = None,
) -> bytes:
    """A block as one coded fragment, or something that pretends to be one."""
    key, block = a_block(1, 0, data)
    size = len(data) if claimed is None else claimed
    whole = OutgoingBlock(transfer, (LAYOUT.layout_id, key), block.digest, bytes(size))
    if stream is None:
        scratch = memoryview(bytearray(coded_bytes_max(len(data))))
        stream = bytes(encode(memoryview(data), (Plane("bfloat16", len(data)),), scratch) or b"")
    return encode_coded_prefix(Fragment(whole, 0, size), codec, len(stream)) + stream


async def a_source(site: Site, identities: Path, *, is_agreed: bool = True) -> Peer:
    """A sender with a certificate that may code, to misbehave with."""
    if is_agreed:
        # Kernels are loaded for the first layout that can be coded; blocks here are of another.
        site.node.link_room.layouts.learn(dataclasses.replace(MODEL, layout_id=b"M" * 32))
    peer = await dial(site, identities, "prfaas-pool")
    link = secrets.token_hex(8)
    codecs = [EXPONENT_WINDOW] if is_agreed else []
    peer.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link=link, codecs=codecs))
    await until(lambda: bool(peer.of(Decodes if is_agreed else Resumed)))
    tls = identity_in(identities, "prfaas-pool").dialling().data
    _, peer.data = await asyncio.open_connection(LOOPBACK, site.port, ssl=tls)
    peer.data.write(frame(Join(pool="prfaas-pool", link=link, number=1)))
    return peer


SMALL = normal(1000)
"""Of a layout that the node does not know: any size may be its."""
HEADER = b"\x01\x7f\xd0\x07\x00\x00"
LIES: dict[str, Callable[[bytes], bytes]] = {
    "mutated": lambda t: wire(SMALL, t)[:-300] + bytes(300),
    "noise": lambda t: wire(SMALL, t, stream=random.Random(1).randbytes(700)),
    "cut stream": lambda t: wire(SMALL, t, stream=HEADER),
    "for more bytes than it has": lambda t: wire(SMALL, t, claimed=1 << 20),
    "for fewer bytes than it has": lambda t: wire(SMALL, t, claimed=1600),
    "no smaller than what it is for": lambda t: wire(SMALL, t, stream=bytes(2000)),
    "longer than a fragment": lambda t: wire(SMALL, t, claimed=(1 << 20) + 1),
    "a bomb of empty chunks": lambda t: wire(SMALL, t, stream=bytes(6) * 200),
    "an unknown codec": lambda t: wire(SMALL, t, codec=7),
    "the number of no codec": lambda t: wire(SMALL, t, codec=0),
    "a bomb within a block": lambda t: wire(SMALL, t, stream=HEADER * 50, claimed=1 << 20),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_fragment_ends_the_link_and_leaves_nothing(
    world: World, identities: Path, lie: str
) -> None:
    site = await world.start("pd-pool", memory_bytes=MEMORY, link_codec=LinkCodec.AUTO)
    peer = await a_source(site, identities)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(identities, transfer, bytes_max=MEMORY // 2))
    assert peer.data is not None

    peer.data.write(LIES[lie](transfer))

    await until(lambda: bool(peer.closed))
    await until(lambda: not site.node.inbound.known.num_open)
    assert site.metric("connections_refused_total", port="link") == 1
    assert site.held() == set()
    assert site.node.link_port.data.unfinished_bytes == 0
    await stop(peer)
    await still_takes(site, identities)


async def test_a_coded_fragment_that_nobody_agreed_on_ends_the_link(
    world: World, identities: Path
) -> None:
    site = await world.start("pd-pool", memory_bytes=MEMORY, link_codec=LinkCodec.AUTO)
    peer = await a_source(site, identities, is_agreed=False)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(identities, transfer))
    assert peer.data is not None

    peer.data.write(wire(SMALL, transfer))

    await until(lambda: bool(peer.closed))
    assert site.held() == set()
    await stop(peer)


async def test_a_coded_block_of_another_size_than_the_layouts_ends_the_link(
    world: World, identities: Path
) -> None:
    site = await world.start("pd-pool", memory_bytes=MEMORY, link_codec=LinkCodec.AUTO)
    site.node.link_room.layouts.learn(MODEL)
    peer = await a_source(site, identities)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(identities, transfer))
    assert peer.data is not None

    peer.data.write(wire(SMALL, transfer))

    await until(lambda: bool(peer.closed))
    assert site.held() == set()
    await stop(peer)


async def still_takes(site: Site, identities: Path) -> None:
    """A peer that keeps to the protocol is served."""
    peer = await a_source(site, identities)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(identities, transfer))
    assert peer.data is not None
    peer.data.write(wire(SMALL, transfer))
    key, block = a_block(1, 0, SMALL)
    await until(lambda: key in site.held())
    stored = site.node.store.get(LAYOUT.layout_id, key)
    assert stored is not None
    assert stored.data == block.data
    await stop(peer)
    await until(lambda: not site.node.inbound.known.num_open)


async def stop(peer: Peer) -> None:
    peer.pinging.cancel()
    peer.channel.close("the test is over")
    if peer.data is not None:
        peer.data.close()
        with suppress(OSError, ssl.SSLError):
            await peer.data.wait_closed()
