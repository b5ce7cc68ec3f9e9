"""One direction of a path: delay, queue, loss, and packets that stand for many segments."""

import random
import struct

import pytest

from tests.lab.path import VNET_BYTES, WIRE_OVERHEAD_BYTES, LabPath, PathSettings

MSS = 1000
IP_BYTES = TCP_BYTES = 20


def packet(num_bytes: int, *, gso: bool = True, seq: int = 100, flags: int = 0x18) -> bytes:
    """A TCP packet of `num_bytes` payload, as a TUN device hands it out."""
    vnet = struct.pack("<BBHHHH", 1, 1 if gso else 0, 40, MSS if gso else 0, 20, 16)
    length = IP_BYTES + TCP_BYTES + num_bytes
    ip = struct.pack(">BBHHHBBH8s", 0x45, 0, length, 7, 0, 64, 6, 0, b"\x0a\0\0\1\x0a\0\0\2")
    tcp = struct.pack(">HHIIBBHHH", 1, 2, seq, 0, 5 << 4, flags, 0, 0, 0)
    return vnet + ip + tcp + bytes(i % 251 for i in range(num_bytes))


def parts(run: bytes) -> tuple[int, int, bytes, int]:
    """Sequence number, GSO size, payload and flags of a packet; its IP header has to be right."""
    ip = run[VNET_BYTES : VNET_BYTES + IP_BYTES]
    total = sum(struct.unpack(">10H", ip))
    if struct.unpack(">H", ip[10:12])[0]:
        assert (total & 0xFFFF) + (total >> 16) == 0xFFFF
    assert struct.unpack(">H", ip[2:4])[0] == len(run) - VNET_BYTES
    tcp = run[VNET_BYTES + IP_BYTES :]
    return (
        struct.unpack(">I", tcp[4:8])[0],
        struct.unpack("<H", run[4:6])[0],
        tcp[TCP_BYTES:],
        tcp[13],
    )


class Dice(random.Random):
    """Throws what it is told."""

    def __init__(self, throws: list[float]) -> None:
        super().__init__(0)
        self.throws = throws

    def random(self) -> float:
        return self.throws.pop(0)


def test_a_packet_takes_its_bits_and_the_delay() -> None:
    path = LabPath(PathSettings(delay_ns=10**6, rate_bits_per_s=8 * 10**6), random.Random(0))
    wire_us = MSS + IP_BYTES + TCP_BYTES + WIRE_OVERHEAD_BYTES
    ((first, _),) = path.carry(packet(MSS, gso=False), 0)
    ((second, _),) = path.carry(packet(MSS, gso=False), 0)
    assert first == wire_us * 1000 + 10**6
    assert second == 2 * wire_us * 1000 + 10**6


def test_an_unlimited_path_only_delays() -> None:
    path = LabPath(PathSettings(delay_ns=5), random.Random(0))
    assert path.carry(packet(10 * MSS), 7) == [(12, packet(10 * MSS))]
    assert path.counters.sent == 10


def test_lost_segments_split_a_packet_into_runs() -> None:
    path = LabPath(PathSettings(loss=0.5), Dice([1, 1, 0, 1, 0, 1]))
    whole = packet(5 * MSS + 300)
    runs = [run for _, run in path.carry(whole, 0)]
    data = parts(whole)[2]
    assert [parts(run) for run in runs] == [
        (100, MSS, data[: 2 * MSS], 0x10),
        (100 + 3 * MSS, 0, data[3 * MSS : 4 * MSS], 0x10),
        (100 + 5 * MSS, 0, data[5 * MSS :], 0x18),
    ]
    assert (path.counters.sent, path.counters.lost) == (6, 2)


def test_a_sequence_number_may_wrap() -> None:
    path = LabPath(PathSettings(loss=0.5), Dice([0, 1]))
    ((_, run),) = path.carry(packet(2 * MSS, seq=2**32 - 1), 0)
    assert parts(run)[0] == MSS - 1


def test_a_full_queue_drops_the_rest_of_a_packet() -> None:
    wire_ns = (MSS + IP_BYTES + TCP_BYTES + WIRE_OVERHEAD_BYTES) * 1000
    settings = PathSettings(rate_bits_per_s=8 * 10**6, queue_ns=3 * wire_ns)
    path = LabPath(settings, random.Random(0))
    ((_, run),) = path.carry(packet(10 * MSS), 0)
    assert len(parts(run)[2]) == 4 * MSS
    assert (path.counters.sent, path.counters.overflowed, path.counters.lost) == (10, 6, 0)
    assert path.carry(packet(MSS, gso=False), 4 * wire_ns)


def test_a_blackhole_lets_nothing_pass_and_counts_it() -> None:
    path = LabPath(PathSettings(is_down=True), random.Random(0))
    assert path.carry(packet(3 * MSS), 0) == []
    assert path.counters.blackholed == path.counters.sent == 3


@pytest.mark.parametrize("loss", [0.001, 0.01, 0.3])
def test_losses_are_as_many_as_asked_for(loss: float) -> None:
    path = LabPath(PathSettings(loss=loss), random.Random(1))
    whole = packet(50 * MSS)
    for _ in range(2000):
        path.carry(whole, 0)
    counters = path.counters
    assert counters.sent == 100_000
    assert counters.lost / counters.sent == pytest.approx(loss, rel=0.25)


def test_jitter_drifts_below_its_limit_and_keeps_the_order() -> None:
    path = LabPath(PathSettings(delay_ns=10**6, jitter_ns=8 * 10**6), random.Random(1))
    times = [
        (now_ns, path.carry(packet(MSS, gso=False), now_ns)[0][0])
        for now_ns in range(0, 2 * 10**9, 10**6)
    ]

    added = [arrives_at - now_ns - 10**6 for now_ns, arrives_at in times]
    assert [at for _, at in times] == sorted(at for _, at in times)
    assert all(0 <= extra <= 8 * 10**6 for extra in added)
    assert max(added) - min(added) > 4 * 10**6


def test_reordered_segments_come_after_those_behind_them() -> None:
    settings = PathSettings(delay_ns=5, reorder=0.5, reorder_ns=100)
    path = LabPath(settings, Dice([1, 0, 1]))

    runs = path.carry(packet(3 * MSS), 0)

    assert [(at, parts(run)[0]) for at, run in runs] == [
        (5, 100),
        (5, 100 + 2 * MSS),
        (105, 100 + MSS),
    ]
    assert (
        b"".join(parts(run)[2] for _, run in sorted(runs, key=lambda one: parts(one[1])[0]))
        == (parts(packet(3 * MSS))[2])
    )
    assert path.counters.reordered == 1


def test_a_packet_whose_segments_are_all_late_comes_once() -> None:
    path = LabPath(PathSettings(reorder=0.5, reorder_ns=100), Dice([0, 0]))

    assert [(at, len(parts(run)[2])) for at, run in path.carry(packet(2 * MSS), 0)] == [
        (100, 2 * MSS)
    ]


def test_lost_segments_are_not_reordered() -> None:
    path = LabPath(PathSettings(loss=0.5, reorder=0.5, reorder_ns=100), Dice([0, 1, 0]))

    ((at, run),) = path.carry(packet(2 * MSS), 0)

    assert (at, parts(run)[0]) == (100, 100 + MSS)
    assert (path.counters.lost, path.counters.reordered) == (1, 1)
