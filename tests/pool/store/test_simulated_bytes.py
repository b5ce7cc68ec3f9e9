"""Bytes of simulated links beside those of pool nodes that send the same blocks."""

import itertools

import pytest

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.codec.gain import BlockCoding, PlannedCoding
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, KvPage, Layout, Plane
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.sim.resources.transport import make_link
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import LinkSetup
from prfaas.wire.fragments import block_digest
from tests.pool.bfloat16_numbers import normal
from tests.pool.coded_pair import Pairs
from tests.pool.sites import LAYOUT, until

TOKENS = 48
PAGE = KvPage(6, TOKENS, 8, 128, 128, is_token_major=False)
STATE_BYTES = 400_000
NUM_BLOCKS = 5
MODEL = Layout(
    LAYOUT.layout_id,
    TOKENS,
    "0",
    (
        CacheGroup(
            0,
            GroupKind.FULL_ATTENTION,
            TOKENS,
            PAGE.num_bytes,
            planes=(Plane("bfloat16", PAGE.num_bytes),),
            pages=(PAGE,),
        ),
        CacheGroup(
            1,
            GroupKind.LINEAR_STATE,
            TOKENS,
            STATE_BYTES,
            planes=(Plane("float32", STATE_BYTES),),
        ),
    ),
)


def blocks() -> list[tuple[BlockKey, StoredBlock]]:
    """The hand-off of a prompt: attention, then one state."""
    groups = [0] * NUM_BLOCKS + [1]
    found = []
    for number, group in enumerate(groups):
        key = BlockKey(group, bytes([number + 1]) * 32)
        data = normal(MODEL.groups[group].block_bytes // 2, seed=number)
        found.append((key, StoredBlock(bytearray(data), block_digest(LAYOUT.layout_id, key, data))))
    return found


def simulated_bytes(quality: Quality, codec: LinkCodec) -> float:
    """Bytes on the network for the same blocks in a simulation."""
    coding = PlannedCoding(codec, quality=quality, block_tokens=TOKENS)
    setup = LinkSetup(1e9, coding=BlockCoding(coding, "bfloat16", "float32"))
    clock = Clock()
    link = make_link(clock, setup, STATE_BYTES, lambda _: None)
    flow = link.open(Request(0, 0, 1, 1), NUM_BLOCKS * PAGE.num_bytes + STATE_BYTES)
    for _ in range(NUM_BLOCKS):
        link.add(flow, PAGE.num_bytes, last=False)
    link.add(flow, STATE_BYTES, last=True)
    clock.go()
    return link.sent_bytes


@pytest.mark.parametrize(
    ("quality", "codec"),
    [
        *itertools.product(Quality, [LinkCodec.AUTO]),
        (Quality.LOSSLESS, LinkCodec.RAW),
    ],
)
async def test_a_simulated_hand_off_has_the_bytes_of_a_real_one(
    pair: Pairs, quality: Quality, codec: LinkCodec
) -> None:
    found = await pair(codec, codec)
    for site in (found.prfaas, found.pd):
        site.node.link_room.layouts.learn(MODEL)
    coding = found.prfaas.node.links["pd-pool"].coding
    await until(lambda: codec is LinkCodec.RAW or coding._may_round)

    await found.send(blocks(), quality)

    block_bytes, wire_bytes = found.moved()
    assert block_bytes == NUM_BLOCKS * PAGE.num_bytes + STATE_BYTES
    assert simulated_bytes(quality, codec) == pytest.approx(wire_bytes, rel=0.005)
