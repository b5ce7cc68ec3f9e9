"""Messages of every conversation: base class, pings, and the closing message."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.wire.messages.fields import Count, Name, Nanoseconds, Text


class Message(msgspec.Struct, tag_field="t", kw_only=True):
    """Base of all messages."""


class Ping(Message, tag="ping"):
    """Sign of life after silence. With a time, the peer answers with `Pong`.

    `connections` are the numbers of the sender's data connections; older ones are gone.
    """

    at_ns: Nanoseconds = 0
    connections: Annotated[list[Count], msgspec.Meta(max_length=256)] = []


class Pong(Message, tag="pong"):
    """Answer to a `Ping` that carried a time, with that time.

    `received` has the bytes received so far over each data connection, by its number. `busy` is
    the share of time in which the thread that receives them ran or waited for a core, lately.
    """

    at_ns: Nanoseconds
    received: dict[int, int] = {}
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class Unsupported(Message, tag="unsupported"):
    """Answer to a message that the receiver does not know: it is of an older version than the
    sender. The connection stays."""

    kind: Name
    """Tag of the message."""
    job: Count = 0
    """Its field of that name, if it has one."""


class Goodbye(Message, tag="goodbye"):
    """The last message before a connection is closed because of the peer."""

    reason: Text
