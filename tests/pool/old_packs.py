"""Packs as version 1 wrote them: blocks sealed with a key of the site."""

from __future__ import annotations

import time
from collections.abc import Mapping
from secrets import token_hex

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.keys.sealing import HEAD_BYTES, TAG_BYTES, new_seal
from prfaas.pool.keys.site_keys import KeyRing
from prfaas.pool.shared.packs import KIND_1, PackName, _encoder, _Entry, _Index
from prfaas.pool.store.origins import Origin, origin_bytes
from prfaas.wire.fragments import block_digest

from .sites import content


def version_1(
    keys: KeyRing, layout_id: bytes, writer: str, blocks: Mapping[BlockKey, str]
) -> tuple[PackName, bytes]:
    """Name and bytes of a pack; `blocks` has the tenant of each."""
    seal = new_seal(KIND_1, keys.sealing)
    origins, entries, parts = [], [], []
    for number, (key, tenant) in enumerate(blocks.items()):
        data = content(key)
        parts.append(seal.close(number + 1, data))
        origins.append(origin_bytes(Origin(frozenset(), "engine", b"", tenant)))
        digest = block_digest(layout_id, key, data)
        entries.append(_Entry(key.group, key.block_hash, len(data), digest, number))
    index = _encoder.encode(_Index(origins, entries))
    front_bytes = HEAD_BYTES + len(index) + TAG_BYTES
    name = PackName(layout_id, int(time.time() * 1000), writer, token_hex(8), front_bytes)
    return name, b"".join([seal.head, seal.close(0, index, name.path.encode()), *parts])
