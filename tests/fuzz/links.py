"""Hostile streams into data connections that a pool node has admitted: coded, rounded and sealed.

`port.py` has strangers; here the caller has a session, an accepted offer and agreed codecs, so its
fragments reach blocks. Two kinds of damage: by the *peer*, before records are sealed, and by the
*path*, to what was sealed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from prfaas.core.codec.codecs import (
    EXPONENT_WINDOW,
    EXPONENT_WINDOW_NUMBER,
    LOSSY,
    LOSSY_NUMBER,
    CodedSegment,
    Form,
    LinkCodec,
    Quality,
    SegmentMode,
    read_head,
)
from prfaas.core.kv.blocks import BlockKey, Plane
from prfaas.core.transfer.link_encryption import WIRE_NAMES, LinkEncryption
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.pool.codec.exponent_window import coded_bytes_max, encode
from prfaas.pool.codec.rounding import round_block
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.wire.fragments import (
    CODED_PREFIX_BYTES,
    FRAGMENT_BYTES_MAX,
    block_digest,
    encode_coded_prefix,
    encode_prefix,
    encode_stream_prefix,
)
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.codec import encode as frame
from prfaas.wire.messages.link import Abort, Accepted, Decodes, Join, PoolHello, Resumed
from prfaas.wire.sealed.keys import LinkSecret
from prfaas.wire.sealed.records import Sealer
from prfaas.wire.sealed.streams import SealedParts
from tests.pool.bfloat16_numbers import normal
from tests.pool.coded_pair import MODEL
from tests.pool.sites import LAYOUT, LOOPBACK, Peer, Site, dial, offer, until

MEMORY = 8 << 20
NUM_BLOCKS = 24
AT_ONCE = 8
"""Connections of a session."""
LAST_ROUNDS = 3
"""Tries of good streams at the end: a session may end where the machine stands still."""
UNFINISHED_MAX = 2 * AT_ONCE * FRAGMENT_BYTES_MAX
SILENT = "silent for"


@asynccontextmanager
async def a_site(
    directory: Path, encryption: LinkEncryption, num_lanes: int = 1
) -> AsyncIterator[Site]:
    """A pool node in this process that takes coded and rounded blocks by one protection."""
    make_authority(directory)
    for name in ("pd-pool", "prfaas-pool", "gateway"):
        make_identity(directory, name)
    site = Site(
        PoolProcessSettings(
            name="pd-pool",
            memory_bytes=MEMORY,
            listen=(LOOPBACK, 0),
            socket_path=directory / "pd-pool.sock",
            admin=(LOOPBACK, 0),
            identity=identity_in(directory, "pd-pool"),
            peers={},
            sources=frozenset({"prfaas-pool"}),
            gateways=frozenset({"gateway"}),
            link_codec=LinkCodec.AUTO,
            link_encryption=encryption,
            link_lanes=num_lanes,
        )
    )
    await site.ready()
    # Kernels are loaded for the first layout that can be coded; blocks here are of another.
    site.node.link_room.layouts.learn(dataclasses.replace(MODEL, layout_id=b"M" * 32))
    try:
        yield site
    finally:
        await site.kill()


class Damage(StrEnum):
    """The party that does the damage."""

    NONE = "none"
    PEER = "peer"
    PATH = "path"


@dataclass
class LinkFigures:
    """Counts of an attack on admitted connections.

    Attributes:
        num_streams: Data connections, a stream in each.
        num_bytes: Of all.
        num_blocks: Blocks that arrived, of which every byte was compared.
        num_rounded: Of these, blocks that came rounded.
        num_links_ended: Sessions that the node ended.
        unfinished_most: Most bytes of blocks that were there in part.
    """

    num_streams: int = 0
    num_bytes: int = 0
    num_blocks: int = 0
    num_rounded: int = 0
    num_links_ended: int = 0
    unfinished_most: int = 0


def content(number: int) -> bytes:
    """The one right content of a block: coded well, badly, or not at all."""
    chance = random.Random(number)
    size = chance.randrange(2100, 6000)
    if number % 3 == 2:
        return chance.randbytes(2 * size)
    data = bytearray(normal(size, seed=number))
    for _ in range(number % 3 * 200):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


CONTENTS = {BlockKey(0, bytes([number]) * 32): content(number) for number in range(NUM_BLOCKS)}


def rounded(number: int) -> tuple[bytes, bytes]:
    """Return the stream of a block that is rounded, and what it decodes to."""
    data = normal(random.Random(number).randrange(2100, 6000), seed=number)
    form = Form((CodedSegment(SegmentMode.FP8, (len(data) // 2, 0, 0, 0)),))
    into = memoryview(bytearray(len(data)))
    return bytes(round_block(form, memoryview(data), into)), bytes(into)


ROUNDED = {
    BlockKey(0, bytes([number]) * 32): rounded(number)
    for number in range(NUM_BLOCKS, 2 * NUM_BLOCKS)
}
EXPECTED = CONTENTS | {key: decoded for key, (_, decoded) in ROUNDED.items()}
Parts = tuple[bytes, bytes]
"""Prefix of a fragment, and what follows it."""


def fragments(transfer: bytes, key: BlockKey, *, is_coded: bool) -> list[Parts]:
    """A block in two fragments."""
    data = memoryview(CONTENTS[key])
    digest = block_digest(LAYOUT.layout_id, key, data)
    block = OutgoingBlock(transfer, (LAYOUT.layout_id, key), digest, data)
    middle = len(data) // 4 * 2
    made = []
    for start, end in ((0, middle), (middle, len(data))):
        one = Fragment(block, start, end - start)
        scratch = memoryview(bytearray(coded_bytes_max(end - start)))
        planes = (Plane("bfloat16", end - start),)
        coded = encode(data[start:end], planes, scratch) if is_coded else None
        if coded is None:
            made.append((encode_prefix(one), bytes(data[start:end])))
        else:
            prefix = encode_coded_prefix(one, EXPONENT_WINDOW_NUMBER, len(coded))
            made.append((prefix, bytes(coded)))
    return made


def rounded_fragments(transfer: bytes, key: BlockKey) -> list[Parts]:
    """The stream of a rounded block in two fragments."""
    stream, decoded = ROUNDED[key]
    name = LAYOUT.layout_id, key
    form, _ = read_head(stream, len(decoded))
    digest = block_digest(*name, decoded)
    block = OutgoingBlock(transfer, name, digest, decoded, form=form, stream=stream)
    middle, made = len(stream) // 2, []
    for start, end in ((0, middle), (middle, len(stream))):
        prefix = encode_stream_prefix(Fragment(block, start, end - start), LOSSY_NUMBER)
        made.append((prefix, stream[start:end]))
    return made


def bent(parts: list[Parts], chance: random.Random) -> list[Parts]:
    """Fragments that a hostile peer makes of good ones: each with one to three lies."""
    made = list(parts)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(made))
        prefix, body = bytearray(made[at][0]), bytearray(made[at][1])
        match chance.randrange(9):
            case 0:
                prefix[chance.randrange(len(prefix))] ^= 1 << chance.randrange(8)
            case 1 if body:
                body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
            case 2:  # Cut.
                del body[chance.randrange(len(body) + 1) :]
            case 3:  # Oversized.
                body += chance.randbytes(chance.choice((1, 100, FRAGMENT_BYTES_MAX)))
            case 4:  # Sizes and codec numbers that are lies: bombs, negative rests, other codecs.
                lie = chance.choice((0, 1, 7, 0x7FFFFFFF, 0xFFFFFFFF, FRAGMENT_BYTES_MAX + 1))
                place = chance.randrange(len(prefix) - 4)
                prefix[place : place + 4] = lie.to_bytes(4)
            case 5 if len(body) > 8:  # A stream that promises more than it has, or nothing.
                body[:6] = chance.choice((bytes(6), b"\x01\x7f\xff\xff\xff\xff", bytes([255]) * 6))
            case 6:  # Again, or in another order.
                made.insert(chance.randrange(len(made) + 1), made[at])
                continue
            case 7:
                made[at], made[-1] = made[-1], made[at]
                continue
            case _:  # A head of one fragment on the body of another.
                prefix = bytearray(chance.choice(made)[0])
        made[at] = bytes(prefix), bytes(body)
    return made


def damaged(stream: bytes, chance: random.Random) -> bytes:
    """Bytes after the opening that a path has changed, moved, repeated or cut."""
    made = bytearray(stream)
    at = chance.randrange(len(made))
    size = chance.randrange(1, 5000)
    match chance.randrange(5):
        case 0:
            made[at] ^= 1 << chance.randrange(8)
        case 1:
            del made[at : at + size]
        case 2:
            made[at:at] = made[at : at + size]
        case 3:
            made[at:at] = chance.randbytes(size)
        case _:
            del made[at:]
    return bytes(made)


@dataclass
class Session:
    """A link of the hostile pool, with a transfer that the node accepted."""

    peer: Peer
    secret: LinkSecret | None
    word: str
    transfer: bytes
    number: int = 0

    def opening(self) -> tuple[bytes, Callable[[Parts], bytes]]:
        """First bytes of the next data connection, and what seals its fragments."""
        self.number += 1
        if self.secret is None:
            join = frame(Join(pool="prfaas-pool", link=self.word, number=self.number))
            return join, b"".join
        sealer = Sealer(self.secret, self.number)
        sealed = SealedParts(sealer)

        def seal(parts: Parts) -> bytes:
            prefix, body = parts
            room = memoryview(prefix[:CODED_PREFIX_BYTES])
            return b"".join(bytes(part) for part in sealed.parts(room, memoryview(body)))

        return sealer.opening, seal


class Attacker:
    """The pool `prfaas-pool`, hostile, or at the far end of a hostile path.

    Args:
        site: The node.
        identities: Directory with its identity.
        encryption: Protection to offer, which the node has too.
        seed: Of everything that is drawn.
        ended_s: Time for a node to end a stream and to release all of a session, seconds.
    """

    def __init__(
        self,
        site: Site,
        identities: Path,
        encryption: LinkEncryption,
        seed: int,
        ended_s: float = 60.0,
    ) -> None:
        self._ended_s = ended_s
        self.figures = LinkFigures()
        self._site, self._identities, self._encryption = site, identities, encryption
        self._chance = random.Random(seed)

    async def run(self, num_streams: int) -> LinkFigures:
        """Send streams, AT_ONCE in each session, and compare what the node has after each.

        Raises:
            AssertionError: It holds a wrong block, keeps something, or ends a link for damage that
                only the path did.
        """
        is_sealed = self._encryption is not LinkEncryption.TLS
        kinds = [Damage.PEER, Damage.PATH] if is_sealed else [Damage.PEER]
        for start in range(0, num_streams, AT_ONCE):
            damage = kinds[start // AT_ONCE % len(kinds)]
            await self._round(damage, min(AT_ONCE, num_streams - start))
        before = self.figures.num_blocks
        for _ in range(LAST_ROUNDS):
            await self._round(Damage.NONE, AT_ONCE)
            if self.figures.num_blocks > before:
                return self.figures
        raise AssertionError("a good stream does not arrive any more")

    async def _round(self, damage: Damage, count: int) -> None:
        async with asyncio.timeout(self._ended_s):
            session = await self._begin()
        try:
            sends = [self._send(session, damage) for _ in range(count)]
            await asyncio.gather(*sends)
            if damage is Damage.NONE:
                async with asyncio.timeout(self._ended_s):
                    await until(lambda: self._site.held() or session.peer.closed)
            async with asyncio.timeout(self._ended_s):
                again = await self._check(session, damage)
            for transfer in (session.transfer, again):
                session.peer.channel.send(Abort(transfer_id=transfer))
            # By the end of transfers, while their link stands. A fragment that lies about its
            # transfer may be early for an offer: what is there of that goes with the link.
            await self._released({session.transfer, again})
        finally:
            session.peer.pinging.cancel()
            session.peer.channel.close("the round is over")
        await self._released()
        self._compare()

    async def _released(self, transfers: set[bytes] | None = None) -> None:
        """Wait until a node holds nothing: of these transfers, or at all."""
        inbound = self._site.node.inbound

        def has_released() -> bool:
            assemblies = [assembly for _, assembly in inbound.links.values()]
            held = {name[0] for each in assemblies for name in list(each._unfinished)}
            return not inbound.known.num_open and not (
                held if transfers is None else held & transfers
            )

        async with asyncio.timeout(self._ended_s):
            await until(has_released)

    async def _begin(self) -> Session:
        peer = await dial(self._site, self._identities, "prfaas-pool")
        word, transfer = secrets.token_hex(8), secrets.token_bytes(16)
        is_sealed = self._encryption is not LinkEncryption.TLS
        names = [WIRE_NAMES[self._encryption]] if is_sealed else []
        peer.channel.send(
            PoolHello(
                pool="prfaas-pool",
                epoch="e",
                link=word,
                codecs=[EXPONENT_WINDOW, LOSSY],
                encryptions=names,
            )
        )
        await until(lambda: bool(peer.of(Resumed)) and bool(peer.of(Decodes)))
        peer.channel.send(
            offer(self._identities, transfer, bytes_max=MEMORY // 2, quality=Quality.FP8)
        )
        await until(lambda: bool(peer.of(Accepted)))
        resumed = peer.of(Resumed)[0]
        assert isinstance(resumed, Resumed)
        secret = None
        if is_sealed:
            ends = "prfaas-pool", "pd-pool"
            secret = LinkSecret(self._encryption, *ends, word, resumed.secret)
        return Session(peer, secret, word, transfer)

    async def _send(self, session: Session, damage: Damage) -> None:
        """One data connection: says its stream, and waits for its end."""
        opening, seal = session.opening()
        number, chance, parts = session.number, self._chance, list[Parts]()
        for key in chance.sample(sorted(EXPECTED), 3):
            if key in ROUNDED:
                parts += rounded_fragments(session.transfer, key)
            else:
                parts += fragments(session.transfer, key, is_coded=chance.random() < 2 / 3)
        if damage is Damage.PEER:
            parts = bent(parts, chance)
        stream = b"".join(map(seal, parts))
        if damage is Damage.PATH:
            stream = damaged(stream, chance)
        self.figures.num_streams += 1
        self.figures.num_bytes += len(stream)
        tls = None
        if session.secret is None:
            tls = identity_in(self._identities, "prfaas-pool").dialling().data
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            reader, writer = await asyncio.open_connection(LOOPBACK, self._site.port, ssl=tls)
            try:
                await self._say(reader, writer, opening + stream)
                if tls is not None:
                    await self._taken(session, number, len(stream), reader)
            finally:
                writer.transport.abort()

    async def _say(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: bytes
    ) -> None:
        at = 0
        async with asyncio.timeout(self._ended_s):
            while at < len(stream):
                step = self._chance.randrange(1, 20_000)
                writer.write(stream[at : at + step])
                await writer.drain()
                at += step
                unfinished = self._site.node.link_port.data.unfinished_bytes
                self.figures.unfinished_most = max(self.figures.unfinished_most, unfinished)
            if writer.can_write_eof():
                writer.write_eof()
                await reader.read(1)

    async def _taken(
        self, session: Session, number: int, num_bytes: int, reader: asyncio.StreamReader
    ) -> None:
        """Wait until the node has read a stream or ended it; TLS has no end of one half."""
        data = self._site.node.link_port.data

        def is_over() -> bool:
            is_taken = data.received("prfaas-pool").get(number) == num_bytes
            return is_taken or reader.at_eof() or bool(session.peer.closed)

        async with asyncio.timeout(self._ended_s):
            await until(is_over)

    async def _check(self, session: Session, damage: Damage) -> bytes:
        """Compare the node's verdict with what was done; return the transfer offered for that."""
        assert self.figures.unfinished_most <= UNFINISHED_MAX
        # The node has read every stream to its end: what follows comes after its verdict.
        before = len(session.peer.messages)
        again = secrets.token_bytes(16)
        session.peer.channel.send(offer(self._identities, again, bytes_max=1024))
        await until(lambda: len(session.peer.messages) > before or bool(session.peer.closed))
        self.figures.num_links_ended += bool(session.peer.closed)
        if damage is not Damage.PEER:
            # On a machine that stands still, an end can be silent for too long.
            ended = [reason for reason in session.peer.closed if SILENT not in reason]
            assert not ended, f"the path's damage ended it: {ended}"
        return again

    def _compare(self) -> None:
        """Compare every byte of every block that is there, and drop it."""
        store = self._site.node.store
        for layout_id, key in list(store.names()):
            block = store.get(layout_id, key)
            assert block is not None
            assert layout_id == LAYOUT.layout_id
            assert key in EXPECTED, f"a block that nobody sent: {key}"
            assert bytes(block.data) == EXPECTED[key], f"wrong bytes in {key.block_hash[:1].hex()}"
            self.figures.num_blocks += 1
            self.figures.num_rounded += key in ROUNDED
        self._site.check()
        store.drop(list(store.names()))
