"""A connection that carries frames, on asyncio, and the detection of silent peers."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.errors import PeerError
from prfaas.wire.frames import VERSION, Frame, FrameDecoder, VersionError
from prfaas.wire.messages.base import Goodbye, Message, Ping
from prfaas.wire.messages.codec import UnknownMessageError, encode

REASON_CHARS_MAX = 512
END_S = 2.0
"""Time in which a peer reads what it was sent before its connection ended."""


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Limits on the bytes that a connection has not sent yet."""

    write_buffer_bytes: int = 1 << 20
    """Beyond it senders wait (`Channel.drained`)."""
    unread_bytes_max: int = 64 << 20
    """A peer that sends requests and leaves more bytes of answers unread is disconnected."""


LIMITS = ChannelLimits()


class Channel(asyncio.Protocol):
    """One framed connection. Lives on one event loop; not thread-safe.

    Args:
        on_frame: Called with every frame, in order. A `PeerError` it raises closes the channel,
            except that a message of an unknown kind is answered.
        on_close: Called once when the connection is gone, with the reason.
        on_open: Called once when the connection, TLS included, stands. A `PeerError` it raises
            refuses the peer before any frame is read.
        limits: On unsent bytes.
    """

    def __init__(
        self,
        on_frame: Callable[[Channel, Frame], None],
        on_close: Callable[[Channel, str], None],
        on_open: Callable[[Channel], None] = lambda _: None,
        limits: ChannelLimits = LIMITS,
    ) -> None:
        self._limits = limits
        self._on_frame = on_frame
        self._on_close = on_close
        self._on_open = on_open
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._reason = "the peer closed the connection"
        self._ending: asyncio.TimerHandle | None = None
        """Closes a connection that ends; None before."""
        self.peer = ""
        """Name of the peer, once known."""
        self.heard_at = 0.0
        """Loop time of the last bytes from the peer."""
        self.broke_protocol = False
        """True if it was closed because of the peer's identity or data."""

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"{type(transport).__name__} is not a stream transport")
        self._transport = transport
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._writable.set()
        self.heard_at = asyncio.get_running_loop().time()
        self._guard(lambda: self._on_open(self))

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self.heard_at = asyncio.get_running_loop().time()
        if self._ending is None:
            self._guard(lambda: self._deliver(data))

    def pause_writing(self) -> None:
        """Called by asyncio."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Called by asyncio."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        if self._ending is not None:
            self._ending.cancel()
        elif exc is not None:
            self._reason = f"{type(exc).__name__}: {exc}"
        self._transport = None
        self._writable.set()
        self._on_close(self, self._reason)

    # --- our side ---

    @property
    def is_open(self) -> bool:
        """Return True if frames can be sent."""
        is_closing = self._transport is None or self._transport.is_closing()
        return not is_closing and self._ending is None

    @property
    def ssl_object(self) -> ssl.SSLObject | None:
        """The TLS session; None on a plain connection."""
        return self._transport.get_extra_info("ssl_object") if self._transport else None

    @property
    def socket(self) -> socket.socket | None:
        """The socket underneath, for options."""
        return self._transport.get_extra_info("socket") if self._transport else None

    @property
    def backlog_bytes(self) -> int:
        """Bytes accepted by `send` that the socket has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, message: Message) -> None:
        """Send a message; dropped if the channel is closed."""
        if self._transport is not None and self._ending is None:
            self._transport.write(encode(message))

    def pause_reading(self) -> None:
        """Read no more; the peer feels it once the buffers between are full."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._transport is not None:
            self._transport.resume_reading()

    async def drained(self) -> None:
        """Wait until the connection takes more, or is gone."""
        await self._writable.wait()

    def close(self, reason: str) -> None:
        """Close immediately; unsent data is dropped."""
        if self._transport is not None:
            self._reason = reason
            self._transport.abort()

    def end(self, reason: str, limit_s: float = END_S) -> None:
        """Send what was accepted, then the reason, at which the peer closes. Nothing that it sends
        is handled any more.

        TLS has no other orderly end while the peer sends: data that it sends before it has read
        all would turn our close into a reset.

        Args:
            limit_s: The connection is closed after so long, whatever the peer has read.
        """
        if self.is_open:
            self.send(Goodbye(reason=reason[:REASON_CHARS_MAX]))
            self._reason = reason
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(limit_s, self.close, reason)

    def distrust(self, reason: str, version: int = VERSION) -> None:
        """Close it because of the peer's behaviour, and report the reason; unidentified peers get
        no names.

        Args:
            version: Of the protocol that the peer understands.
        """
        self.broke_protocol = True
        told = reason if self.peer else "you are not on the list here"
        if self._transport is not None:
            self._transport.write(encode(Goodbye(reason=told[:REASON_CHARS_MAX]), version))
        self.close(f"protocol error: {reason}")

    def _deliver(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            if not self.is_open:
                return
            try:
                self._on_frame(self, frame)
            except UnknownMessageError as error:
                self.send(error.answer)  # The peer is newer, and goes on without.
            if self.backlog_bytes > self._limits.unread_bytes_max:
                self.close("the peer does not read its answers")

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except VersionError as error:
            self.distrust(str(error), error.version)
        except PeerError as error:
            self.distrust(str(error))


PING_INTERVAL_S = 1.0
SILENCE_MAX_S = 5.0
"""A path that carries nothing for this long is dead: five lost pings in a row."""


async def keep_alive(
    channel: Channel,
    *,
    ping_interval_s: float = PING_INTERVAL_S,
    silence_max_s: float = SILENCE_MAX_S,
) -> None:
    """Ping the peer, and close the channel after silence. Ends with the channel."""
    loop = asyncio.get_running_loop()
    while channel.is_open:
        if loop.time() - channel.heard_at > silence_max_s:
            channel.close(f"silent for {silence_max_s:.0f} s")
            return
        channel.send(Ping())
        await asyncio.sleep(ping_interval_s)
