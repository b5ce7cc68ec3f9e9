"""Messages between a pool node and the process of its Mooncake client.

A message is its length, 4 bytes, and MessagePack.

Answers have codes of the Mooncake Store library.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from prfaas.errors import TransferError

LENGTH_BYTES = 4
NO_LIBRARY = -10_000
"""Code of a client that cannot load the library."""
NAMES_MAX = 4096
"""Keys of one order."""


class StoreOperation(StrEnum):
    """Operation of the store."""

    PUT = "put"
    GET = "get"
    EXIST = "exist"
    REMOVE = "remove"
    """All keys that match a regular expression, the only name of the order."""


class Order(msgspec.Struct, array_like=True):
    """An order to the client."""

    number: int
    """Of the order; 0 is none."""
    operation: StoreOperation
    names: list[str]
    """Keys of the store."""
    offset: int = 0
    """Of the buffer in the shared memory."""
    num_bytes: int = 0
    """Size of that buffer."""


class StoreAnswer(msgspec.Struct, array_like=True):
    """The answer to an order; number 0 once, when the client is connected, or cannot be."""

    number: int
    codes: list[int]
    """Of the library, one for each name: negative for an error; the length for a read."""


class StoreSetup(msgspec.Struct):
    """Settings of the client."""

    address: str
    """Of this host, as others reach it."""
    metadata: str
    protocol: str
    devices: str
    master: str
    """HOST:PORT of the master."""
    replicas: int
    """Copies of each block."""
    memory_bytes: int
    """Size of the shared memory."""


def framed(message: Order | StoreAnswer) -> bytes:
    """A message with its length."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


NO_SPACE, NOT_FOUND, EXISTS = -200, -704, -705
NOT_READY, LEASE_EXPIRED = -703, -707
GONE = frozenset({NOT_FOUND, NOT_READY, LEASE_EXPIRED})
"""The store answers, and does not have the object (any more, or completely)."""
_WORDS = {
    -1: "internal error",
    NO_SPACE: "no provider has room",
    -800: "a provider does not answer",
    -900: "the master does not answer",
}


def check(code: int) -> int:
    """Return a code that is no failure of the store; TransferError if it is one."""
    if code >= 0 or code in GONE or code in (NO_SPACE, EXISTS):
        return code
    raise TransferError(f"{_WORDS.get(code, 'the library failed')} (code {code})")
