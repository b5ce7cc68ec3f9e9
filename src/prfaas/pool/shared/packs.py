"""Packs: objects that hold many sealed blocks. No I/O.

A pack holds blocks of one layout:

    magic "PFSP" | version u8 | key id 8 | salt 32      the head, in the clear
    index, sealed as part 0                             with the head: the front of the pack
    blocks, sealed as parts 1, 2, ...                   each as long as its block and a tag of 16

and is named `LAYOUT/TIME_WRITER_RANDOM_FRONT`: layout id, creation in ms, name of the pool node,
random bytes, and length of the front, the numbers in hexadecimal. The nonce of a part is its
number; the index is bound to the name, so that a renamed pack is unreadable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from secrets import token_hex
from typing import Annotated, NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.errors import PrfaasError
from prfaas.pool.shared.site_keys import ID_BYTES, SALT_BYTES, KeyRing, SiteKey
from prfaas.pool.store.origins import Origin, joined, origin_bytes, origin_in
from prfaas.wire.fragments import BLOCK_BYTES_MAX, block_digest

MAGIC, VERSION = b"PFSP", b"\x01"
HEAD_BYTES = len(MAGIC) + len(VERSION) + ID_BYTES + SALT_BYTES
TAG_BYTES, NONCE_BYTES = 16, 12
BLOCKS_MAX = 1 << 16
FRONT_BYTES_MAX = 16 << 20
_NAME = re.compile(
    r"([0-9a-f]{64})/([0-9a-f]{12})_([a-z][a-z0-9-]{0,62})_([0-9a-f]{16})_([0-9a-f]{1,7})"
)
Buffer = bytes | bytearray | memoryview


class AlteredError(PrfaasError):
    """Bytes of a pack are not those that were written."""


class UnknownKeyError(PrfaasError):
    """A pack was sealed with a key that this node does not have."""


class PackName(NamedTuple):
    """Name of a pack.

    Attributes:
        layout_id: Layout of its blocks.
        at_ms: Time of its creation, ms since 1970.
        writer: Pool node that wrote it.
        random: Makes it unique.
        front_bytes: Length of head and sealed index.
    """

    layout_id: bytes
    at_ms: int
    writer: str
    random: str
    front_bytes: int

    @property
    def path(self) -> str:
        """Path of the object, below the prefix of the site."""
        name = f"{self.at_ms:012x}_{self.writer}_{self.random}_{self.front_bytes:x}"
        return f"{self.layout_id.hex()}/{name}"


def name_in(path: str) -> PackName | None:
    """Parse the path of an object; None if it is no pack."""
    found = _NAME.fullmatch(path)
    if found is None:
        return None
    layout, at_ms, writer, random, front = found.groups()
    front_bytes = int(front, 16)
    if not HEAD_BYTES + TAG_BYTES <= front_bytes <= FRONT_BYTES_MAX:
        return None
    return PackName(bytes.fromhex(layout), int(at_ms, 16), writer, random, front_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """A pack that can be read.

    Attributes:
        name: Its name.
        head: Its first HEAD_BYTES.
        cipher: Opens its parts.
    """

    name: PackName
    head: bytes
    cipher: AESGCM


class PackedBlock(NamedTuple):
    """A block in a pack.

    Attributes:
        pack: Where it is.
        part: Number of its part.
        offset: Start of the part in the object, bytes.
        num_bytes: Size of the block; the part has TAG_BYTES more.
        digest: Over name and bytes.
        origin: Where it came from; another node that wrote the pack is among the sources.
    """

    pack: Pack
    part: int
    offset: int
    num_bytes: int
    digest: bytes
    origin: Origin


_Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=BLOCK_BYTES_MAX)]


class _Entry(msgspec.Struct, array_like=True):
    group: _Number
    block_hash: _Hash
    num_bytes: _Size
    digest: _Hash
    origin: _Number


class _Index(msgspec.Struct, array_like=True):
    origins: list[bytes]
    blocks: Annotated[list[_Entry], msgspec.Meta(max_length=BLOCKS_MAX)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Index)


class PackBuilder:
    """A pack being filled. Not thread-safe.

    Args:
        key: Seals it.
        layout_id: Layout of its blocks.
        salt: SALT_BYTES random bytes, never used before.
    """

    def __init__(self, key: SiteKey, layout_id: bytes, salt: bytes) -> None:
        self.layout_id = layout_id
        self.names: list[BlockName] = []
        self.num_bytes = 0
        """Bytes of its blocks."""
        self._head = MAGIC + VERSION + key.id + salt
        self._cipher = key.cipher(salt)
        self._parts: list[bytes] = []
        self._entries: list[_Entry] = []
        self._origins: dict[bytes, int] = {}

    def add(self, key: BlockKey, data: Buffer, digest: bytes, origin: Origin) -> None:
        """Seal a block."""
        part = self._cipher.encrypt(_nonce(len(self._parts) + 1), data, self._head)
        number = self._origins.setdefault(origin_bytes(origin), len(self._origins))
        self._entries.append(_Entry(key.group, key.block_hash, len(data), digest, number))
        self._parts.append(part)
        self.names.append((self.layout_id, key))
        self.num_bytes += len(data)

    def finish(self, writer: str, at_ms: int) -> tuple[PackName, bytes]:
        """Name and bytes of the object. Called once, after the last block."""
        index = _encoder.encode(_Index(list(self._origins), self._entries))
        front_bytes = HEAD_BYTES + len(index) + TAG_BYTES
        name = PackName(self.layout_id, at_ms, writer, token_hex(8), front_bytes)
        sealed = self._cipher.encrypt(_nonce(0), index, self._head + name.path.encode())
        data = b"".join([self._head, sealed, *self._parts])
        self._parts.clear()
        return name, data


def read_front(
    name: PackName, front: Buffer, keys: KeyRing, reader: str
) -> dict[BlockName, PackedBlock]:
    """Return the blocks of a pack.

    Args:
        name: Of the pack.
        front: Its first `name.front_bytes` bytes.
        keys: Keys of the site.
        reader: Name of this pool node. Blocks that another one wrote came from that one.

    Raises:
        UnknownKeyError: It was sealed with a key that is not in `keys`.
        AlteredError: It is not what a pool node of the site wrote.
    """
    head = bytes(front[:HEAD_BYTES])
    if len(front) != name.front_bytes or head[:5] != MAGIC + VERSION:
        raise AlteredError(f"{name.path} does not begin like a pack of version {VERSION[0]}")
    key = keys.keys.get(head[5 : 5 + ID_BYTES])
    if key is None:
        raise UnknownKeyError(f"{name.path} is sealed with key {head[5 : 5 + ID_BYTES].hex()}")
    pack = Pack(name, head, key.cipher(head[5 + ID_BYTES :]))
    try:
        plain = pack.cipher.decrypt(_nonce(0), front[HEAD_BYTES:], head + name.path.encode())
        index = _decoder.decode(plain)
        origins = [origin_in(data) for data in index.origins]
        if name.writer != reader:
            origins = [_received(origin, name.writer) for origin in origins]
        sizes = (entry.num_bytes + TAG_BYTES for entry in index.blocks)
        offsets = accumulate(sizes, initial=name.front_bytes)
        return {
            (name.layout_id, BlockKey(entry.group, entry.block_hash)): PackedBlock(
                pack, part, offset, entry.num_bytes, entry.digest, origins[entry.origin]
            )
            for part, (entry, offset) in enumerate(zip(index.blocks, offsets, strict=False), 1)
        }
    except (InvalidTag, msgspec.DecodeError, IndexError) as error:
        raise AlteredError(f"the index of {name.path} is broken: {type(error).__name__}") from None


def open_block(name: BlockName, block: PackedBlock, part: Buffer, into: memoryview) -> None:
    """Write the bytes of a block.

    Args:
        name: Its name.
        block: Its place.
        part: The sealed part.
        into: As long as the block. Its content is undefined after an error.

    Raises:
        AlteredError: Part, place and name do not belong together.
    """
    if len(part) != block.num_bytes + TAG_BYTES or len(into) != block.num_bytes:
        raise AlteredError(f"a part of {len(part)} bytes for a block of {block.num_bytes}")
    pack = block.pack
    try:
        pack.cipher.decrypt_into(_nonce(block.part), part, pack.head, into)
    except InvalidTag:
        raise AlteredError(f"part {block.part} of {pack.name.path} is altered") from None
    layout_id, key = name
    if block_digest(layout_id, key, into) != block.digest:
        raise AlteredError(f"part {block.part} of {pack.name.path} has another digest")


def _received(origin: Origin, writer: str) -> Origin:
    return Origin(joined({*origin.sources, writer}), writer, origin.transfer_id)


def _nonce(part: int) -> bytes:
    return part.to_bytes(NONCE_BYTES, "big")
