"""Rounded blocks on a link: only for a ticket of their class, checked by digest, within memory."""

import asyncio
import itertools
import secrets
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.core.codec.codecs import LOSSY, LOSSY_NUMBER, Form, LinkCodec, Quality, form_of
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, KvPage, Layout, Plane
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.errors import PeerError
from prfaas.pool.codec.loading import KERNELS
from prfaas.pool.codec.rounding import round_block
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.fragments import (
    CODED_PREFIX_BYTES,
    block_digest,
    decode_prefix,
    encode_stream_prefix,
)
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.codec import encode as frame
from prfaas.wire.messages.link import Abort, Decodes, Join, PoolHello
from prfaas.wire.tickets import TicketOpener
from tests.lab.faults import Fault
from tests.pool.bfloat16_numbers import normal
from tests.pool.coded_pair import MEMORY, Pair, Pairs
from tests.pool.conftest import World
from tests.pool.sites import LAYOUT, LOOPBACK, Peer, Site, dial, offer, seal, until

PAGE = KvPage(20, 16, 8, 64, 64, is_token_major=False)
STATE_BYTES = 400_000
MODEL = Layout(
    LAYOUT.layout_id,
    16,
    "0",
    (
        CacheGroup(
            0,
            GroupKind.FULL_ATTENTION,
            16,
            PAGE.num_bytes,
            planes=(Plane("bfloat16", PAGE.num_bytes),),
            pages=(PAGE,),
        ),
        CacheGroup(
            1, GroupKind.LINEAR_STATE, 64, STATE_BYTES, planes=(Plane("float32", STATE_BYTES),)
        ),
    ),
)
RATIOS = {Quality.FP8: 1.98, Quality.KIVI4: 2.9}


def a_block(number: int, group: int = 0) -> tuple[BlockKey, StoredBlock]:
    key = BlockKey(group, bytes([number]) * 32)
    data = normal(MODEL.groups[group].block_bytes // 2, seed=number)
    return key, StoredBlock(bytearray(data), block_digest(LAYOUT.layout_id, key, data))


def rounded(block: StoredBlock, quality: Quality, group: int = 0) -> tuple[bytes, bytes]:
    """Return the stream of a block, and what it decodes to."""
    form = form_of(MODEL.groups[group], quality)
    assert isinstance(form, Form)
    into = memoryview(bytearray(len(block.data)))
    return bytes(round_block(form, memoryview(block.data), into)), bytes(into)


async def rounding(pair: Pairs) -> Pair:
    """A pair whose link is ready to round."""
    found = await pair(LinkCodec.AUTO, LinkCodec.AUTO)
    for site in (found.prfaas, found.pd):
        site.node.link_room.layouts.learn(MODEL)
    link = found.prfaas.node.links["pd-pool"]
    await until(lambda: link.coding._may_round)
    return found


@pytest.mark.parametrize("quality", [Quality.FP8, Quality.KIVI4])
async def test_blocks_of_a_lossy_class_arrive_as_their_stream_decodes(
    pair: Pairs, quality: Quality
) -> None:
    found = await rounding(pair)
    blocks = [a_block(number) for number in range(6)]

    await found.send(blocks, quality)

    for key, block in blocks:
        data = found.arrived(key)
        assert data == rounded(block, quality)[1]
        stored = found.pd.node.store.get(LAYOUT.layout_id, key)
        assert stored is not None
        assert stored.digest == block_digest(LAYOUT.layout_id, key, data)
        assert stored.digest != block.digest
    block_bytes, wire_bytes = found.moved()
    assert block_bytes == 6 * PAGE.num_bytes
    assert block_bytes / wire_bytes == pytest.approx(RATIOS[quality], rel=0.02)


async def test_blocks_of_a_lossless_class_keep_every_bit_on_a_link_that_rounds(pair: Pairs) -> None:
    found = await rounding(pair)
    await found.send([a_block(1)], Quality.KIVI4)

    await found.move([a_block(number) for number in range(2, 5)])


@pytest.mark.parametrize(
    ("quality", "is_rounded"), [(Quality.FP8, False), (Quality.FP8_STATE, True)]
)
async def test_state_is_rounded_by_its_own_switch_alone(
    pair: Pairs, quality: Quality, is_rounded: bool
) -> None:
    found = await rounding(pair)
    key, block = a_block(1, group=1)

    await found.send([(key, block)], quality)

    expected = rounded(block, quality, 1)[1] if is_rounded else bytes(block.data)
    assert found.arrived(key) == expected


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [(LinkCodec.AUTO, LinkCodec.RAW), (LinkCodec.RAW, LinkCodec.AUTO)],
)
async def test_a_peer_without_codecs_gets_every_bit_of_a_lossy_class(
    pair: Pairs, sender: LinkCodec, receiver: LinkCodec
) -> None:
    found = await pair(sender, receiver)
    key, block = a_block(1)

    await found.send([(key, block)], Quality.FP8)

    assert found.arrived(key) == bytes(block.data)


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.RESET, Fault.CORRUPT])
async def test_a_rounded_transfer_survives_lost_connections(pair: Pairs, fault: Fault) -> None:
    found = await rounding(pair)
    blocks = [a_block(number) for number in range(16)]
    moving = asyncio.create_task(found.send(blocks, Quality.FP8))
    await until(lambda: found.proxy.num_bytes > 2 * PAGE.num_bytes)

    found.proxy.strike(fault, None)

    await moving
    for key, block in blocks:
        assert found.arrived(key) == rounded(block, Quality.FP8)[1]


