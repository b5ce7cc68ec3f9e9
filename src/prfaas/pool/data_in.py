"""The data connections of a link, receiving end: a thread each, which puts blocks together."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.core.blocks import BlockKey
from prfaas.errors import PeerError
from prfaas.pool.listener import HANDSHAKE_TIMEOUT_S
from prfaas.wire.fragments import (
    FRAGMENT_BYTES_MAX,
    PREFIX_BYTES,
    FragmentPrefix,
    decode_prefix,
)
from prfaas.wire.frames import BlockFrame, ControlFrame, FrameDecoder
from prfaas.wire.identity import peer_name
from prfaas.wire.messages import Join, decode
from prfaas.wire.sockets import hang_up, keep_alive

log = logging.getLogger(__name__)

JOIN_BYTES_MAX = 4096
UNFINISHED_BYTES_MAX = 1 << 30
UNFINISHED_BLOCKS_MAX = 64
"""Of one peer. A sender finishes a block before it starts the next, so these are far away."""
DELIVERIES_MAX = 4
"""Blocks of a connection that the event loop has not taken yet; more wait in the network."""


@dataclass(eq=False, slots=True)
class _Unfinished:
    """A block of which some fragments are here."""

    data: bytearray
    missing_bytes: int
    offsets: set[int] = field(default_factory=set)


class Assembly:
    """Puts the fragments of a peer's blocks together. Used by all its connections' threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unfinished: dict[tuple[bytes, bytes, BlockKey, bytes, int], _Unfinished] = {}
        self._bytes = 0

    def add(self, prefix: FragmentPrefix, data: memoryview) -> BlockFrame | None:
        """Take a fragment; one that is here already changes nothing.

        Returns:
            The block, if this was the last that was missing. Nothing is written to it afterwards.

        Raises:
            PeerError: The peer starts more blocks than it may.
        """
        name = prefix.transfer_id, prefix.layout_id, prefix.key, prefix.digest, prefix.block_bytes
        with self._lock:
            block = self._unfinished.get(name) or self._start(name)
            if prefix.offset in block.offsets:
                return None
            block.offsets.add(prefix.offset)
            block.missing_bytes -= prefix.num_bytes
            block.data[prefix.offset : prefix.offset + prefix.num_bytes] = data
            if block.missing_bytes > 0:
                return None
            self._drop(name)
        return BlockFrame(
            prefix.transfer_id, prefix.layout_id, prefix.key, prefix.digest, block.data
        )

    @property
    def unfinished_bytes(self) -> int:
        """Room taken by blocks of which only a part is here."""
        return self._bytes

    def forget(self, transfer_id: bytes) -> None:
        """Drop what is unfinished of a transfer."""
        with self._lock:
            for name in [name for name in self._unfinished if name[0] == transfer_id]:
                self._drop(name)

    def _start(self, name: tuple[bytes, bytes, BlockKey, bytes, int]) -> _Unfinished:
        size = name[-1]
        is_full = self._unfinished and self._bytes + size > UNFINISHED_BYTES_MAX
        if is_full or len(self._unfinished) >= UNFINISHED_BLOCKS_MAX:
            raise PeerError(
                f"{len(self._unfinished)} blocks are unfinished and another one is started; "
                f"the limits are {UNFINISHED_BLOCKS_MAX} blocks and {UNFINISHED_BYTES_MAX} bytes"
            )
        block = self._unfinished[name] = _Unfinished(bytearray(size), size)
        self._bytes += size
        return block

    def _drop(self, name: tuple[bytes, bytes, BlockKey, bytes, int]) -> None:
        del self._unfinished[name]
        self._bytes -= name[-1]


@dataclass(frozen=True, slots=True)
class DataHandlers:
    """What a data connection asks and tells; the first three are asked on
    the connection's thread, the others are told on the loop.

    Attributes:
        find_assembly: Of the link that a peer of that name joins; None if it has no such link.
        wants: Whether a peer's transfer takes blocks.
        has: Whether the block of a fragment has arrived with its transfer.
        on_block: A block is complete and intact; calls its second argument when it is dealt with.
        on_unwanted: Fragments of a transfer came that nobody waits for.
        on_broken: A peer broke the protocol.
        on_end: The connection is gone.
    """

    find_assembly: Callable[[str, str], Assembly | None]
    wants: Callable[[bytes, str], bool]
    has: Callable[[FragmentPrefix], bool]
    on_block: Callable[[str, BlockFrame, Callable[[], None]], None]
    on_unwanted: Callable[[str, bytes], None]
    on_broken: Callable[[str, str], None]
    on_end: Callable[[DataReceiver], None]


