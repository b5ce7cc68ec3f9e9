"""Messages to control frames, and back."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, TypeAlias, get_args

import msgspec

from prfaas.errors import PeerError
from prfaas.wire.frames import VERSION, encode_control
from prfaas.wire.messages import base, comparing, engine, gateway, link, survey
from prfaas.wire.messages.base import Goodbye, Message, Ping, Pong, Unsupported
from prfaas.wire.messages.comparing import Compare
from prfaas.wire.messages.gateway import LinkLease, Order, Subscribe
from prfaas.wire.messages.link import (
    Abort,
    Accepted,
    Arrived,
    Committed,
    Connections,
    Decodes,
    Pull,
    Refused,
    Release,
    Resumed,
)
from prfaas.wire.messages.survey import Survey

AnyMessage: TypeAlias = Message
KINDS = tuple(
    {
        kind: None
        for conversation in (base, comparing, engine, gateway, link, survey)
        for kind in vars(conversation).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    }
)
"""All kinds of messages: those of every conversation."""

OfGateway = (
    Ping
    | Pong
    | Goodbye
    | Subscribe
    | Survey
    | Pull
    | Abort
    | Release
    | Order
    | Compare
    | LinkLease
)
"""Messages of gateways to pool nodes, of which `SnapshotEnd.takes` names those that one takes."""
ToSender = (
    Ping
    | Pong
    | Goodbye
    | Unsupported
    | Resumed
    | Decodes
    | Connections
    | Arrived
    | Accepted
    | Refused
    | Committed
    | Abort
    | Pull
)
"""Messages of the receiving end of a link to the sending one (`PoolHello.takes`)."""

KIND_CHARS_MAX, JOB_MAX = 64, 2**53


def tag_of(kind: type[Message]) -> str:
    """The name of a kind of message on the wire."""
    return str(kind.__struct_config__.tag)


def tags_of(union: object) -> list[str]:
    """The same of all kinds of a union, in order."""
    return [tag_of(kind) for kind in get_args(union)]


_TAGS = frozenset(map(tag_of, KINDS))


class UnknownMessageError(PeerError):
    """A message of a kind that this version does not know.

    Attributes:
        answer: What the peer is told.
    """

    def __init__(self, kind: str, job: int) -> None:
        self.answer = Unsupported(kind=kind, job=job)
        super().__init__(f"a message of the kind {kind!r}, which this version does not know")


class _Kind(msgspec.Struct):
    """The parts of any message that an answer needs."""

    t: str
    job: Any = 0


_kinds = msgspec.msgpack.Decoder(_Kind)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reduce(or_, KINDS))


def encode(message: Message, version: int = VERSION) -> bytes:
    """A whole control frame."""
    return encode_control(_encoder.encode(message), version)


def decode(payload: bytes) -> AnyMessage:
    """The message in a control frame.

    Raises:
        UnknownMessageError: It is of a kind that this version does not know.
        PeerError: The payload is no message.
    """
    try:
        message: AnyMessage = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unknown(payload) or PeerError(f"not a prfaas message: {error}") from None
    return message


def _unknown(payload: bytes) -> UnknownMessageError | None:
    """The error of a message of an unknown kind; None if it is something else."""
    try:
        found = _kinds.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if found.t in _TAGS or not 0 < len(found.t) <= KIND_CHARS_MAX:
        return None
    is_job = type(found.job) is int and 0 <= found.job <= JOB_MAX
    return UnknownMessageError(found.t, found.job if is_job else 0)
