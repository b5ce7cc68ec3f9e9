"""The data connections that peers opened: how many there may be, and which link each is of."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Set

from prfaas.errors import PeerError
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.receive.block_assembly import Assembly, BlockBuffer
from prfaas.pool.receive.data_receiver import DataHandlers, DataReceiver, ReceivingSession
from prfaas.pool.receive.decoding import Decoding
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.wire.sealed.keys import LinkSecret
from prfaas.wire.sealed.records import ConnectionNumbers

LINK_CONNECTIONS_MAX = 64
"""Limit of one link, however few there are."""
DATA_CALLERS_MAX = 256
"""Data connections that have not said whose they are; beyond these the one that waits longest is
left, so that strangers cannot keep peers out."""


class DataPort:
    """Accepts data connections, and connects each with the unfinished blocks of its link.

    Args:
        sources: Names that may send blocks.
        io: Where the connections live.
        decoding: Decoder of coded fragments.
        is_spread: True if connections without TLS are spread over the lanes. Sealed ones may be:
            a fragment has its place in a block only while it is opened, in a single call.
        on_broken: See `DataHandlers`.
        on_refused: Called for every unidentified connection that is closed.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        sources: Set[str],
        inbound: InboundTransfers,
        io: IoThread,
        decoding: Decoding,
        *,
        is_spread: bool,
        on_broken: Callable[[str, PeerError], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._tls = tls
        self._sources = sources
        self._inbound = inbound
        self._io = io
        self._is_spread = is_spread
        self._on_refused = on_refused
        self._links = inbound.links
        self._sessions: dict[bytes, ReceivingSession] = {}
        """By public name: those of present links without TLS."""
        self._receivers: dict[DataReceiver, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handlers = DataHandlers(
            inbound=inbound,
            decoding=decoding,
            find_session=self._sessions.get,
            find_assembly=self._find_assembly,
            on_broken=on_broken,
            on_end=lambda receiver: self._receivers.pop(receiver, None),
        )

    def open(self) -> None:
        """Accept connections on this event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End every connection."""
        for receiver in self._receivers:
            receiver.kill()

    def take(self, connection: socket.socket) -> None:
        """A caller wants to send blocks; nothing is read of it yet."""
        self._take(connection, self._tls)

    def take_sealed(self, connection: socket.socket) -> None:
        """The same for a caller without TLS."""
        self._take(connection, None)

    def _take(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        callers = [one for one in self._receivers if not one.peer and not one.is_killed]
        if len(callers) >= DATA_CALLERS_MAX:
            callers[0].kill()
            self._on_refused()
        lane = self._io.take_lane() if tls is None and self._is_spread else self._io
        receiver = DataReceiver(
            connection, tls, self._sources, self._handlers, self._io, lane, self._tell
        )
        self._receivers[receiver] = None
        receiver.start()

    def begin_link(self, peer: str, word: str, secret: LinkSecret | None) -> None:
        """Register a peer's link.

        Args:
            word: By it its data connections identify themselves, within TLS.
            secret: By it those without TLS do; None if all have TLS.
        """
        if secret is not None:
            self._sessions[secret.id] = ReceivingSession(secret, ConnectionNumbers())
        inbound = self._inbound
        blocks_max = inbound.limits.unfinished_blocks_max
        self._links[peer] = word, Assembly(self._buffer, inbound.peer_bytes_max, blocks_max)

    def _buffer(self, num_bytes: int) -> BlockBuffer | None:
        """Memory to receive a block into; if there is none, some is freed. Any thread may ask."""
        buffer = self._inbound.buffer(num_bytes)
        if buffer is None:
            self._tell(self._inbound.make_room)
        return buffer

    def end_link(self, peer: str) -> None:
        """End a peer's link: drop its connections and their unfinished blocks."""
        _, assembly = self._links.pop(peer, ("", None))
        for link_id in [key for key, one in self._sessions.items() if one.secret.source == peer]:
            del self._sessions[link_id]
        if assembly is not None:
            assembly.close()
        for receiver in list(self._receivers):
            if receiver.peer == peer:
                receiver.kill()

    @property
    def share(self) -> int:
        """Data connections that each link may have at present."""
        links = max(1, len(self._links))
        return max(1, min(LINK_CONNECTIONS_MAX, self._inbound.limits.connections_max // links))

    @property
    def unfinished_bytes(self) -> int:
        """Memory of blocks that have arrived only in part."""
        return sum(assembly.unfinished_bytes for _, assembly in self._links.values())

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

    def _find_assembly(self, peer: str, link: str) -> Assembly | None:
        """Return what a data connection joins, itself counted; None refuses it. Asked on a lane."""
        word, assembly = self._links.get(peer, ("", None))
        if word != link:
            return None
        present = [one for one in list(self._receivers) if one.peer and not one.is_killed]
        if sum(one.peer == peer and one.link == word for one in present) > self.share:
            return None
        if len(present) > self._inbound.limits.connections_max:
            self._drop_surplus(present)
        return assembly

    def _drop_surplus(self, present: list[DataReceiver]) -> None:
        """End the newest connection of the link with the most, if these are more than its share: an
        older peer is not told of its share."""
        peer, most = Counter(one.peer for one in present).most_common(1)[0]
        if most > self.share:
            next(one for one in reversed(present) if one.peer == peer).kill()

    def _tell(self, what: Callable[..., None], *about: object) -> bool:
        """Have something done on the loop, from a thread; False if the loop has ended."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(what, *about)
        except RuntimeError:
            return False
        return True
