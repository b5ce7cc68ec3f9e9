"""Fragments become blocks: in any order, once, and never touched again."""

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.link_scheduler import Fragment, LinkShare, OutgoingBlock
from prfaas.errors import PeerError
from prfaas.pool.receive.block_assembly import Assembly, NoRoomError
from prfaas.wire.fragments import FragmentPrefix, block_digest
from tests.pool.hands import BLOCKS_MAX, DIGEST, LAYOUT_ID, Hand, prefix, wanted


def test_fragments_make_a_block_in_any_order_and_twice_is_once() -> None:
    hand = Hand(Assembly(bytearray, 1000, BLOCKS_MAX))
    assert [hand.write(offset) for offset in (90, 30, 60, 30)] == [None] * 4
    frame = hand.write(0)
    assert frame is not None
    assert frame.is_intact


def test_who_brings_the_same_fragment_later_writes_it_alone() -> None:
    """The earlier connection may be dead, and nobody has noticed yet."""
    assembly = Assembly(bytearray, 1000, BLOCKS_MAX)
    earlier, later = Hand(assembly), Hand(assembly)
    assert earlier.claim(0) is not None
    for offset in (30, 60, 90):
        later.write(offset)
    frame = later.write(0)
    assert earlier.is_disowned
    assert frame is not None
    assert frame.is_intact


def test_what_a_lost_connection_did_not_finish_can_come_again() -> None:
    assembly = Assembly(bytearray, 1000, BLOCKS_MAX)
    lost, other = Hand(assembly), Hand(assembly)
    lost.claim(0)
    assembly.release(prefix(0), lost)
    for offset in (30, 60, 90):
        other.write(offset)
    assert other.write(0) is not None
    assert not lost.is_disowned


def test_a_fragment_of_a_transfer_that_has_just_ended_begins_no_block() -> None:
    """`forget` ran between the look at the transfer and the claim: nothing would drop the block."""
    assembly = Assembly(bytearray, 1000, BLOCKS_MAX)
    hand = Hand(assembly)
    assert assembly.claim(prefix(0), hand, lambda: False) is None
    assert assembly.unfinished_bytes == 0
    assert hand.claim(0) is not None


def test_overlapping_fragments_are_refused_before_a_digest_is_compared() -> None:
    assembly = Assembly(bytearray, 1000, BLOCKS_MAX)
    liar = Hand(assembly)
    liar.claim(1)
    for offset in (0, 30, 60):
        liar.write(offset)
    with pytest.raises(PeerError, match="overlap"):
        liar.write(90)


def test_a_peer_can_not_start_any_number_of_blocks() -> None:
    assembly = Assembly(bytearray, BLOCKS_MAX * 100, BLOCKS_MAX)
    hand = Hand(assembly)
    prefixes = [
        FragmentPrefix(b"t" * 16, LAYOUT_ID, BlockKey(n, b"h" * 32), DIGEST, 10, 0, 1)
        for n in range(BLOCKS_MAX + 1)
    ]
    for one in prefixes[:-1]:
        assert assembly.claim(one, hand, wanted) is not None
    with pytest.raises(NoRoomError):
        assembly.claim(prefixes[-1], hand, wanted)
    assembly.forget(b"t" * 16)
    assert assembly.written(prefixes[0], hand) is None
    assert assembly.claim(prefixes[-1], hand, wanted) is not None


def test_memory_that_is_freed_late_is_waited_for() -> None:
    """A link can be faster than the node's loop, which frees memory."""
    answers = [None, None, bytearray(1000)]
    assembly = Assembly(lambda _: answers.pop(0), 1000, BLOCKS_MAX)
    assert Hand(assembly).claim(0) is not None
    assert answers == []


def test_memory_that_is_never_freed_is_no_room() -> None:
    asked: list[int] = []
    assembly = Assembly(asked.append, 1000, BLOCKS_MAX)
    with pytest.raises(NoRoomError):
        Hand(assembly).claim(0)
    assert len(asked) > 1
    assert assembly.unfinished_bytes == 0


def test_blocks_of_a_connection_that_lags_are_put_together_when_it_comes() -> None:
    """Three connections take turns; one of them arrives after all the others, as when it stalls."""
    share, size, count = LinkShare(64 << 10), 73_728, 1_000
    for number in range(count):
        key, data = BlockKey(0, number.to_bytes(32, "big")), bytes([number % 256]) * size
        digest = block_digest(LAYOUT_ID, key, data)
        share.add(OutgoingBlock(b"t" * 16, (LAYOUT_ID, key), digest, data))
    taken: list[list[Fragment]] = [[], [], []]
    while share.queued_bytes:
        for connection, fragments in enumerate(taken):
            if (fragment := share.take(connection)) is not None:
                fragments.append(fragment)
    assembly = Assembly(bytearray, count * size, count)
    hand, whole = Hand(assembly), []
    for fragment in [*taken[1], *taken[2], *taken[0]]:
        named = prefix_of(fragment)
        place = assembly.claim(named, hand, wanted)
        assert place is not None
        place[:] = fragment.data
        whole.append(assembly.written(named, hand))
    blocks = [block for block in whole if block is not None]
    assert len(blocks) == count
    assert all(block.is_intact for block in blocks)
    assert assembly.unfinished_bytes == 0


def prefix_of(fragment: Fragment) -> FragmentPrefix:
    block = fragment.block
    layout_id, key = block.name
    at = fragment.offset, fragment.num_bytes
    return FragmentPrefix(block.transfer_id, layout_id, key, block.digest, len(block.data), *at)
