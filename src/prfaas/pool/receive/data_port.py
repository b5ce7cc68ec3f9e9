"""The data connections of links, receiving end: on their lanes, straight into the blocks.

How many there may be, and which link each is of.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

from prfaas.core.invariants import check_invariants
from prfaas.core.transfer.events import NoRoom, Unwanted
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.errors import PeerError, without_frames, words_of
from prfaas.log_throttle import LogThrottle
from prfaas.pool.net.io_thread import Lane
from prfaas.pool.net.link_end import LinkEnd
from prfaas.pool.net.tls_sockets import HANDSHAKE_TIMEOUT_S, readable, shake_hands
from prfaas.pool.receive.block_assembly import Assembly, BlockBuffer, FragmentReader
from prfaas.pool.receive.decoding import Decoding
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.wire.fragments import FragmentPrefix, ReceivedBlock
from prfaas.wire.frames import FrameDecoder
from prfaas.wire.identity import peer_name
from prfaas.wire.messages.codec import decode
from prfaas.wire.messages.link import Join
from prfaas.wire.sealed.keys import LinkSecret
from prfaas.wire.sealed.records import (
    OPENING_BYTES,
    ConnectionNumbers,
    Opener,
    Opening,
    SealError,
    decode_opening,
)
from prfaas.wire.sockets import keep_alive

log = logging.getLogger(__name__)

JOIN_BYTES_MAX = 4096
DELIVERIES_MAX = 4
"""Limit of unprocessed blocks of a connection; more wait in the network."""
AT_ONCE_BYTES_MAX = 4 << 20
"""Largest block whose digest a lane compares: a millisecond in which its other connections wait."""


class DigestError(PeerError):
    """The bytes of a block are not what its sender named."""


@dataclass(frozen=True, slots=True)
class ReceivingSession:
    """The session to which data connections without TLS prove that they belong."""

    secret: LinkSecret
    """Their keys are made of it."""
    numbers: ConnectionNumbers
    """Connections that there were."""


class DataReceiver:
    """One accepted data connection.

    Args:
        connection: Accepted, nothing read yet.
        tls: Our identity; None for a connection without TLS.
    """

    def __init__(
        self, port: DataPort, connection: socket.socket, tls: ssl.SSLContext | None, lane: Lane
    ) -> None:
        self.peer = ""
        self.link = ""
        self.number = 0
        self.num_bytes = 0
        """Fragments received so far, their headers included."""
        self._port, self._plain, self._tls, self._lane = port, connection, tls, lane
        self._known, self.decoding = port.inbound.known, port.decoding
        self._task: asyncio.Task[None] | None = None
        self.is_killed = False
        self._num_handed_on = self._num_dealt_with = 0
        """Blocks; the lane counts the first, the node's loop the second."""
        self._unwanted = b""
        """The last transfer that was refused."""

    def start(self) -> None:
        """Begin, on its lane."""
        if not self._lane.call(self._start):
            self._plain.close()
            self._port.ended(self)

    def kill(self) -> None:
        """End it. Any thread may call it."""
        self.is_killed = True
        self._lane.call(lambda: self._task.cancel() if self._task is not None else None)

    # --- on its lane ---

    def _start(self) -> None:
        self._task = self._lane.start(self._run())
        self._task.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        """Also when it was killed before it began."""
        self._task = None
        self._plain.close()
        self._port.tell(self._port.ended, self)

    async def _run(self) -> None:
        try:
            self._plain.setblocking(False)
            keep_alive(self._plain)
            if self._tls is None:
                await self._receive_sealed()
                return
            with self._tls.wrap_socket(
                self._plain, server_side=True, do_handshake_on_connect=False
            ) as secured:
                await self._receive(secured)
        except PeerError as error:
            self._port.tell(self._port.broken, self.peer, without_frames(error))
        except OSError as error:
            log.info("data connection of %s: %r", self.peer or "a stranger", error)
            if not self.peer and not self.is_killed:
                reason = PeerError(words_of(error))
                self._port.tell(self._port.broken, "", reason)

    async def _receive(self, secured: ssl.SSLSocket) -> None:
        await shake_hands(secured)
        name = peer_name(secured, self._port.sources)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            join = await _read_join(secured)
        if join.pool != name:
            raise PeerError(f"a pool calls itself {join.pool}, its certificate {name}")
        self.number, self.link, self.peer = join.number, join.link, name
        await self._read(secured, None)

    async def _receive_sealed(self) -> None:
        """Nothing is kept of a caller but its opening until that is proved."""
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            opening = await _read_opening(self._plain)
        session = self._port.sessions.get(opening.link_id)
        if session is None:
            raise PeerError("a data connection is for no session that stands")
        opener = Opener(session.secret, opening)
        session.numbers.claim(opening.number)
        self.num_bytes = OPENING_BYTES
        self.number, self.link = opening.number, session.secret.link
        self.peer = session.secret.source
        await self._read(self._plain, opener)

    async def _read(self, connection: socket.socket, opener: Opener | None) -> None:
        assembly = self._port.find_assembly(self.peer, self.link)
        if assembly is None or self.is_killed:
            log.info("a data connection of %s is one too many, or of an earlier link", self.peer)
            return
        turn_bytes = self._port.inbound.limits.turn_bytes
        reader = FragmentReader(self, connection, assembly, opener, turn_bytes)
        try:
            await reader.ended
        finally:
            reader.stop()

    def takes(self, prefix: FragmentPrefix) -> bool:
        """Return True if a fragment is wanted.

        A sender of unwanted blocks is notified once per transfer.
        """
        transfer_id = prefix.transfer_id
        if self._known.wants(transfer_id, self.peer):
            return not self._known.has(transfer_id, (prefix.layout_id, prefix.key))
        self._drop(transfer_id, Unwanted)
        return False

    def no_room(self, prefix: FragmentPrefix) -> None:
        """A fragment is dropped as there is no memory for its block. Its transfer is over."""
        self._drop(prefix.transfer_id, NoRoom)

    def _drop(self, transfer_id: bytes, kind: type[Unwanted | NoRoom]) -> None:
        if transfer_id != self._unwanted:
            self._unwanted = transfer_id
            self._port.tell(self._port.inbound.report, kind(self.peer, transfer_id))

    def deliver(self, block: ReceivedBlock, reader: FragmentReader) -> bool:
        """Have a block's digest compared and hand it on; returns true if the next one may follow
        immediately."""
        self._num_handed_on += 1
        if reader.has_slept and not block.stream_bytes and len(block.data) <= AT_ONCE_BYTES_MAX:
            reader.has_slept = False
            self._check(block, reader)
        else:
            self._port.end.io.hash(lambda: self._check(block, reader))
        return self._num_handed_on - self._num_dealt_with < DELIVERIES_MAX

    def _check(self, block: ReceivedBlock, reader: FragmentReader) -> None:
        """On a thread for digests, or on its lane."""
        try:
            block = self.decoding.restored(block)
        except PeerError as refused:
            self._lane.call(reader.fail, without_frames(refused))
            return
        if block.is_intact:
            done = functools.partial(self._dealt_with, reader, block)
            self._port.tell(self._port.inbound.block, self.peer, block, done)
        else:
            error = DigestError(f"block {block.key.block_hash.hex()[:12]} fails its digest")
            self._lane.call(reader.fail, error)

    def _dealt_with(self, reader: FragmentReader, block: ReceivedBlock) -> None:
        """On the node's loop. The lane is woken only if it waits: that costs as much as a read."""
        self._num_dealt_with += 1  # Before it looks.
        if reader.has_arrived(block):
            self._lane.call(reader.go_on)


