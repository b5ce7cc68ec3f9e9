"""Packs: objects that hold many sealed blocks. No I/O.

A pack holds blocks of one layout:

    head (`sealing`), magic "PFSP"                      in the clear
    index, sealed as part 0                             with the head: the front of the pack
    blocks, sealed as parts 1, 2, ...                   each as long as its block and a tag of 16

The index is sealed with a key of the site, each block with one of its tenant (`tier_keys`), which
the index names.

A pack is named `LAYOUT/TIME_WRITER_RANDOM_FRONT`: layout id, creation in ms, name of the pool node,
random bytes, and length of the front, the numbers in hexadecimal. The index is bound to the name: a
renamed pack is unreadable.

`PackIndex` has the blocks that a pool node knows of, by name and by pack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from secrets import token_hex
from typing import Annotated, NamedTuple

import msgspec

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.invariants import require
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.pool.keys.sealing import (
    HEAD_BYTES,
    TAG_BYTES,
    AlteredError,
    Buffer,
    Seal,
    UnknownKeyError,
    new_seal,
    seal_of,
)
from prfaas.pool.keys.site_keys import SALT_BYTES, KeyRing, SiteKey
from prfaas.pool.keys.tenant_keys import TenantKey
from prfaas.pool.store.origins import origin_bytes, origin_in, read_by
from prfaas.wire.fragments import BLOCK_BYTES_MAX, block_digest

KIND = b"PFSP\x02"
"""Magic and version."""
PURPOSE = b"pack 2"
BLOCKS_MAX = 1 << 16
FRONT_BYTES_MAX = 16 << 20
_NAME = re.compile(
    r"([0-9a-f]{64})/([0-9a-f]{12})_([a-z][a-z0-9-]{0,62})_([0-9a-f]{16})_([0-9a-f]{1,7})"
)


class PackName(NamedTuple):
    """Name of a pack."""

    layout_id: bytes
    """Layout of its blocks."""
    at_ms: int
    """Time of its creation, ms since 1970."""
    writer: str
    """Pool node that wrote it."""
    random: str
    front_bytes: int
    """Length of head and sealed index."""

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
    """A pack that can be read."""

    name: PackName
    seal: Seal


class PackedBlock(NamedTuple):
    """A block in a pack."""

    pack: Pack
    part: int
    offset: int
    """Start of the part in the object, bytes."""
    num_bytes: int
    """Size of the block; the part has TAG_BYTES more."""
    digest: bytes
    """Over name and bytes."""
    origin: Origin
    """Its origin; another node that wrote the pack is among the sources."""
    ref: str
    """Name of the key of its tenant."""


_Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=BLOCK_BYTES_MAX)]


class _Entry(msgspec.Struct, array_like=True):
    group: _Number
    block_hash: _Hash
    num_bytes: _Size
    digest: _Hash
    origin: _Number
    ref: _Number


class _Index(msgspec.Struct, array_like=True):
    origins: list[bytes]
    blocks: Annotated[list[_Entry], msgspec.Meta(max_length=BLOCKS_MAX)]
    refs: list[str]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Index)


class PackBuilder:
    """A pack being filled. Not thread-safe.

    Args:
        layout_id: Layout of its blocks.
    """

    def __init__(self, key: SiteKey, layout_id: bytes) -> None:
        self.layout_id = layout_id
        self.names: list[BlockName] = []
        self.num_bytes = 0
        """Bytes of its blocks."""
        self._seal = new_seal(KIND, key)
        self._parts: list[bytes] = []
        self._entries: list[_Entry] = []
        self._origins: dict[bytes, int] = {}
        self._refs: dict[str, int] = {}
        self._seals: dict[str, Seal] = {}

    def add(
        self, key: BlockKey, data: Buffer, digest: bytes, origin: Origin, of: TenantKey
    ) -> None:
        """Seal a block with a key of its tenant."""
        ref = of.ref
        if ref not in self._seals:
            self._seals[ref] = _seal_with(self._seal.head, of)
        part = self._seals[ref].close(len(self._parts) + 1, data)
        number = self._origins.setdefault(origin_bytes(origin), len(self._origins))
        self._entries.append(
            _Entry(
                key.group,
                key.block_hash,
                len(data),
                digest,
                number,
                self._refs.setdefault(ref, len(self._refs)),
            )
        )
        self._parts.append(part)
        self.names.append((self.layout_id, key))
        self.num_bytes += len(data)

    def finish(self, writer: str, at_ms: int) -> tuple[PackName, bytes]:
        """Name and bytes of the object. Called once, after the last block."""
        index = _encoder.encode(_Index(list(self._origins), self._entries, list(self._refs)))
        front_bytes = HEAD_BYTES + len(index) + TAG_BYTES
        name = PackName(self.layout_id, at_ms, writer, token_hex(8), front_bytes)
        sealed = self._seal.close(0, index, name.path.encode())
        data = b"".join([self._seal.head, sealed, *self._parts])
        self._parts.clear()
        self._seals.clear()
        return name, data


def read_front(
    name: PackName, front: Buffer, keys: KeyRing, reader: str
) -> dict[BlockName, PackedBlock]:
    """Return the blocks of a pack.

    Args:
        front: Its first `name.front_bytes` bytes.
        reader: Name of this pool node. Blocks that another one wrote came from that one.

    Raises:
        UnknownKeyError: It was sealed with a key that is not in `keys`.
        AlteredError: It is not what a pool node of the site wrote.
    """
    if len(front) != name.front_bytes:
        raise AlteredError(f"{name.path} ends after {len(front)} bytes of its front")
    try:
        pack = Pack(name, seal_of(KIND, front, keys))
        plain = pack.seal.open(0, front[HEAD_BYTES:], name.path.encode())
        index = _decoder.decode(plain)
        origins = [read_by(reader, name.writer, origin_in(data)) for data in index.origins]
        sizes = (entry.num_bytes + TAG_BYTES for entry in index.blocks)
        offsets = accumulate(sizes, initial=name.front_bytes)
        return {
            (name.layout_id, BlockKey(entry.group, entry.block_hash)): PackedBlock(
                pack,
                part,
                offset,
                entry.num_bytes,
                entry.digest,
                origins[entry.origin],
                index.refs[entry.ref],
            )
            for part, (entry, offset) in enumerate(zip(index.blocks, offsets, strict=False), 1)
        }
    except UnknownKeyError as error:
        raise UnknownKeyError(f"{name.path}: {error}") from None
    except (AlteredError, msgspec.DecodeError, IndexError) as error:
        raise AlteredError(f"the index of {name.path} is broken: {error}") from None


def open_block(
    name: BlockName, block: PackedBlock, part: Buffer, into: memoryview, key: TenantKey
) -> None:
    """Write the bytes of a block; AlteredError if part, place and name do not belong together.

    Args:
        into: As long as the block. Its content is undefined after an error.
    """
    if len(part) != block.num_bytes + TAG_BYTES or len(into) != block.num_bytes:
        raise AlteredError(f"a part of {len(part)} bytes for a block of {block.num_bytes}")
    pack = block.pack
    seal = _seal_with(pack.seal.head, key)
    try:
        seal.open_into(block.part, part, into)
    except AlteredError as error:
        raise AlteredError(f"{pack.name.path}: {error}") from None
    if block_digest(*name, into) != block.digest:
        raise AlteredError(f"part {block.part} of {pack.name.path} has another digest")


def _seal_with(head: bytes, key: TenantKey) -> Seal:
    """Seals parts of a pack with a key of a tenant: the salt of the pack is the end of its head."""
    return Seal(head, key.cipher(head[-SALT_BYTES:], PURPOSE))


KNOWN_MAX = 1_000_000
"""Blocks in the index: about half a KiB each. Those of older packs are not found."""
ASIDE_MAX = 4096
"""Blocks that are set aside. One beyond them is not read again before a restart."""


class PackIndex:
    """Index of packs. Several packs may hold the same block; the first one known counts."""

    def __init__(self, blocks_max: int = KNOWN_MAX) -> None:
        self._blocks_max = blocks_max
        self._places: dict[BlockName, PackedBlock] = {}
        self._packs: dict[PackName, list[BlockName]] = {}
        self._sources: dict[PackName, frozenset[str]] = {}
        self._tenant: dict[PackName, str] = {}
        """The tenant of each pack that has blocks of only one."""
        self._aside: dict[BlockName, tuple[PackedBlock, int]] = {}
        """Blocks that could not be read, and until when, ns. Their packs list them all the same."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[BlockName]:
        return iter(self._places)

    def __getitem__(self, name: BlockName) -> PackedBlock:
        return self._places[name]

    def get(self, name: BlockName) -> PackedBlock | None:
        """The place of a block; None if it is unknown."""
        return self._places.get(name)

    @property
    def packs(self) -> frozenset[PackName]:
        """All packs in the index."""
        return frozenset(self._packs)

    @property
    def newest(self) -> PackName | None:
        """The pack that was added last."""
        return next(reversed(self._packs), None)

    def sources_of(self, pack: PackName) -> frozenset[str] | None:
        """Pools that the blocks of a pack came from; None if the pack is not in the index."""
        return self._sources.get(pack)

    def only_of(self, tenant: str) -> list[PackName]:
        """Packs that have blocks of one tenant only."""
        return [pack for pack, tag in self._tenant.items() if tag == tenant]

    def add(
        self,
        pack: PackName,
        blocks: Mapping[BlockName, PackedBlock],
        kept: Mapping[BlockName, PackedBlock] | None = None,
    ) -> list[BlockName]:
        """Add a pack; returns blocks that were not known.

        Args:
            kept: Those that no purge refuses; None for all.
        """
        if pack in self._packs:
            return []  # It was listed while this node wrote it.
        room = max(0, self._blocks_max - len(self._places))
        kept = blocks if kept is None else kept
        new = [name for name in kept if name not in self._places][:room]
        for name in new:
            self._places[name] = blocks[name]
        self._packs[pack] = new
        self._sources[pack] = all_sources(blocks.values())
        tags = {block.origin.tenant for block in blocks.values()}
        if len(tags) == 1:
            self._tenant[pack] = tags.pop()
        return new

    def remove(self, packs: Iterable[PackName]) -> list[BlockName]:
        """Remove packs; returns blocks that are not known any more."""
        gone: list[BlockName] = []
        for pack in packs:
            self._sources.pop(pack, None)
            self._tenant.pop(pack, None)
            for name in self._packs.pop(pack, ()):
                place = self._places.get(name)
                if place is not None and place.pack.name == pack:
                    del self._places[name]
                    gone.append(name)
        return gone

    def emptied(self, packs: Iterable[PackName]) -> list[PackName]:
        """Those of some packs of which no block is known any more."""
        return [pack for pack in packs if not self._has_any(pack)]

    def _has_any(self, pack: PackName) -> bool:
        places = (self._places.get(name) for name in self._packs.get(pack, ()))
        return any(place is not None and place.pack.name == pack for place in places)

    def drop(self, names: Iterable[BlockName]) -> None:
        """Remove blocks for good; the packs of some of them may stay."""
        for name in names:
            self._places.pop(name, None)
        self._aside.clear()

    def validate(self) -> None:
        """Check that places and packs name the same blocks; AssertionError if they do not."""
        known = {pack: set(names) for pack, names in self._packs.items()}
        for name, place in self._places.items():
            require(name in known.get(place.pack.name, ()), "a block without its pack")
        require(known.keys() == self._sources.keys() >= self._tenant.keys(), "packs")

    def set_aside(self, name: BlockName, block: PackedBlock, until_ns: int) -> bool:
        """Remove one block, which could not be read, until `put_back` at some time; returns false
        if its place has changed, and it is kept."""
        if self._places.get(name) is not block:
            return False
        del self._places[name]
        self._aside[name] = block, until_ns
        if len(self._aside) > ASIDE_MAX:
            del self._aside[next(iter(self._aside))]
        return True

    def put_back(self, now_ns: int) -> list[BlockName]:
        """Add blocks again that were set aside until now; returns those that were not known."""
        due = [(name, block) for name, (block, until) in self._aside.items() if until <= now_ns]
        found = []
        for name, block in due:
            del self._aside[name]
            if block.pack.name in self._packs and name not in self._places:
                self._places[name] = block
                found.append(name)
        return found


def all_sources(blocks: Iterable[PackedBlock]) -> frozenset[str]:
    """Pools that some blocks came from, together."""
    kinds = {block.origin.sources for block in blocks}
    return frozenset().union(*kinds)
