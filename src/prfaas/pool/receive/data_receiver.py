"""The data connections of a link, receiving end: on the I/O thread, straight into the blocks."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.errors import PeerError
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.net.tls_sockets import HANDSHAKE_TIMEOUT_S, readable, shake_hands
from prfaas.pool.receive.block_assembly import Assembly, NoRoomError
from prfaas.pool.receive.decoding import Decoding
from prfaas.wire.fragments import (
    FRAGMENT_BYTES_MAX,
    FragmentPrefix,
    FragmentStream,
    ReceivedBlock,
)
from prfaas.wire.frames import FrameDecoder
from prfaas.wire.identity import peer_name
from prfaas.wire.messages.codec import decode
from prfaas.wire.messages.link import Join
from prfaas.wire.sockets import keep_alive

log = logging.getLogger(__name__)

JOIN_BYTES_MAX = 4096
DELIVERIES_MAX = 4
"""Limit of unprocessed blocks of a connection; more wait in the network."""
WAKE_BYTES, RECORD_BYTES = 64 << 10, 18 << 10
"""Bytes for which a reader wakes up; a TLS record may be partly read."""
TURN_BYTES = 512 << 10
"""Bytes that a connection reads before the others are served."""


class DigestError(PeerError):
    """The bytes of a block are not what its sender named."""


@dataclass(frozen=True, slots=True)
class DataHandlers:
    """Callbacks of a data connection; the first four run on the I/O thread, the others on the
    node's loop.

    Attributes:
        decoding: Decoder of coded fragments.
        find_assembly: Of the link that a peer of that name joins; None if it has no such link.
        wants: True if a peer's transfer takes blocks.
        has: True if the block of a fragment has arrived with its transfer.
        on_block: A block is complete and intact; calls its last argument when it is dealt with.
        on_unwanted: Called for fragments of a transfer that no request waits for.
        on_no_room: Fragments of a transfer came for which there is no memory.
        on_broken: A peer broke the protocol.
        on_end: The connection is gone.
    """

    decoding: Decoding
    find_assembly: Callable[[str, str], Assembly | None]
    wants: Callable[[bytes, str], bool]
    has: Callable[[FragmentPrefix], bool]
    on_block: Callable[[str, ReceivedBlock, Callable[[], None]], None]
    on_unwanted: Callable[[str, bytes], None]
    on_no_room: Callable[[str, bytes], None]
    on_broken: Callable[[str, PeerError], None]
    on_end: Callable[[DataReceiver], None]


class DataReceiver:
    """One accepted data connection.

    Args:
        connection: Accepted, nothing read yet.
        tls: Our identity.
        sources: Names that may send blocks.
        handlers: Callbacks.
        io: Where it lives.
        tell: Runs a function on the node's loop; False if the loop has ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        tls: ssl.SSLContext,
        sources: frozenset[str],
        handlers: DataHandlers,
        io: IoThread,
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
        self._handlers = handlers
        self._io = io
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self.is_killed = False
        self._num_waiting = 0
        """Blocks that were handed on and are not dealt with."""
        self._unwanted = b""
        """The last transfer that was refused."""

    def start(self) -> None:
        """Begin, on the I/O thread."""
        if not self._io.call(self._start):
            self._plain.close()
            self._handlers.on_end(self)

    def kill(self) -> None:
        """End it. Any thread may call it."""
        self.is_killed = True
        self._io.call(lambda: self._task.cancel() if self._task is not None else None)

    # --- on the I/O thread ---

    def _start(self) -> None:
        self._task = self._io.start(self._run())
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
            with self._tls.wrap_socket(
                self._plain, server_side=True, do_handshake_on_connect=False
            ) as secured:
                await self._receive(secured)
        except PeerError as error:
            self._tell(self._handlers.on_broken, self.peer, error.with_traceback(None))
        except OSError as error:
            log.info("data connection of %s: %r", self.peer or "a stranger", error)
            if not self.peer and not self.is_killed:
                reason = PeerError(str(error) or repr(error))
                self._tell(self._handlers.on_broken, "", reason)

    async def _receive(self, secured: ssl.SSLSocket) -> None:
        await shake_hands(secured)
        name = peer_name(secured, self._sources)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            join = await _read_join(secured)
        if join.pool != name:
            raise PeerError(f"a pool calls itself {join.pool}, its certificate {name}")
        self.number, self.link, self.peer = join.number, join.link, name
        assembly = self._handlers.find_assembly(name, join.link)
        if assembly is None or self.is_killed:
            log.info("a data connection of %s is for a link that is over", name)
            return
        reader = _Reader(self, secured, assembly)
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
        if self._handlers.wants(prefix.transfer_id, self.peer):
            return not self._handlers.has(prefix)
        self._drop(prefix, self._handlers.on_unwanted)
        return False

    def no_room(self, prefix: FragmentPrefix) -> None:
        """A fragment is dropped as there is no memory for its block. Its transfer is over."""
        self._drop(prefix, self._handlers.on_no_room)

    def _drop(self, prefix: FragmentPrefix, why: Callable[[str, bytes], None]) -> None:
        if prefix.transfer_id != self._unwanted:
            self._unwanted = prefix.transfer_id
            self._tell(why, self.peer, self._unwanted)

    def deliver(self, block: ReceivedBlock, reader: _Reader) -> bool:
        """Have a block's digest compared and hand it on.

        Returns:
            Whether the next one may follow at once.
        """
        self._num_waiting += 1
        self._io.hash(lambda: self._check(block, reader))
        return self._num_waiting < DELIVERIES_MAX

    def _check(self, block: ReceivedBlock, reader: _Reader) -> None:
        """On the thread for digests."""
        if block.is_intact:
            self._tell(
                self._handlers.on_block,
                self.peer,
                block,
                lambda: self._io.call(self._dealt_with, reader, block),
            )
        else:
            error = DigestError(f"block {block.key.block_hash.hex()[:12]} fails its digest")
            self._io.call(reader.fail, error)

    def _dealt_with(self, reader: _Reader, block: ReceivedBlock) -> None:
        self._num_waiting -= 1
        reader.go_on(block)