async def _read_opening(connection: socket.socket) -> Opening:
    data = b""
    while len(data) < OPENING_BYTES:
        try:
            part = connection.recv(OPENING_BYTES - len(data))
        except BlockingIOError:
            await readable(connection)
            continue
        if not part:
            raise OSError("the peer disconnected before its opening")
        data += part
    return decode_opening(data)


async def _read_join(secured: ssl.SSLSocket) -> Join:
    decoder = FrameDecoder(control_bytes_max=JOIN_BYTES_MAX)
    while True:
        try:
            data = secured.recv(decoder.missing_bytes)
        except ssl.SSLWantReadError:
            await readable(secured)
            continue
        if not data:
            raise OSError("the peer disconnected before its join")
        for frame in decoder.feed(data):
            message = decode(frame.payload)
            if not isinstance(message, Join):
                raise PeerError("the first message of a data connection has to name its link")
            return message


LINK_CONNECTIONS_MAX = 64
"""Limit of one link, however few there are."""
DATA_CALLERS_MAX = 256
"""Data connections that have not said whose they are; beyond these the one that waits longest is
left, so that strangers cannot keep peers out."""


class DataPort:
    """Accepts data connections, and connects each with the unfinished blocks of its link.

    Args:
        sources: Names that may send blocks.
        decoding: Agrees on codecs, and decodes coded fragments.
    """

    def __init__(
        self,
        end: LinkEnd,
        tls: ssl.SSLContext,
        sources: Set[str],
        inbound: InboundTransfers,
        decoding: Decoding,
    ) -> None:
        self.end, self._tls, self.sources = end, tls, sources
        self.inbound, self.decoding = inbound, decoding
        self._links = inbound.links
        self.sessions: dict[bytes, ReceivingSession] = {}
        """By public name: those of present links without TLS."""
        self._receivers: dict[DataReceiver, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._said = LogThrottle()

    def open(self) -> None:
        """Accept connections on this event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End every connection."""
        for receiver in self._receivers:
            receiver.kill()

    def take(self, connection: socket.socket, *, is_sealed: bool) -> None:
        """Take a connection of a caller that wants to send blocks; nothing is read of it yet.

        Sealed ones may be spread over the lanes: a fragment has its place in a block only while it
        is opened, in a single call.
        """
        callers = [one for one in self._receivers if not one.peer and not one.is_killed]
        if len(callers) >= DATA_CALLERS_MAX:
            callers[0].kill()
            self.end.metrics.link_refused.inc()
        is_spread = is_sealed and self.end.encryption is LinkEncryption.SEALED
        lane = self.end.io.take_lane() if is_spread else self.end.io
        receiver = DataReceiver(self, connection, None if is_sealed else self._tls, lane)
        self._receivers[receiver] = None
        receiver.start()

    def ended(self, receiver: DataReceiver) -> None:
        """A connection is gone."""
        self._receivers.pop(receiver, None)

    def broken(self, peer: str, error: PeerError) -> None:
        """A data connection broke the protocol: its peer cannot be trusted."""
        text = f"data connection of {peer or 'a stranger'} closed: {error}"
        if self._said.is_new(text):
            log.warning("%s", text)
        if isinstance(error, DigestError):
            self.end.metrics.blocks_dropped.labels(reason="digest").inc()
        # Not what somebody on the path sealed: the peer proved itself over TLS.
        is_of_peer = peer and not isinstance(error, SealError)
        channel = self.inbound.channels.of(peer) if is_of_peer else None
        if channel is not None:
            channel.distrust(str(error))  # Counted when it is closed.
        else:
            self.end.metrics.link_refused.inc()

    def begin_link(self, peer: str, word: str, secret: LinkSecret | None) -> None:
        """Register a peer's link.

        Args:
            word: By it its data connections identify themselves, within TLS.
            secret: By it those without TLS do; None if all have TLS.
        """
        if secret is not None:
            self.sessions[secret.id] = ReceivingSession(secret, ConnectionNumbers())
        inbound = self.inbound
        blocks_max = inbound.limits.unfinished_blocks_max
        self._links[peer] = word, Assembly(self._buffer, inbound.peer_bytes_max, blocks_max)

    def _buffer(self, num_bytes: int) -> BlockBuffer | None:
        """Memory to receive a block into; if there is none, some is freed. Any thread may ask."""
        buffer = self.inbound.store.room.receive_buffer(num_bytes)
        if buffer is None:
            self.tell(self._make_room)
        return buffer

    def _make_room(self) -> None:
        self.inbound.store.room.keep_room(is_waited=True)

    def end_link(self, peer: str) -> None:
        """End a peer's link: drop its connections and their unfinished blocks."""
        _, assembly = self._links.pop(peer, ("", None))
        for link_id in [key for key, one in self.sessions.items() if one.secret.source == peer]:
            del self.sessions[link_id]
        if assembly is not None:
            assembly.close()
        for receiver in list(self._receivers):
            if receiver.peer == peer:
                receiver.kill()

    @property
    def share(self) -> int:
        """Data connections that each link may have at present."""
        links = max(1, len(self._links))
        return max(1, min(LINK_CONNECTIONS_MAX, self.inbound.limits.connections_max // links))

    @property
    def unfinished_bytes(self) -> int:
        """Memory of blocks that have arrived only in part."""
        return sum(assembly.unfinished_bytes for _, assembly in self._links.values())

    def validate(self) -> None:
        """Check what has to hold between two events; AssertionError if it does not."""
        for _, assembly in self._links.values():
            assembly.validate()
        sources = {session.secret.source for session in self.sessions.values()}
        check_invariants([("sessions are of links", sources <= self._links.keys())])

    def received(self, peer: str) -> dict[int, int]:
        """Bytes received over each data connection of a peer, by its number."""
        mine = [receiver for receiver in self._receivers if receiver.peer == peer]
        return {receiver.number: receiver.num_bytes for receiver in mine}

    def drop_older(self, peer: str, numbers: list[int]) -> None:
        """The peer has only these data connections left, and any that are newer."""
        newest = max(numbers, default=-1)
        for receiver in list(self._receivers):
            is_known = receiver.number in numbers or receiver.number > newest
            if receiver.peer == peer and not is_known:
                receiver.kill()

    def find_assembly(self, peer: str, link: str) -> Assembly | None:
        """Return what a data connection joins, itself counted; None refuses it. Asked on a lane."""
        word, assembly = self._links.get(peer, ("", None))
        if word != link:
            return None
        present = [one for one in list(self._receivers) if one.peer and not one.is_killed]
        if sum(one.peer == peer and one.link == word for one in present) > self.share:
            return None
        if len(present) > self.inbound.limits.connections_max:
            self._drop_surplus(present)
        return assembly

    def _drop_surplus(self, present: list[DataReceiver]) -> None:
        """End the newest connection of the link with the most, if these are more than its share: an
        older peer is not told of its share."""
        peer, most = Counter(one.peer for one in present).most_common(1)[0]
        if most > self.share:
            next(one for one in reversed(present) if one.peer == peer).kill()

    def tell(self, what: Callable[..., object], *about: object) -> bool:
        """Have something done on the loop, from a thread; False if the loop has ended."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(what, *about)
        except RuntimeError:
            return False
        return True
