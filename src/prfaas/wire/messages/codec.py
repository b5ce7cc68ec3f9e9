"""Messages to control frames, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from prfaas.errors import PeerError
from prfaas.wire.frames import VERSION, encode_control
from prfaas.wire.messages.base import Goodbye, Message, Ping, Pong
from prfaas.wire.messages.comparing import Compare, Compared
from prfaas.wire.messages.engine import (
    EngineHello,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Push,
    PushDone,
    Store,
    StoreDone,
    Touch,
    TransferOver,
)
from prfaas.wire.messages.gateway import (
    Evicted,
    LinkLease,
    Pinned,
    PinPrefix,
    PoolState,
    Purge,
    Purged,
    PurgeEnd,
    PurgeEnded,
    PurgePrefix,
    Snapshot,
    SnapshotEnd,
    Stored,
    Subscribe,
    TransferEnded,
)
from prfaas.wire.messages.link import (
    Abort,
    Accepted,
    Arrived,
    Commit,
    Committed,
    Decodes,
    Join,
    Missing,
    Offer,
    PoolHello,
    Pull,
    Refused,
    Release,
    Resumed,
)
from prfaas.wire.messages.survey import Survey, Surveyed

AnyMessage = (
    Ping
    | Pong
    | Goodbye
    | EngineHello
    | Push
    | Store
    | StoreDone
    | PushDone
    | Lookup
    | LookupDone
    | Load
    | LoadDone
    | Touch
    | TransferOver
    | PoolHello
    | Join
    | Resumed
    | Decodes
    | Arrived
    | Committed
    | Offer
    | Accepted
    | Refused
    | Commit
    | Abort
    | Release
    | Pull
    | Missing
    | Subscribe
    | Snapshot
    | SnapshotEnd
    | Stored
    | Evicted
    | TransferEnded
    | PoolState
    | LinkLease
    | Purge
    | PurgeEnd
    | PurgeEnded
    | PurgePrefix
    | PinPrefix
    | Pinned
    | Purged
    | Compare
    | Compared
    | Survey
    | Surveyed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message, version: int = VERSION) -> bytes:
    """A whole control frame."""
    return encode_control(_encoder.encode(message), version)


def decode(payload: bytes) -> AnyMessage:
    """The message in a control frame.

    Raises:
        PeerError: The payload is no known message.
    """
    try:
        message: AnyMessage = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"not a prfaas message: {error}") from None
    return message