class _Reader:
    """Reads fragments: a prefix, then its bytes, into the block or into nowhere.

    A coded fragment is read beside its block and decoded when it is whole: only then it has a place
    in the block, so that it never waits for the network with a place that others could fill.
    """

    def __init__(self, receiver: DataReceiver, secured: ssl.SSLSocket, assembly: Assembly) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._receiver = receiver
        self._secured = secured
        self._number = secured.fileno()
        self._assembly = assembly
        self._nowhere = memoryview(bytearray(FRAGMENT_BYTES_MAX))
        self._stream = FragmentStream(self._begin)
        self._is_claimed = False
        self._is_paused = False
        self._wakes_at = 1
        self._loop.add_reader(self._number, self._read)
        self._loop.call_soon(self._read)  # Data received with the join is not announced again.

    def stop(self) -> None:
        """Read nothing more."""
        self._loop.remove_reader(self._number)
        if self._stream.prefix is not None and self._is_claimed:
            self._assembly.release(self._stream.prefix, self)
        self._stream.let_go()
        if not self.ended.done():
            self.ended.cancel()

    def fail(self, error: Exception) -> None:
        """End the connection."""
        if not self.ended.done():
            # Its traceback would keep the read buffer.
            self.ended.set_exception(error.with_traceback(None))

    def disown(self) -> None:
        """Another connection brings the fragment that is being read."""
        self._stream.view = self._nowhere[: len(self._stream.view)]
        self._is_claimed = False

    def go_on(self, block: ReceivedBlock) -> None:
        """A block is dealt with: free are further ones."""
        self._assembly.has_arrived(block)
        if self._is_paused and not self.ended.done():
            self._is_paused = False
            self._loop.add_reader(self._number, self._read)
            self._read()

    def _read(self) -> None:
        left = TURN_BYTES
        try:
            while left > 0 and not self._is_paused and not self.ended.done():
                count = self._secured.recv_into(self._stream.view)
                if not count:
                    self.ended.set_result(None)
                    return
                left -= count
                self._receiver.num_bytes += count
                fragment = self._stream.filled(count)
                if fragment is not None:
                    self._finish(fragment)
            if not self._is_paused and not self.ended.done():
                # The rest may be below the wake-up threshold of the socket, and is then not
                # announced.
                self._loop.call_soon(self._read)
        except ssl.SSLWantReadError:
            self._sleep()
        except (OSError, PeerError) as error:
            self.fail(error)

    def _sleep(self) -> None:
        """Wake up for a large part of the missing bytes, not for every segment."""
        stream = self._stream
        missing = len(stream.view) - RECORD_BYTES if stream.prefix is not None else 0
        wanted = min(max(1, missing), WAKE_BYTES)
        if wanted != self._wakes_at:
            self._wakes_at = wanted
            self._secured.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _begin(self, prefix: FragmentPrefix) -> memoryview:
        if prefix.codec:
            self._receiver.decoding.check(self._receiver.peer, self._receiver.link, prefix)
            return self._nowhere[: prefix.payload_bytes]
        place = self._claim(prefix)
        return self._nowhere[: prefix.num_bytes] if place is None else place

    def _claim(self, prefix: FragmentPrefix) -> memoryview | None:
        place = None
        if self._receiver.takes(prefix):
            try:
                place = self._assembly.claim(prefix, self)
            except NoRoomError:
                self._receiver.no_room(prefix)
        self._is_claimed = place is not None
        return place

    def _decode(self, prefix: FragmentPrefix) -> None:
        place = self._claim(prefix)
        if place is None:
            return
        try:
            self._receiver.decoding.decode(self._nowhere[: prefix.payload_bytes], place)
        except PeerError:
            self._assembly.release(prefix, self)
            raise

    def _finish(self, prefix: FragmentPrefix) -> None:
        self._receiver.decoding.came(self._receiver.peer, prefix)
        if prefix.codec:
            self._decode(prefix)
        block = self._assembly.written(prefix) if self._is_claimed else None
        if block is not None and not self._receiver.deliver(block, self):
            self._is_paused = True
            self._loop.remove_reader(self._number)


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