def test_a_ticket_keeps_its_class_under_the_signature(identities: Path) -> None:
    opener = TicketOpener(identities / "ca.pem", frozenset({"gateway"}))
    sealed = seal(identities, secrets.token_bytes(16), quality=Quality.KIVI4_STATE)

    ticket = opener.open(sealed, 10**9 * 1_800_000_000)

    assert ticket.quality is Quality.KIVI4_STATE


# --- hostile peers ---


def parts(
    stream: bytes,
    transfer: bytes,
    *,
    decoded: bytes,
    codec: int = LOSSY_NUMBER,
    claimed: int | None = None,
) -> bytes:
    """A stream in fragments, as a peer may claim it.

    Args:
        stream: What is sent.
        transfer: Its transfer.
        decoded: Of these bytes is the digest.
        codec: Number of the codec.
        claimed: Size of the stream in the prefixes.
    """
    key, _ = a_block(1)
    form = form_of(MODEL.groups[0], Quality.FP8)
    assert isinstance(form, Form)
    name = LAYOUT.layout_id, key
    digest = block_digest(*name, decoded)
    whole = OutgoingBlock(transfer, name, digest, bytes(PAGE.num_bytes), form=form, stream=stream)
    found = b""
    for offset in range(0, len(stream), 1 << 18):
        fragment = Fragment(whole, offset, min(1 << 18, len(stream) - offset))
        prefix = bytearray(encode_stream_prefix(fragment, codec))
        size = len(stream) if claimed is None else claimed
        struct.pack_into(">I", prefix, CODED_PREFIX_BYTES - 4, size)
        found += prefix + fragment.data
    return found


async def a_source(site: Site, identities: Path) -> Peer:
    """A sender with a certificate that may round, to misbehave with."""
    peer = await dial(site, identities, "prfaas-pool")
    link = secrets.token_hex(8)
    peer.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link=link, codecs=[LOSSY]))
    await until(lambda: bool(peer.of(Decodes)))
    tls = identity_in(identities, "prfaas-pool").dialling().data
    _, peer.data = await asyncio.open_connection(LOOPBACK, site.port, ssl=tls)
    peer.data.write(frame(Join(pool="prfaas-pool", link=link, number=1)))
    return peer


STREAM, DECODED = rounded(a_block(1)[1], Quality.FP8)
ORIGINAL = bytes(a_block(1)[1].data)


def with_head(head: bytes) -> bytes:
    return head + STREAM[len(head) :]


