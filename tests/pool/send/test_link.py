"""A link of several connections: blocks in pieces, faults on the way, what is measured."""

import asyncio
import gc
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.core.transfer.pacing import num_connections
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.pool.net.link_end import SendLimits
from prfaas.pool.receive.inbound_transfers import ReceiveLimits
from prfaas.pool.send.data_sender import FRAGMENT_BYTES
from prfaas.pool.send.link_control import IDLE_EVERY, REPORT_EVERY, LinkMeter, SampleCount
from prfaas.wire import sockets
from prfaas.wire.frames import FrameDecoder
from prfaas.wire.messages.base import Ping, Pong
from prfaas.wire.messages.codec import decode, encode
from prfaas.wire.messages.gateway import PoolState
from prfaas.wire.sockets import TcpInfo
from tests.lab.faults import Fault, FaultProxy
from tests.pool.conftest import World
from tests.pool.link_rig import BLOCK_BYTES, MEMORY, Rig
from tests.pool.sites import until

NUM_CONNECTIONS = 2
"""Given, not found: on a busy machine loopback can look like a far path, which gets more."""
GRACE_NS = 6 * 10**9
"""Longer than the default: a busy machine must not make an outage of a moment's hold-up."""
NEVER_STUCK = SendLimits(stuck_ns=10**15)


@pytest.fixture
def send() -> SendLimits:
    """Limits of the sender; a test may give others."""
    return SendLimits()


@pytest.fixture
def receive() -> ReceiveLimits:
    """Limits of the receiver; a test may give others."""
    return ReceiveLimits()


@pytest.fixture
async def rig(
    world: World, identities: Path, send: SendLimits, receive: ReceiveLimits
) -> AsyncIterator[Rig]:
    pd = await world.start("pd-pool", memory_bytes=MEMORY, link_grace_ns=GRACE_NS, receive=receive)
    proxy = FaultProxy(("127.0.0.1", pd.port))
    await proxy.open()
    prfaas = await world.start(
        "prfaas-pool",
        memory_bytes=MEMORY,
        link_grace_ns=GRACE_NS,
        link_connections={"pd-pool": NUM_CONNECTIONS},
        peers={"pd-pool": ("127.0.0.1", proxy.port)},
        send=send,
    )
    made = Rig(proxy, prfaas, pd, identities)
    await until(lambda: made.link.telemetry.num_connections == NUM_CONNECTIONS)
    yield made
    await proxy.close()


async def test_blocks_in_pieces_arrive_whole_over_many_connections(rig: Rig) -> None:
    transfer = rig.begin()
    blocks = rig.push(transfer, 20)
    rig.link.finish(transfer)
    await rig.all_there(blocks)
    moved = 20 * BLOCK_BYTES
    assert rig.prfaas.metric("link_bytes_total", peer="pd-pool", direction="sent") == moved
    assert rig.pd.metric("link_bytes_total", peer="prfaas-pool", direction="received") == moved
    assert rig.link.num_open == 0


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.RESET, Fault.CORRUPT])
@pytest.mark.parametrize("which", ["all", "messages", "one of the data connections"])
async def test_a_transfer_survives_lost_connections(rig: Rig, fault: Fault, which: str) -> None:
    transfer = rig.begin()
    blocks = rig.push(transfer, 10)
    index = {"all": None, "messages": 0, "one of the data connections": 2}[which]
    await until(lambda: rig.proxy.num_bytes > 5 * BLOCK_BYTES)
    rig.proxy.strike(fault, index)
    blocks |= rig.push(transfer, 10)
    rig.link.finish(transfer)
    await rig.all_there(blocks)


async def test_after_an_outage_only_what_is_missing_goes(rig: Rig) -> None:
    transfer = rig.begin()
    first = rig.push(transfer, 10)
    await until(lambda: not any(block.pins for block in first.values()))
    rig.proxy.strike(Fault.RESET)
    await until(lambda: not rig.link.is_up)
    rest = rig.push(transfer, 2)
    rig.link.finish(transfer)
    await rig.all_there(first | rest)
    sent = rig.prfaas.metric("link_bytes_total", peer="pd-pool", direction="sent")
    assert sent <= (10 + 2 * 2) * BLOCK_BYTES


