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
    """An order to the client.

    Attributes:
        number: Of the order; 0 is none.
        names: Keys of the store.
        offset: Of the buffer in the shared memory.
        num_bytes: Size of that buffer.
    """

    number: int
    operation: StoreOperation
    names: list[str]
    offset: int = 0
    num_bytes: int = 0


class StoreAnswer(msgspec.Struct, array_like=True):
    """The answer to an order; number 0 once, when the client is connected, or cannot be.

    Attributes:
        codes: Of the library, one for each name: negative for an error; the length for a read.
    """

    number: int
    codes: list[int]


class StoreSetup(msgspec.Struct):
    """Settings of the client.

    Attributes:
        address: Of this host, as others reach it.
        master: HOST:PORT of the master.
        replicas: Copies of each block.
        memory_bytes: Size of the shared memory.
    """

    address: str
    metadata: str
    protocol: str
    devices: str
    master: str
    replicas: int
    memory_bytes: int


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