class DataReceiver:
    """One accepted data connection.

    Args:
        connection: Accepted, nothing read yet.
        tls: Our identity.
        sources: Names that may send blocks.
        handlers: Whom to ask and tell.
        tell: Runs something on the loop; False if that has ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        tls: ssl.SSLContext,
        sources: frozenset[str],
        handlers: DataHandlers,
        tell: Callable[..., bool],
    ) -> None:
        self.peer = ""
        self.link = ""
        self.number = 0
        self.num_bytes = 0
        """Fragments received so far, their headers included."""
        self._socket = connection
        self._tls = tls
        self._sources = sources
        self._handlers = handlers
        self._tell = tell
        self._room = threading.BoundedSemaphore(DELIVERIES_MAX)
        self.is_killed = False
        self.thread = threading.Thread(target=self._run, name="prfaas-data-in", daemon=True)

    def kill(self) -> None:
        """End it, whatever its thread does now."""
        self.is_killed = True
        hang_up(self._socket)

    def _run(self) -> None:
        try:
            self._receive()
        except PeerError as error:
            self._tell(self._handlers.on_broken, self.peer, str(error))
        except OSError as error:
            log.info("data connection of %s: %s", self.peer or "a stranger", error)
            if not self.peer and not self.is_killed:
                self._tell(self._handlers.on_broken, "", str(error))
        finally:
            self._socket.close()
            self._tell(self._handlers.on_end, self)

    def _receive(self) -> None:
        self._socket.setblocking(True)
        self._socket.settimeout(HANDSHAKE_TIMEOUT_S)
        keep_alive(self._socket)
        self._socket = secured = self._tls.wrap_socket(
            self._socket, server_side=True, do_handshake_on_connect=False
        )
        secured.do_handshake()
        name = peer_name(secured, self._sources)
        join = self._read_join()
        if join.pool != name:
            raise PeerError(f"a pool calls itself {join.pool}, its certificate {name}")
        self.peer, self.link, self.number = name, join.link, join.number
        assembly = self._handlers.find_assembly(name, join.link)
        if assembly is None or self.is_killed:
            log.info("a data connection of %s is for a link that is over", name)
            return
        secured.settimeout(None)
        prefix, data = bytearray(PREFIX_BYTES), memoryview(bytearray(FRAGMENT_BYTES_MAX))
        unwanted = b""
        while self._fill(memoryview(prefix)):
            fragment = decode_prefix(prefix)
            part = data[: fragment.num_bytes]
            if not self._fill(part):
                return
            if self._handlers.wants(fragment.transfer_id, name):
                if not self._handlers.has(fragment):
                    self._deliver(assembly.add(fragment, part))
            elif fragment.transfer_id != unwanted:
                unwanted = fragment.transfer_id
                self._tell(self._handlers.on_unwanted, name, unwanted)

    def _deliver(self, block: BlockFrame | None) -> None:
        if block is None:
            return
        if not block.is_intact:
            raise PeerError(f"block {block.key.block_hash.hex()[:12]} fails its digest")
        self._room.acquire()
        self._tell(self._handlers.on_block, self.peer, block, self._room.release)

    def _fill(self, view: memoryview) -> bool:
        """Read exactly as many bytes; False at the end of the stream."""
        while view:
            count = self._socket.recv_into(view)
            if not count:
                return False
            self.num_bytes += count
            view = view[count:]
        return True

    def _read_join(self) -> Join:
        decoder = FrameDecoder(control_bytes_max=JOIN_BYTES_MAX)
        while True:
            data = self._socket.recv(decoder.missing_bytes)
            if not data:
                raise OSError("the peer left before it joined")
            for frame in decoder.feed(data):
                message = decode(frame.payload) if isinstance(frame, ControlFrame) else None
                if not isinstance(message, Join):
                    raise PeerError("a data connection has to say first which link it joins")
                return message
