"""Messages between workers and the decider, and the channel that carries them.

A frame is the length of its body, 4 bytes, and the body in MessagePack. The channel is a pair of
connected sockets that a worker inherits, so nobody else can speak on it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from prfaas.core.kv.blocks import Layout
from prfaas.gateway.openai.requests import ClientRequest

FRAME_BYTES_MAX = 64 << 20
"""Limit of a message: the largest body of a request, and its tokens and hashes."""
UNSENT_BYTES_MAX = 256 << 20
"""Limit of what waits to be read by the other side; above it, the other side hangs."""
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A message; `number` is that of a request of one worker."""


class StreamedCounts(msgspec.Struct, array_like=True, gc=False):
    """The streamed part of an answer; times as `RequestRecord` has them."""

    ttft_ns: int | None = None
    output_at_ns: int | None = None
    gap_ns: int = 0
    num_output_tokens: int = 0


# Of a worker


class Ready(Message):
    """The worker takes connections."""


class Beat(Message):
    """The worker is well; sent once a second, and answered."""

    num_open: int
    """Connections of clients."""
    closed: dict[str, int]
    """Connections that it has closed since it began, by reason."""


class Ask(Message):
    """A request came in."""

    number: int
    tenant: str
    request_id: str
    headers: dict[str, str]
    """Those that the decider reads."""
    started_at_ns: int
    started_unix_s: float
    client: ClientRequest
    sequences: list[bytes]
    """Token ids of each prompt, unsigned, of 32 bits, in this machine's order."""
    hashes: bytes
    named_by: str
    """See `MadePrompt`."""


class StreamBegun(Message):
    """The first token of a stream has come."""

    number: int
    counts: StreamedCounts


class Broken(msgspec.Struct, array_like=True, gc=False):
    """The break of a leg: a `LegBrokenError`, or an `EngineUnreachableError` without a reason."""

    said: str
    reason: str = ""
    status: int = 0
    body: bytes = b""
    retry_after: str = ""
    is_failure: bool = False
    """The engine reported a failure of this request."""
    had_request: bool = False
    """It dropped the connection after the request was sent."""
    down: str = ""
    """Fate of the connection, for operators."""


class LegEnded(Message):
    """A decode leg has ended."""

    number: int
    status: int
    counts: StreamedCounts
    is_refused: bool = False
    """The engine answered with a status of 4xx."""
    usage: tuple[int, int, int] | None = None
    """Tokens of the prompt, of the answer, and cached ones as the client sees them; None if they
    did not come."""
    decode_cached: int = 0
    """Cached tokens as the engine sees them."""
    has_begun: bool = False
    """The client has something of the answer."""
    broken: Broken | None = None
    relayed: tuple[list[int], str, Any, str | None] | None = None
    """Token ids, text, creation time and finish reason of a stream that another engine may
    continue."""


class Written(Message):
    """A `Write` has been carried out."""

    number: int


class Gone(Message):
    """The client has left, or is not served any more."""

    number: int
    counts: StreamedCounts


# Of the decider


class PromptFacts(Message):
    """Facts that prompts are made with; sent when they change."""

    max_model_len: int = 0
    """Of the engine that takes the longest prompts; 0 without one."""
    layout: Layout | None = None
    adapters: frozenset[str] = frozenset()
    is_own: bool = False
    """Chats are rendered by gateways."""
    takes_parts: bool = False
    """See `ChatRenderer`."""


class Answered(Message):
    """A `Beat` has come."""


class Leg(Message):
    """Run the decode leg, and relay its answer.

    Attributes:
        trace: Headers of the leg.
        headers: Those of the answer.
        transfer: Id, source and destination of what is in transit.
        may_continue: Another engine may go on with it.
        cached_max, cache_end: See `UsageCorrection`.
    """

    number: int
    engine: str
    url: str
    rank: int | None
    max_model_len: int
    trace: dict[str, str]
    headers: dict[str, str]
    transfer: tuple[bytes, str, str] | None
    may_continue: bool
    cached_max: int | None
    cache_end: int | None


class StopLeg(Message):
    """End the decode leg; nothing of it is reported."""

    number: int


class Open(Message):
    """Send the head of a stream; or the whole answer of an engine, with these headers."""

    number: int
    headers: dict[str, str]


class Comment(Message):
    """Send a comment, while nothing of the answer has come."""

    number: int


class Write(Message):
    """Send a part of a stream."""

    number: int
    data: bytes
    is_last: bool = False


class Reply(Message):
    """Send a whole answer."""

    number: int
    status: int
    headers: dict[str, str]
    body: bytes


class CloseClient(Message):
    """Close the connection of the client."""

    number: int


class StopListening(Message):
    """Take no more connections."""


OfWorker = Ready | Beat | Ask | StreamBegun | LegEnded | Written | Gone
OfDecider = (
    PromptFacts
    | Answered
    | Leg
    | StopLeg
    | Open
    | Comment
    | Write
    | Reply
    | CloseClient
    | StopListening
)
_encoder = msgspec.msgpack.Encoder()


class Owner(Protocol):
    """The user of a channel."""

    def take(self, message: Any) -> None:
        """Handle a message."""

    def lost(self) -> None:
        """The other side is gone."""


class WorkerChannel(asyncio.Protocol):
    """One end of a channel. What one turn of the event loop sends is one system call.

    Args:
        kind: Messages of the other side.
    """

    def __init__(self, kind: Any, owner: Owner) -> None:
        self._decoder, self._owner = msgspec.msgpack.Decoder(kind), owner
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._received = bytearray()
        self._call_soon: Callable[..., object] = asyncio.get_running_loop().call_soon

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def send(self, message: Message) -> None:
        """Send a message; nothing happens once the other side is gone.

        Raises:
            OverflowError: It has a number that MessagePack has not, or is too long.
        """
        body = _encoder.encode(message)
        if len(body) > FRAME_BYTES_MAX:
            raise OverflowError(f"a message of {len(body)} bytes; {FRAME_BYTES_MAX} is the limit")
        if not self._unsent:
            self._call_soon(self._flush)
        self._unsent += (_LENGTH.pack(len(body)), body)

    def _flush(self) -> None:
        unsent, self._unsent = b"".join(self._unsent), []
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(unsent)
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle all messages that are complete."""
        received = self._received
        received += data
        start = 0
        while len(received) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(received, start)
            end = start + _LENGTH.size + size
            if size > FRAME_BYTES_MAX:
                self.close()
                return
            if len(received) < end:
                break
            with memoryview(received)[start + _LENGTH.size : end] as body:
                message = self._decoder.decode(body)
            self._owner.take(message)
            start = end
        del received[:start]

    def connection_lost(self, exc: BaseException | None) -> None:
        """The other side is gone."""
        self._transport = None
        self._owner.lost()

    def close(self) -> None:
        """End it, once what was sent has been read."""
        if self._transport is not None:
            self._flush()
            self._transport.close()
