"""Sharing a link: nothing is lost, nothing goes twice, urgent bytes go first."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.link_scheduler import (
    BURST_NS,
    URGENT_BYTES,
    Fragment,
    LinkShare,
    OutgoingBlock,
    TenantShare,
)

SIZE = 1000
NOBODY = TenantShare()


def block(
    transfer: int, number: int, num_bytes: int = SIZE, tenant: TenantShare = NOBODY
) -> OutgoingBlock:
    name = (b"L" * 32, BlockKey(0, bytes([number]) * 32))
    return OutgoingBlock(bytes([transfer]) * 16, name, b"d" * 32, bytes(num_bytes), tenant)


def drain(share: LinkShare, connection: int = 0) -> list[Fragment]:
    taken = []
    while (fragment := share.take(connection)) is not None:
        taken.append(fragment)
    return taken


def test_a_block_is_cut_and_covered_exactly() -> None:
    share = LinkShare(300)
    share.add(block(1, 1))
    assert [(f.offset, f.num_bytes) for f in drain(share)] == [
        (0, 300),
        (300, 300),
        (600, 300),
        (900, 100),
    ]
    assert share.queued_bytes == 0
    assert share.in_flight_bytes == SIZE


def test_a_first_block_is_cut_smaller() -> None:
    """More of it goes over the connections that are free first."""
    share = LinkShare(500)
    share.first_fragment_bytes = 250
    for number in range(3):
        share.add(block(1, number))
    assert [fragment.num_bytes for fragment in drain(share)] == [250] * 4 + [500] * 4


def test_a_first_block_goes_before_anothers_bulk() -> None:
    share = LinkShare(SIZE)
    for number in range(10):
        share.add(block(1, number))
    share.take(0)
    share.take(0)
    late = block(2, 0)
    share.add(late)
    fragment = share.take(0)
    assert fragment is not None
    assert fragment.block is late


def test_the_small_rest_of_a_finished_transfer_goes_first() -> None:
    share = LinkShare(URGENT_BYTES)
    for number in range(6):
        share.add(block(1, number, URGENT_BYTES))
    share.take(0)
    share.add(block(2, 0, 10))
    share.take(0)
    share.add(block(2, 1, 10))
    share.finish(b"\2" * 16)
    fragment = share.take(0)
    assert fragment is not None
    assert fragment.block.transfer_id == b"\2" * 16


def test_urgent_bytes_do_not_keep_bulk_waiting_for_ever() -> None:
    share = LinkShare(1 << 20)
    for number in range(4):
        share.add(block(1, number, 1 << 20))
    share.take(0)
    for transfer in range(2, 60):
        share.add(block(transfer, 0, 1 << 20))
    taken = [share.take(0) for _ in range(30)]
    assert any(f is not None and f.block.transfer_id == b"\1" * 16 for f in taken)


def test_transfers_share_by_bytes() -> None:
    share = LinkShare(100)
    for number in range(20):
        share.add(block(1, number))
        share.add(block(2, number))
    taken = [share.take(0) for _ in range(200)]
    mine = sum(f.num_bytes for f in taken if f and f.block.transfer_id == b"\1" * 16)
    assert abs(mine - 10_000) <= 2 * SIZE


def test_tenants_share_by_weight_however_many_transfers_they_have() -> None:
    share = LinkShare(100)
    paying, free = TenantShare("paying", weight=3), TenantShare("free")
    for number in range(40):
        share.add(block(1, number, tenant=paying))
        for transfer in (2, 3, 4):
            share.add(block(transfer, number, tenant=free))
    taken = [share.take(0) for _ in range(400)]
    bytes_paid = sum(f.num_bytes for f in taken if f and f.block.tenant == paying)
    assert abs(bytes_paid - 30_000) <= 4 * SIZE


def test_a_tenant_ahead_of_its_rate_lets_the_others_go_first() -> None:
    share, slow = LinkShare(SIZE), TenantShare("slow", bytes_per_s=20 * SIZE)
    for number in range(200):
        share.add(block(1, number, tenant=slow))
        share.add(block(2, number, tenant=TenantShare("other")))
    second = 10**9
    taken = [share.take(0, now) for now in range(second, 2 * second, second // 150)]
    mine = sum(f.num_bytes for f in taken if f and f.block.tenant == slow)
    assert 19 * SIZE <= mine <= 20 * SIZE * (1 + BURST_NS / second) + SIZE


def test_a_link_is_never_idle_for_a_rate() -> None:
    share, slow = LinkShare(SIZE), TenantShare("slow", bytes_per_s=1)
    for number in range(3):
        share.add(block(1, number, tenant=slow))
    assert share.queued_by_tenant == {"slow": 3 * SIZE}
    assert len([share.take(0, 10**9) for _ in range(3)]) == 3
    assert share.queued_by_tenant == {}


def test_a_tenant_saves_nothing_up() -> None:
    share = LinkShare(SIZE)
    for number in range(60):
        share.add(block(1, number, tenant=TenantShare("early")))
    for _ in range(30):
        share.take(0)
    for number in range(30):
        share.add(block(2, number, tenant=TenantShare("late")))
    taken = [share.take(0) for _ in range(20)]
    early = sum(1 for f in taken if f and f.block.tenant.name == "early")
    assert 8 <= early <= 12


def test_what_a_lost_connection_carried_goes_again_and_first() -> None:
    share = LinkShare(500)
    first, second = block(1, 1), block(1, 2)
    share.add(first)
    share.add(second)
    lost = [share.take(7), share.take(7), share.take(7)]
    share.arrived(first.transfer_id, first.name)
    share.lost(7)
    again = drain(share, 8)
    assert [(f.block, f.offset) for f in again] == [(second, 0), (second, 500)]
    assert lost[2] == again[0]
    share.lost(7)
    assert drain(share, 8) == []


def test_a_dropped_transfer_leaves_nothing() -> None:
    share = LinkShare(300)
    share.add(block(1, 1))
    share.take(0)
    share.drop(b"\1" * 16)
    share.lost(0)
    share.finish(b"\1" * 16)
    assert share.take(0) is None
    assert share.queued_bytes == share.in_flight_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("atlr"), st.integers(0, 3)), max_size=60))
def test_every_byte_goes_until_it_has_arrived(steps: list[tuple[str, int]]) -> None:
    share, blocks, number = LinkShare(300), [], 0
    for step, which in steps:
        if step == "a":
            blocks.append(
                block(which, number, tenant=TenantShare(str(which % 3), which + 1, which * SIZE))
            )
            share.add(blocks[-1])
            number += 1
        elif step == "t":
            share.take(which, number)
        elif step == "l":
            share.lost(which)
        elif blocks:
            done = blocks.pop(which % len(blocks))
            share.arrived(done.transfer_id, done.name)
    for connection in range(4):
        share.lost(connection)
    covered: dict[OutgoingBlock, list[int]] = {}
    for fragment in drain(share):
        covered.setdefault(fragment.block, []).append(fragment.offset)
    assert {b: sorted(o) for b, o in covered.items()} == {b: [0, 300, 600, 900] for b in blocks}
    assert share.queued_bytes == 0
    assert share.in_flight_bytes == SIZE * len(blocks)