async def test_a_transfer_that_waits_too_long_for_its_link_ends(rig: Rig) -> None:
    transfer = rig.begin()
    blocks = rig.push(transfer, 3)
    rig.proxy.is_plugged = False
    rig.proxy.strike(Fault.RESET)
    await until(lambda: rig.link.num_open == 0)
    await until(lambda: rig.pd.node.inbound.known.num_open == 0)
    assert all(block.pins == 0 for block in blocks.values())


async def test_a_stranger_joins_no_link(rig: Rig) -> None:
    assert rig.pd.node.link_port.data.find_assembly("prfaas-pool", "another word") is None
    assert rig.pd.node.link_port.data.find_assembly("nobody", "") is None


async def test_metrics_show_the_link(rig: Rig) -> None:
    await until(lambda: rig.prfaas.metric("link_rtt_seconds", peer="pd-pool") > 0)
    assert rig.prfaas.metric("link_connections", peer="pd-pool") == NUM_CONNECTIONS


def test_the_number_of_connections_follows_budget_and_round_trip() -> None:
    assert num_connections(10**9, 40_000_000) == 4
    assert num_connections(5 * 10**9, 20_000_000) == 6
    assert num_connections(10**11, 40_000_000) == 16
    assert num_connections(10**10, 50_000) == 2


def info(acked_bytes: int, delivered_bytes: int = 0) -> TcpInfo:
    return TcpInfo(10**7, 10, 1, acked_bytes, 10**9, delivered_bytes=delivered_bytes)


def test_a_sample_of_a_busy_link_is_its_rate() -> None:
    meter = LinkMeter()
    meter.sample(10**9 - 50_000_000, [info(0)], 10**6, 0)
    meter.sample(10**9, [info(0)], 10**6, 0)
    meter.sample(2 * 10**9, [info(125 * 10**6)], 10**6, 0)
    assert meter.telemetry(3 * 10**9).goodput_bits_per_s == 10**9
    assert meter.telemetry(3 * 10**9).age_ns == 10**9


def test_a_missing_segment_changes_no_rate() -> None:
    """Later bytes are acknowledged at once when it has come again, and were there before."""
    meter, step_ns, step_bytes = LinkMeter(), 50_000_000, 6_250_000
    rates = []
    for step in range(12):
        acked_bytes = step_bytes * (step if step < 6 or step > 8 else 5)
        infos = [info(acked_bytes, step_bytes * step)]
        meter.sample(10**9 + step * step_ns, infos, 10**6, 0)
        rates.append(meter.fresh_bits_per_s)
    assert set(rates[2:]) == {10**9}


class Kernel:
    """Answers of `getsockopt(TCP_INFO)` for a connection."""

    def __init__(self, delivery_bytes_per_s: int) -> None:
        self.raw = bytearray(196)
        struct.pack_into("=I", self.raw, 16, 1448)
        struct.pack_into("=I", self.raw, 192, 1000)
        struct.pack_into("=I", self.raw, 148, 39_000)
        struct.pack_into("=Q", self.raw, 160, delivery_bytes_per_s)

    def getsockopt(self, *_: int) -> bytes:
        return bytes(self.raw)


def test_what_the_kernel_says_is_read_from_where_it_says_it() -> None:
    read = sockets.tcp_info(Kernel(125_000_000))  # type: ignore[arg-type]
    assert read.delivery_bits_per_s == 10**9
    assert read.min_rtt_ns == 39_000_000
    assert read.delivered_bytes == 1_448_000


def test_no_rate_that_a_kernel_claims_breaks_the_report() -> None:
    """Messages hold no number beyond 2**53; a report that cannot be read ends an event stream."""
    read = sockets.tcp_info(Kernel(2**64 - 1))  # type: ignore[arg-type]
    assert 16 * read.delivery_bits_per_s < 2**53


