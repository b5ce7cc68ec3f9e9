"""Wake-ups of a reader: each costs more of a core than the bytes it finds."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.pool.net.tls_sockets import shake_hands
from prfaas.pool.receive.block_assembly import Assembly, FragmentReader
from prfaas.pool.receive.data_port import AT_ONCE_BYTES_MAX, DELIVERIES_MAX, DataReceiver
from prfaas.wire.fragments import FRAGMENT_BYTES_MAX, ReceivedBlock, encode_prefix
from prfaas.wire.identity import identity_in
from tests.pool.hands import BLOCKS_MAX, DIGEST, KEY, LAYOUT_ID

RECORD = 16 << 10


class CountedReader(FragmentReader):
    """A reader that counts how often it looks at its socket."""

    num_turns = 0

    def _read(self) -> None:
        self.num_turns += 1
        super()._read()


async def test_a_fragment_over_tls_takes_few_wake_ups(identities: Path) -> None:
    """A record comes after the other; in pieces of 64 KiB there were 15 turns."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    dialling = identity_in(identities, "prfaas-pool").dialling().data
    accepting = identity_in(identities, "pd-pool").accepting().data
    near.setblocking(False)
    far.setblocking(False)
    with (
        dialling.wrap_socket(near, do_handshake_on_connect=False) as sender,
        accepting.wrap_socket(far, server_side=True, do_handshake_on_connect=False) as receiver,
    ):
        await asyncio.gather(shake_hands(sender), shake_hands(receiver))
        blocks: list[ReceivedBlock] = []

        def deliver(block: ReceivedBlock, _: FragmentReader) -> bool:
            blocks.append(block)
            return True

        owner: Any = SimpleNamespace(
            peer="prfaas-pool",
            link="l",
            num_bytes=0,
            decoding=SimpleNamespace(came=lambda *_: None),
            takes=lambda _: True,
            deliver=deliver,
        )
        assembly = Assembly(bytearray, 2 * FRAGMENT_BYTES_MAX, BLOCKS_MAX)
        reader = CountedReader(owner, receiver, assembly, None, 1 << 20)
        data = memoryview(bytes(FRAGMENT_BYTES_MAX))
        block = OutgoingBlock(b"t" * 16, (LAYOUT_ID, KEY), DIGEST, data)
        sender.send(encode_prefix(Fragment(block, 0, len(data))))
        for offset in range(0, len(data), RECORD):
            sender.send(data[offset : offset + RECORD])
            for _ in range(3):
                await asyncio.sleep(0)
        while not blocks:  # noqa: ASYNC110 - the last record is on its way
            await asyncio.sleep(0)
        reader.stop()
    assert bytes(blocks[0].data) == bytes(data)
    assert reader.num_turns <= 8


class Work:
    """Work for later, elsewhere: a lane, a thread for digests, a node's loop."""

    def __init__(self) -> None:
        self.later: list[Callable[[], object]] = []

    def call(self, what: Callable[..., object], *about: object) -> bool:
        self.later.append(functools.partial(what, *about))
        return True

    def run(self) -> None:
        later, self.later = self.later, []
        for each in later:
            each()


class PausedReader:
    """A reader that waits once it was told to."""

    is_paused, has_slept, num_resumed = False, False, 0

    def has_arrived(self, _: ReceivedBlock) -> bool:
        return self.is_paused

    def go_on(self) -> None:
        self.num_resumed += 1


def test_a_block_that_is_dealt_with_wakes_only_a_lane_that_waits() -> None:
    lane, hashing, loop = Work(), Work(), Work()
    decoding = SimpleNamespace(restored=lambda block: block)
    inbound = SimpleNamespace(known=None, block=lambda _peer, _block, done: done())
    io = SimpleNamespace(hash=hashing.call)
    port: Any = SimpleNamespace(
        inbound=inbound, decoding=decoding, end=SimpleNamespace(io=io), tell=loop.call
    )
    receiver = DataReceiver(port, None, None, lane)  # type: ignore[arg-type]
    reader: Any = PausedReader()
    block: Any = SimpleNamespace(is_intact=True, stream_bytes=0, data=b"")
    reader.has_slept = True
    assert receiver.deliver(block, reader)
    assert loop.later, "a lane that waited for bytes wakes no other thread for a digest"
    assert not hashing.later
    assert receiver.deliver(block, reader)
    assert hashing.later, "one that is behind does"
    reader.has_slept = True
    long = SimpleNamespace(is_intact=True, stream_bytes=0, data=bytes(AT_ONCE_BYTES_MAX + 1))
    assert receiver.deliver(long, reader)  # type: ignore[arg-type]
    assert len(hashing.later) == 2, "a long one would hold up the lane"
    reader.has_slept = False
    hashing.run()
    loop.run()
    assert not lane.later

    takes_more = [receiver.deliver(block, reader) for _ in range(DELIVERIES_MAX)]

    assert takes_more == [True] * (DELIVERIES_MAX - 1) + [False]
    reader.is_paused = True
    hashing.run()
    loop.run()
    lane.run()
    assert reader.num_resumed == DELIVERIES_MAX
    assert receiver.deliver(block, reader)
