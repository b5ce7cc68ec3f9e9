"""One block as an object: head, block, and what is known of it. No I/O.

    head (`sealing`), magic "PFMB"                  in the clear
    the block, sealed as part 0                     as long as the block and a tag of 16
    digest, origin and writer, sealed as part 1

Both parts are bound to the name of the block, so what is stored under another name is unreadable.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.keys.sealing import (
    HEAD_BYTES,
    TAG_BYTES,
    AlteredError,
    new_seal,
    seal_of,
)
from prfaas.pool.keys.site_keys import KeyRing, SiteKey
from prfaas.pool.store.origins import ORIGIN_BYTES_MAX, origin_bytes, origin_in, read_by
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.fragments import block_digest

KIND = b"PFMB\x01"
"""Magic and version."""
FACTS_BYTES_MAX = ORIGIN_BYTES_MAX + 256


class _Facts(msgspec.Struct, array_like=True):
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    origin: bytes
    writer: str


_decoder = msgspec.msgpack.Decoder(_Facts)


def key_of(prefix: str, name: BlockName) -> str:
    """Key of a block in the store: PREFIX/LAYOUT/GROUP/HASH."""
    return f"{prefix}/{_path(name)}"


def sealed_bytes_max(num_bytes: int) -> int:
    """Size of the buffer for a sealed block of so many bytes."""
    return HEAD_BYTES + num_bytes + TAG_BYTES + FACTS_BYTES_MAX + TAG_BYTES


def seal_block(
    key: SiteKey, name: BlockName, block: StoredBlock, writer: str, into: memoryview
) -> int:
    """Seal a block into a buffer of `sealed_bytes_max`; returns bytes that were written."""
    seal, bound = new_seal(KIND, key), _path(name).encode()
    end = HEAD_BYTES + len(block.data) + TAG_BYTES
    into[:HEAD_BYTES] = seal.head
    seal.close_into(0, block.data, into[HEAD_BYTES:end], bound)
    facts = _Facts(block.digest, origin_bytes(block.origin), writer)
    sealed = seal.close(1, msgspec.msgpack.encode(facts), bound)
    into[end : end + len(sealed)] = sealed
    return end + len(sealed)


def open_block(
    name: BlockName, sealed: memoryview, keys: KeyRing, reader: str, into: memoryview
) -> tuple[bytes, Origin]:
    """Write the bytes of a block, checked.

    Args:
        reader: Name of this pool node.
        into: As long as the block. Its content is undefined after an error.

    Returns:
        Its digest and origin.

    Raises:
        UnknownKeyError: It was sealed with a key that is not in `keys`.
        AlteredError: It is not what a pool node of the site stored under this name.
    """
    seal, bound = seal_of(KIND, sealed, keys), _path(name).encode()
    end = HEAD_BYTES + len(into) + TAG_BYTES
    try:
        facts = _decoder.decode(seal.open(1, sealed[end:], bound))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AlteredError(f"part 1 cannot be read: {error}") from None
    seal.open_into(0, sealed[HEAD_BYTES:end], into, bound)
    layout_id, key = name
    if block_digest(layout_id, key, into) != facts.digest:
        raise AlteredError("the block has another digest")
    return facts.digest, read_by(reader, facts.writer, origin_in(facts.origin))


def _path(name: BlockName) -> str:
    layout_id, key = name
    return f"{layout_id.hex()}/{key.group}/{key.block_hash.hex()}"