def test_a_host_that_was_started_years_ago_says_nothing_that_is_refused() -> None:
    """Its monotonic clock is beyond 2**53 ns; a link that never stood is as old as that clock."""
    now_ns = 10 * 365 * 86400 * 10**9
    link = LinkMeter().telemetry(now_ns)
    state = PoolState(seq=0, layouts={}, links={"pd-pool": False}, telemetry={"pd-pool": link})
    for message in (Ping(at_ns=now_ns), Pong(at_ns=now_ns), state):
        [frame] = FrameDecoder().feed(encode(message))
        assert decode(frame.payload) == message


def test_what_arrives_while_the_path_fills_is_no_rate() -> None:
    """The first acknowledgement takes a round trip: samples before it are far too low."""
    meter = LinkMeter()
    rates = []
    for step in range(6):
        acked_bytes = max(0, step - 2) * 10**6
        meter.sample(10**9 + step * 8_000_000, [info(acked_bytes)], 10**6, 0)
        rates.append(meter.fresh_bits_per_s)
    assert rates == [0, 0, 0, 0, 10**9, 10**9]


def test_an_idle_link_says_nothing_about_its_rate() -> None:
    meter = LinkMeter(budget_bits_per_s=8 * 10**6)
    meter.sample(10**9, [info(0)], 0, 0)
    meter.sample(2 * 10**9, [info(10)], 0, 0)
    assert meter.telemetry(2 * 10**9).goodput_bits_per_s == 0


