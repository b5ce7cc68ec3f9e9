"""Known transfers: all open ones, and the last ended ones."""

from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
from prfaas.pool.receive.transfer_registry import KnownTransfers


def begun(known: KnownTransfers, number: int) -> Transfer:
    transfer = Transfer(bytes([number]) * 16, "peer", 0, 10)
    known.began(transfer)
    return transfer


def ended(known: KnownTransfers, transfer: Transfer) -> None:
    assert transfer.apply(TransferEnd.ABORTED, "tried")
    known.ended(transfer)


def test_the_oldest_end_makes_room_and_what_is_open_stays() -> None:
    known = KnownTransfers(3)
    first, second, third = (begun(known, number) for number in (1, 2, 3))
    assert known.is_full
    ended(known, second)
    ended(known, first)
    assert (known.num_open, known.open(), known.is_full) == (1, [third], False)
    fourth = begun(known, 4)
    assert known.get(second.transfer_id) is None
    assert known.get(first.transfer_id) is first
    assert known.open() == [third, fourth]


def test_a_name_that_is_used_again_is_not_forgotten_with_its_first_use() -> None:
    known = KnownTransfers(1)
    ended(known, begun(known, 1))
    again = begun(known, 1)
    begun(known, 2)
    assert known.get(again.transfer_id) is again


def test_of_a_name_that_is_used_again_the_last_end_counts() -> None:
    known = KnownTransfers(2)
    ended(known, begun(known, 1))
    ended(known, begun(known, 2))
    again = begun(known, 1)
    ended(known, again)
    begun(known, 3)
    assert known.get(bytes([2]) * 16) is None
    assert known.get(again.transfer_id) is again


def test_refusals_are_of_a_peer_and_the_oldest_go_first() -> None:
    known = KnownTransfers(1)
    known.refuse(b"a" * 16, "peer", TransferEnd.NO_ROOM)
    assert known.refusal(b"a" * 16, "peer") is TransferEnd.NO_ROOM
    assert known.refusal(b"a" * 16, "other") is None
    known.refuse(b"b" * 16, "peer", TransferEnd.REFUSED)
    assert known.refusal(b"a" * 16, "peer") is None
