"""Hostile streams: random bytes, and valid streams with something wrong in them."""

import contextlib
import random
from collections.abc import Iterator

from prfaas.core.codec.codecs import EXPONENT_WINDOW_NUMBER
from prfaas.core.kv.blocks import BlockKey, Plane
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.errors import PeerError
from prfaas.pool.codec.exponent_window import coded_bytes_max
from prfaas.pool.codec.exponent_window import decode as decode_window
from prfaas.pool.codec.exponent_window import encode as encode_window
from prfaas.wire.fragments import (
    FRAGMENT_BYTES_MAX,
    FragmentStream,
    block_digest,
    encode_coded_prefix,
    encode_prefix,
)
from prfaas.wire.frames import FrameDecoder
from prfaas.wire.messages.base import Message, Ping
from prfaas.wire.messages.codec import decode, encode
from prfaas.wire.messages.gateway import Subscribe
from prfaas.wire.messages.link import Abort, Commit, Join, Offer, PoolHello
from tests.orders import purge, purge_end
from tests.wire.feeding import write_to

STEP_BYTES = 1 << 12


def messages(chance: random.Random) -> list[Message]:
    """Messages of a pool or a gateway on a link port."""
    transfer = chance.randbytes(16)
    return [
        Ping(at_ns=chance.randrange(1 << 50), connections=[chance.randrange(100)]),
        PoolHello(
            pool="prfaas-pool", epoch="e", resumes=[transfer], link=chance.randbytes(8).hex()
        ),
        Offer(
            transfer_id=transfer,
            ticket=chance.randbytes(chance.randrange(200)),
            blocks={chance.randrange(4): chance.randbytes(chance.randrange(100))},
        ),
        purge(job=chance.randrange(9), source="prfaas-pool", is_dry=chance.random() < 1 / 2),
        purge_end(job=9, source="prfaas-pool"),
        Commit(transfer_id=transfer, num_blocks=chance.randrange(1 << 20)),
        Abort(transfer_id=transfer, reason="r" * chance.randrange(100)),
        Subscribe(gateway="gateway"),
        Join(pool="prfaas-pool", link="l", number=chance.randrange(1000)),
    ]


def frame(chance: random.Random) -> bytes:
    """One valid frame: a message or a fragment."""
    if chance.random() < 1 / 2:
        return encode(chance.choice(messages(chance)))
    transfer, layout, data = (
        chance.randbytes(16),
        b"L" * 32,
        chance.randbytes(chance.randrange(1, 300)),
    )
    key = BlockKey(chance.randrange(4), chance.randbytes(32))
    digest = block_digest(layout, key, data)
    block = OutgoingBlock(transfer, (layout, key), digest, data)
    if chance.random() < 1 / 2:
        return encode_prefix(Fragment(block, 0, len(data))) + data
    return coded(chance, transfer)


def coded(chance: random.Random, transfer: bytes) -> bytes:
    """A valid coded fragment: numbers of one size, a few of them far smaller."""
    numbers = chance.choices((0x3F80, 0xBE12, 0x3D47, 0x0001), k=chance.randrange(60, 900))
    data = b"".join(number.to_bytes(2, "little") for number in numbers)
    scratch = memoryview(bytearray(coded_bytes_max(len(data))))
    stream = encode_window(memoryview(data), (Plane("bfloat16", len(data)),), scratch) or b""
    block = OutgoingBlock(transfer, (b"L" * 32, BlockKey(0, bytes(32))), bytes(32), data)
    prefix = encode_coded_prefix(Fragment(block, 0, len(data)), EXPONENT_WINDOW_NUMBER, len(stream))
    return prefix + bytes(stream)


def mutated(chance: random.Random) -> bytes:
    """A few valid frames, with one to three of the things that go wrong with bytes."""
    stream = bytearray(b"".join(frame(chance) for _ in range(chance.randint(1, 4))))
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(stream) + 1)
        match chance.randrange(6):
            case 0 if at < len(stream):
                stream[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(stream):
                stream[at] = chance.choice((0, 0x7F, 0x80, 0xFF))
            case 2:
                del stream[at : at + chance.randrange(1, 60)]
            case 3:
                stream[at:at] = chance.randbytes(chance.randrange(1, 60))
            case 4:
                piece = stream[at : at + chance.randrange(1, 200)]
                stream[at:at] = piece
            case _:
                del stream[at:]
        if not stream:
            stream += b"\0"
    return bytes(stream)


def pieces(stream: bytes, chance: random.Random) -> Iterator[bytes]:
    """The stream, cut anywhere."""
    at = 0
    while at < len(stream):
        step = chance.randint(1, STEP_BYTES)
        yield stream[at : at + step]
        at += step


def feed(stream: bytes, chance: random.Random) -> bool:
    """Give a stream to the codec of every connection, and its messages to theirs.

    Returns:
        Whether the frame decoder took all of it. Anything but a `PeerError` is raised.
    """
    good = True
    decoder = FrameDecoder()
    try:
        for piece in pieces(stream, chance):
            for got in decoder.feed(piece):
                decode(got.payload)
    except PeerError:
        good = False
    nowhere = memoryview(bytearray(FRAGMENT_BYTES_MAX))
    fragments = FragmentStream(lambda prefix: nowhere[: prefix.payload_bytes])
    with contextlib.suppress(PeerError):
        for piece in pieces(stream, chance):
            for prefix in write_to(fragments, piece):
                if prefix.codec:
                    into = memoryview(bytearray(prefix.num_bytes))
                    decode_window(nowhere[: prefix.payload_bytes], into)
    with contextlib.suppress(PeerError):
        decode(stream)
    return good