@pytest.mark.parametrize("rate", [10**7, 2 * 10**6])
def test_a_goodput_that_a_lease_held_is_no_rate_of_an_idle_link(rate: int) -> None:
    """A path that is slower than the lease is slow with a larger one as well."""
    meter = LinkMeter()
    meter.limit(10**7, 10**8)
    for tenth in range(11):
        meter.sample(10**9 + tenth * 10**8, [info(tenth * rate // 80)], 10**6, 0)
    busy = meter.telemetry(2 * 10**9)
    assert (busy.goodput_bits_per_s, busy.budget_bits_per_s) == (rate, 10**7)
    meter.sample(21 * 10**8, [info(10 * rate // 80)], 0, 0)

    idle = meter.telemetry(21 * 10**8)

    assert idle.budget_bits_per_s == 10**8
    assert idle.goodput_bits_per_s == (0 if rate == 10**7 else rate)
    meter.limit(10**7, 10**7)
    assert meter.telemetry(21 * 10**8).goodput_bits_per_s == rate


def test_a_link_that_is_connected_anew_reports_the_goodput_of_before() -> None:
    """Seconds without a byte before it was found dead show nothing of the new connections."""
    meter = LinkMeter()
    for tenth in range(31):
        acked_bytes = min(tenth, 10) * 12_500_000
        meter.sample(10**9 + tenth * 10**8, [info(acked_bytes)], 10**6, 0)
    assert meter.telemetry(4 * 10**9).goodput_bits_per_s < 10**5
    meter.restart()
    assert meter.telemetry(4 * 10**9).goodput_bits_per_s == 10**9
    meter.sample(5 * 10**9, [info(0)], 0, 0)
    assert meter.telemetry(5 * 10**9).goodput_bits_per_s == 10**9


@pytest.mark.parametrize("send", [NEVER_STUCK])
async def test_a_link_that_was_silent_and_is_cut_comes_back_with_its_goodput(rig: Rig) -> None:
    rate = rig.proxy.link_bits_per_s = 40_000_000
    transfer = rig.begin()
    rig.push(transfer, 40)
    await until(lambda: rig.link.telemetry.goodput_bits_per_s > 0)
    rig.proxy.is_plugged = False
    rig.proxy.strike(Fault.HALF_OPEN)
    # On a slow machine the silence may end the link first.
    await until(lambda: not rig.link.is_up or rig.link.telemetry.goodput_bits_per_s < rate / 10_000)
    rig.link.abort(transfer, TransferEnd.LINK_LOST)
    rig.proxy.strike(Fault.CUT)
    await until(lambda: not rig.link.is_up)
    rig.proxy.is_plugged = True
    await until(lambda: rig.link.is_up)
    assert rig.link.telemetry.goodput_bits_per_s > rate / 1000


async def test_transfers_wait_for_a_link_that_broke_this_instant(rig: Rig) -> None:
    """Its connections are gone a moment before anybody is told."""
    transfer = rig.begin()
    blocks = rig.push(transfer, 3)
    channel = rig.link._dialer._channel
    assert channel is not None
    channel.close("broken by the test")
    assert not rig.link.is_up
    rig.link.expire()
    assert rig.link.num_open == 1
    rig.link.finish(transfer)
    await rig.all_there(blocks)


async def test_a_half_open_link_is_noticed_and_the_transfer_goes_on(rig: Rig) -> None:
    transfer = rig.begin()
    blocks = rig.push(transfer, 5)
    rig.proxy.strike(Fault.HALF_OPEN)
    blocks |= rig.push(transfer, 5)
    rig.link.finish(transfer)
    async with asyncio.timeout(30):
        await rig.all_there(blocks)


@pytest.mark.parametrize("send", [SendLimits(stuck_ns=10**15, fragment_bytes_min=FRAGMENT_BYTES)])
@pytest.mark.parametrize("receive", [ReceiveLimits(turn_bytes=1)])
async def test_what_is_left_when_a_readers_turn_ends_is_read_without_a_further_wake(
    rig: Rig,
) -> None:
    """A rest smaller than what the socket wakes for would lie there until more comes."""
    rig.proxy.read_bits_per_s = 100_000_000
    transfer = rig.begin()
    blocks = rig.push(transfer, 20)
    rig.link.finish(transfer)
    async with asyncio.timeout(20):
        await rig.all_there(blocks)


@pytest.mark.parametrize("send", [SendLimits(stuck_ns=10**9)])
async def test_one_data_connection_that_carries_nothing_more_is_replaced(rig: Rig) -> None:
    """The proxy's kernel acknowledges what it takes: TCP alone never notices."""
    rig.proxy.strike(Fault.HALF_OPEN, 2)
    transfer = rig.begin()
    blocks = rig.push(transfer, 20)
    rig.link.finish(transfer)
    await rig.all_there(blocks)
    receivers = rig.pd.node.link_port.data._receivers
    await until(lambda: len(receivers) == rig.link.telemetry.num_connections)


async def test_a_link_that_is_over_keeps_no_memory(rig: Rig) -> None:
    """Not even until the garbage collector comes round: an idle node may wait for it for long."""
    rig.proxy.read_bits_per_s = 20_000_000
    transfer = rig.begin()
    rig.push(transfer, 20)
    await until(lambda: rig.pd.node.link_port.data.unfinished_bytes > 0)
    gc.disable()
    try:
        rig.proxy.is_plugged = False
        rig.proxy.strike(Fault.RESET)
        await until(lambda: rig.pd.node.store.room.loose_bytes == 0)
        await until(lambda: rig.pd.node.inbound.known.num_open == 0)
        assert rig.pd.node.store.room.loose_bytes == 0
    finally:
        gc.enable()


def test_an_idle_link_is_sampled_once_a_second_and_a_busy_one_at_every_look() -> None:
    looks = SampleCount()
    busy = [looks.is_due(is_idle=False) for _ in range(50)]
    idle = [looks.is_due(is_idle=True) for _ in range(200)]
    assert all(busy)
    assert sum(idle[:REPORT_EVERY]) == REPORT_EVERY
    assert sum(idle[REPORT_EVERY:]) == (200 - REPORT_EVERY) // IDLE_EVERY + 1
    assert looks.is_due(is_idle=False)


def test_samples_of_an_idle_link_are_reports() -> None:
    looks = SampleCount()
    reports = [looks.is_report for _ in range(100) if looks.is_due(is_idle=True)]
    assert reports[REPORT_EVERY:] == [True] * len(reports[REPORT_EVERY:])