LIES: dict[str, Callable[[bytes], bytes]] = {
    "the digest of what was rounded": lambda t: parts(STREAM, t, decoded=ORIGINAL),
    "mutated": lambda t: parts(STREAM[:-300] + bytes(300), t, decoded=DECODED),
    "all zeros": lambda t: parts(bytes(len(STREAM)), t, decoded=DECODED),
    "too many segments": lambda t: parts(with_head(b"\xff\xff"), t, decoded=DECODED),
    "segments for more than the block": lambda t: parts(
        with_head(STREAM[:4] + b"\xff\xff\xff\x0f"), t, decoded=DECODED
    ),
    "an unknown mode": lambda t: parts(with_head(STREAM[:2] + b"\x09"), t, decoded=DECODED),
    "a shorter stream": lambda t: parts(STREAM[:-1000], t, decoded=DECODED),
    "no smaller than its block": lambda t: parts(
        STREAM, t, decoded=DECODED, claimed=PAGE.num_bytes
    ),
    "beyond its stream": lambda t: parts(STREAM, t, decoded=DECODED, claimed=5000),
    "the codec of a fragment": lambda t: parts(STREAM, t, decoded=DECODED, codec=1),
    "an unknown codec": lambda t: parts(STREAM, t, decoded=DECODED, codec=9),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_stream_ends_the_link_and_leaves_nothing(
    world: World, identities: Path, lie: str
) -> None:
    site = await world.start("pd-pool", memory_bytes=MEMORY, link_codec=LinkCodec.AUTO)
    site.node.link_room.layouts.learn(MODEL)
    peer = await a_source(site, identities)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(identities, transfer, bytes_max=MEMORY // 2, quality=Quality.FP8))
    assert peer.data is not None

    peer.data.write(LIES[lie](transfer))

    await until(lambda: bool(peer.closed))
    await until(lambda: not site.node.inbound.known.num_open)
    assert site.held() == set()
    assert site.node.link_port.data.unfinished_bytes == 0
    await stop(peer)
    await until(lambda: KERNELS.rounding is not None)


@pytest.mark.parametrize("quality", [Quality.LOSSLESS, Quality.KIVI4, Quality.STATE])
async def test_a_rounded_block_is_refused_for_a_ticket_of_another_class(
    world: World, identities: Path, quality: Quality
) -> None:
    site = await world.start("pd-pool", memory_bytes=MEMORY, link_codec=LinkCodec.AUTO)
    site.node.link_room.layouts.learn(MODEL)
    peer = await a_source(site, identities)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(identities, transfer, bytes_max=MEMORY // 2, quality=quality))
    assert peer.data is not None

    peer.data.write(parts(STREAM, transfer, decoded=DECODED))

    await until(lambda: bool(peer.of(Abort)))
    assert site.held() == set()
    assert site.metric("tickets_refused_total", end="destination", reason="quality") == 1
    await stop(peer)


def test_the_prefix_of_a_part_is_that_of_its_stream() -> None:
    prefix = decode_prefix(parts(STREAM, bytes(16), decoded=DECODED)[:CODED_PREFIX_BYTES])

    assert (prefix.stream_bytes, prefix.block_bytes) == (len(STREAM), PAGE.num_bytes)
    assert prefix.payload_bytes == prefix.num_bytes == 1 << 18
    with pytest.raises(PeerError, match="a stream has a codec"):
        decode_prefix(parts(STREAM, bytes(16), decoded=DECODED, codec=0)[:CODED_PREFIX_BYTES])


def test_a_block_has_the_same_bytes_in_link_accounts_however_it_is_cut() -> None:
    form = form_of(MODEL.groups[0], Quality.KIVI4)
    assert isinstance(form, Form)
    key, block = a_block(1)
    whole = OutgoingBlock(bytes(16), (LAYOUT.layout_id, key), bytes(32), block.data, form=form)
    cuts = [*range(0, whole.wire_bytes, 7777), whole.wire_bytes]

    sizes = [
        replace(Fragment(whole, 0, 1), offset=at, num_bytes=end - at).block_bytes
        for at, end in itertools.pairwise(cuts)
    ]

    assert sum(sizes) == PAGE.num_bytes


async def stop(peer: Peer) -> None:
    peer.pinging.cancel()
    peer.channel.close("the test is over")
    if peer.data is not None:
        peer.data.close()
