"""A channel: closes on nonsense, tells once, holds back a sender, notices silence."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from prfaas.errors import PeerError
from prfaas.wire.channel import LIMITS, Channel, ChannelLimits, keep_alive
from prfaas.wire.frames import VERSION, Frame, FrameDecoder
from prfaas.wire.messages.base import Goodbye, Ping
from prfaas.wire.messages.codec import decode, encode
from prfaas.wire.messages.gateway import Stored, Subscribe

from .conftest import until


@dataclass
class Pair:
    """A channel, and a bare socket at its other end."""

    far: socket.socket
    frames: list[Frame] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    refuse: bool = False
    limits: ChannelLimits = LIMITS

    def __post_init__(self) -> None:
        self.channel = Channel(
            self.take, lambda _, reason: self.closed.append(reason), limits=self.limits
        )

    async def hear(self, num_bytes: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.far, num_bytes)

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.far, data)

    def take(self, _: Channel, frame: Frame) -> None:
        self.frames.append(frame)
        if self.refuse:
            raise PeerError("not what was agreed")


@pytest.fixture
def limits() -> ChannelLimits:
    """Limits of the channel; a test may give others."""
    return LIMITS


@pytest.fixture
async def pair(limits: ChannelLimits) -> AsyncIterator[Pair]:
    near, far = socket.socketpair()
    far.setblocking(False)
    made = Pair(far, limits=limits)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: made.channel, near)
    yield made
    made.channel.close("the test is over")
    await until(lambda: bool(made.closed))
    assert len(made.closed) == 1
    far.close()


async def test_messages_arrive_in_order(pair: Pair) -> None:
    closed = asyncio.Event()
    _, sender = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: Channel(lambda *_: None, lambda *_: closed.set()), pair.far.dup()
    )
    sender.send(Subscribe(gateway="g"))
    sender.send(Ping())
    await until(lambda: len(pair.frames) == 2)
    assert [decode(frame.payload) for frame in pair.frames] == [Subscribe(gateway="g"), Ping()]
    sender.close("done")
    await closed.wait()


async def test_garbage_closes_the_channel_with_the_reason(pair: Pair) -> None:
    await pair.say(encode(Ping()) + b"GET / HTTP/1.1\r\n\r\n")
    await until(lambda: bool(pair.closed))
    assert "not a prfaas peer" in pair.closed[0]
    assert pair.frames == []
    (told,) = FrameDecoder().feed(await pair.hear(1 << 16))
    assert decode(told.payload) == Goodbye(reason="you are not on the list here")
    assert await pair.hear(1) == b""


async def test_a_peer_that_was_let_in_is_told_what_it_did(pair: Pair) -> None:
    pair.channel.peer = "pool"
    pair.channel.distrust("x" * 9999)
    (told,) = FrameDecoder().feed(await pair.hear(1 << 16))
    assert decode(told.payload) == Goodbye(reason="x" * 512)
    assert pair.channel.broke_protocol


async def test_a_peer_of_an_older_version_is_told_in_its_own(pair: Pair) -> None:
    pair.channel.peer = "pool"
    await pair.say(encode(Subscribe(gateway="g"), VERSION - 1))
    told = await pair.hear(1 << 16)
    why = "protocol version 2 of the peer is too old: this side speaks 3; upgrade the peer"
    assert told == encode(Goodbye(reason=why), VERSION - 1)
    assert pair.frames == []
    await until(lambda: bool(pair.closed))


async def test_a_frame_that_is_refused_is_the_last_one(pair: Pair) -> None:
    pair.refuse = True
    await pair.say(encode(Ping()) * 3)
    await until(lambda: bool(pair.closed))
    assert pair.closed == ["protocol error: not what was agreed"]
    assert len(pair.frames) == 1


async def test_a_peer_that_leaves_is_told_once(pair: Pair) -> None:
    pair.far.close()
    await until(lambda: bool(pair.closed))
    assert pair.closed == ["the peer closed the connection"]
    assert not pair.channel.is_open
    assert pair.channel.backlog_bytes == 0
    assert pair.channel.socket is None
    pair.channel.send(Ping())
    pair.channel.close("too late")


LARGE = Stored(seq=0, layout_id=b"L" * 32, keys=[(0, b"h" * 32)] * 20_000)


async def test_a_sender_waits_for_a_slow_reader_and_goes_on(pair: Pair) -> None:
    sent = 0
    while pair.channel.backlog_bytes <= LIMITS.write_buffer_bytes:
        pair.channel.send(LARGE)
        sent += 1
    waiting = asyncio.create_task(pair.channel.drained())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert sent < 20
    while not waiting.done():
        assert await pair.hear(1 << 20)
    await waiting


async def test_a_sender_that_waits_is_let_go_when_the_connection_ends(pair: Pair) -> None:
    while pair.channel.backlog_bytes <= LIMITS.write_buffer_bytes:
        pair.channel.send(LARGE)
    waiting = asyncio.create_task(pair.channel.drained())
    await asyncio.sleep(0)
    assert not waiting.done()
    pair.channel.close("enough")
    await waiting
    assert not pair.channel.is_open


@pytest.mark.parametrize("limits", [ChannelLimits(unread_bytes_max=4 << 20)])
async def test_a_peer_that_asks_on_and_reads_nothing_is_left(pair: Pair) -> None:
    answer = Stored(seq=0, layout_id=b"L" * 32, keys=[(0, b"h" * 32)] * 4096)
    pair.channel._on_frame = lambda channel, _: channel.send(answer)
    with contextlib.suppress(OSError):
        while not pair.closed:
            await pair.say(encode(Ping()))
    await until(lambda: bool(pair.closed))
    assert pair.closed == ["the peer does not read its answers"]


@pytest.mark.parametrize("reads", [True, False])
async def test_a_connection_that_ends_sends_what_was_accepted(pair: Pair, reads: bool) -> None:
    """And closes after a time if the peer does not read, or reads and does not close."""
    answer = Stored(seq=0, layout_id=b"L" * 32, keys=[(0, b"h" * 32)] * 4096)
    while not pair.channel.backlog_bytes:
        pair.channel.send(answer)
    pair.channel.end("enough", limit_s=0.1 if not reads else 60)
    pair.channel.send(answer)
    assert not pair.channel.is_open
    if not reads:
        await until(lambda: bool(pair.closed))
        assert pair.closed == ["enough"]
        return

    decoder, told = FrameDecoder(), []
    await pair.say(encode(Ping()) + b"nonsense")
    while Goodbye(reason="enough") not in told:
        told += [decode(frame.payload) for frame in decoder.feed(await pair.hear(1 << 20))]

    assert told == [answer] * (len(told) - 1) + [Goodbye(reason="enough")]
    assert not pair.frames
    assert not pair.closed
    pair.far.shutdown(socket.SHUT_RDWR)
    await until(lambda: bool(pair.closed))
    assert pair.closed == ["enough"]


async def test_a_silent_peer_is_pinged_and_then_given_up(pair: Pair) -> None:
    await keep_alive(pair.channel, ping_interval_s=0.005, silence_max_s=0.05)
    await until(lambda: bool(pair.closed))
    assert pair.closed[0].startswith("silent for")
    heard = await pair.hear(1 << 16)
    assert len(heard) >= len(encode(Ping()))
    assert heard.replace(encode(Ping()), b"") == b""


async def test_a_peer_that_pings_back_stays(pair: Pair) -> None:
    watch = asyncio.create_task(keep_alive(pair.channel, ping_interval_s=0.005, silence_max_s=30.0))
    began = pair.channel.heard_at
    for _ in range(3):
        assert await pair.hear(len(encode(Ping()))) == encode(Ping())
        await pair.say(encode(Ping()))
    await until(lambda: len(pair.frames) == 3)
    assert pair.channel.heard_at > began
    assert pair.closed == []
    assert not watch.done()
    pair.channel.close("done")
    await watch
