"""The data connections of a link, receiving end: on their lanes, straight into the blocks."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Set
from dataclasses import dataclass

from prfaas.core.transfer.events import NoRoom, Unwanted
from prfaas.errors import PeerError, without_frames, words_of
from prfaas.pool.net.io_thread import IoThread, Lane
from prfaas.pool.net.tls_sockets import HANDSHAKE_TIMEOUT_S, readable, shake_hands
from prfaas.pool.receive.block_assembly import Assembly
from prfaas.pool.receive.decoding import Decoding
from prfaas.pool.receive.fragment_reader import FragmentReader, Stream
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.wire.fragments import FragmentPrefix, FragmentStream, ReceivedBlock
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
    decode_opening,
)
from prfaas.wire.sealed.streams import ClearStream, SealedStream
from prfaas.wire.sockets import keep_alive

log = logging.getLogger(__name__)

JOIN_BYTES_MAX = 4096
DELIVERIES_MAX = 4
"""Limit of unprocessed blocks of a connection; more wait in the network."""


class DigestError(PeerError):
    """The bytes of a block are not what its sender named."""


@dataclass(frozen=True, slots=True)
class ReceivingSession:
    """The session to which data connections without TLS prove that they belong.

    Attributes:
        secret: Their keys are made of it.
        numbers: Connections that there were.
    """

    secret: LinkSecret
    numbers: ConnectionNumbers


@dataclass(frozen=True, slots=True)
class DataHandlers:
    """Callbacks and limits of a data connection. The first two callbacks run on its lane, the
    others on the node's loop.

    Attributes:
        inbound: The transfers: which blocks are wanted, and where they go.
        decoding: Decoder of coded fragments.
        find_session: Session with a public name; None if there is none.
        find_assembly: Of the link that a peer of that name joins; None if it has no such link, or
            enough data connections.
        on_broken: A peer broke the protocol.
        on_end: The connection is gone.
    """

    inbound: InboundTransfers
    decoding: Decoding
    find_session: Callable[[bytes], ReceivingSession | None]
    find_assembly: Callable[[str, str], Assembly | None]
    on_broken: Callable[[str, PeerError], None]
    on_end: Callable[[DataReceiver], None]


class DataReceiver:
    """One accepted data connection.

    Args:
        connection: Accepted, nothing read yet.
        tls: Our identity; None for a connection without TLS.
        sources: Names that may send blocks.
        tell: Runs a function on the node's loop; False if the loop has ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        tls: ssl.SSLContext | None,
        sources: Set[str],
        handlers: DataHandlers,
        io: IoThread,
        lane: Lane,
        tell: Callable[..., bool],
    ) -> None:
        self.peer = ""
        self.link = ""
        self.number = 0
        self.num_bytes = 0
        """Fragments received so far, their headers included."""
        self._plain = connection
        self._tls = tls
        self._sources = sources
        self._handlers, self._machine = handlers, handlers.inbound.machine
        self._io, self._lane = io, lane
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self.is_killed = False
        self._num_waiting = 0
        """Blocks that were handed on and are not dealt with."""
        self._unwanted = b""
        """The last transfer that was refused."""

    def start(self) -> None:
        """Begin, on its lane."""
        if not self._lane.call(self._start):
            self._plain.close()
            self._handlers.on_end(self)

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
        self._tell(self._handlers.on_end, self)

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
            self._tell(self._handlers.on_broken, self.peer, without_frames(error))
        except OSError as error:
            log.info("data connection of %s: %r", self.peer or "a stranger", error)
            if not self.peer and not self.is_killed:
                reason = PeerError(words_of(error))
                self._tell(self._handlers.on_broken, "", reason)

    async def _receive(self, secured: ssl.SSLSocket) -> None:
        await shake_hands(secured)
        name = peer_name(secured, self._sources)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            join = await _read_join(secured)
        if join.pool != name:
            raise PeerError(f"a pool calls itself {join.pool}, its certificate {name}")
        self.number, self.link, self.peer = join.number, join.link, name
        await self._read(secured, FragmentStream)

    async def _receive_sealed(self) -> None:
        """Nothing is kept of a caller but its opening until that is proved."""
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            opening = await _read_opening(self._plain)
        session = self._handlers.find_session(opening.link_id)
        if session is None:
            raise PeerError("a data connection is for no session that stands")
        opener = Opener(session.secret, opening)
        session.numbers.claim(opening.number)
        self.num_bytes = OPENING_BYTES
        self.number, self.link = opening.number, session.secret.link
        self.peer = session.secret.source
        make = SealedStream if opener.is_encrypted else ClearStream
        await self._read(self._plain, lambda place: make(opener, place))

    async def _read(
        self,
        connection: socket.socket,
        make_stream: Callable[[Callable[[FragmentPrefix], memoryview]], Stream],
    ) -> None:
        assembly = self._handlers.find_assembly(self.peer, self.link)
        if assembly is None or self.is_killed:
            log.info("a data connection of %s is one too many, or of an earlier link", self.peer)
            return
        turn_bytes = self._handlers.inbound.limits.turn_bytes
        reader = FragmentReader(self, connection, assembly, make_stream, turn_bytes)
        try:
            await reader.ended
        finally:
            reader.stop()

    @property
    def decoding(self) -> Decoding:
        """Decoder of coded fragments."""
        return self._handlers.decoding

    def takes(self, prefix: FragmentPrefix) -> bool:
        """Return True if a fragment is wanted.

        A sender of unwanted blocks is notified once per transfer.
        """
        transfer_id = prefix.transfer_id
        if self._machine.wants(transfer_id, self.peer):
            return not self._machine.has(transfer_id, (prefix.layout_id, prefix.key))
        self._drop(transfer_id, Unwanted)
        return False

    def no_room(self, prefix: FragmentPrefix) -> None:
        """A fragment is dropped as there is no memory for its block. Its transfer is over."""
        self._drop(prefix.transfer_id, NoRoom)

    def _drop(self, transfer_id: bytes, kind: type[Unwanted | NoRoom]) -> None:
        if transfer_id != self._unwanted:
            self._unwanted = transfer_id
            self._tell(self._handlers.inbound.report, kind(self.peer, transfer_id))

    def deliver(self, block: ReceivedBlock, reader: FragmentReader) -> bool:
        """Have a block's digest compared and hand it on.

        Returns:
            True if the next one may follow immediately.
        """
        self._num_waiting += 1
        self._io.hash(lambda: self._check(block, reader))
        return self._num_waiting < DELIVERIES_MAX

    def _check(self, block: ReceivedBlock, reader: FragmentReader) -> None:
        """On the thread for digests."""
        try:
            block = self.decoding.restored(block)
        except PeerError as refused:
            self._lane.call(reader.fail, without_frames(refused))
            return
        if block.is_intact:
            self._tell(
                self._handlers.inbound.block,
                self.peer,
                block,
                lambda: self._lane.call(self._dealt_with, reader, block),
            )
        else:
            error = DigestError(f"block {block.key.block_hash.hex()[:12]} fails its digest")
            self._lane.call(reader.fail, error)

    def _dealt_with(self, reader: FragmentReader, block: ReceivedBlock) -> None:
        self._num_waiting -= 1
        reader.go_on(block)


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
