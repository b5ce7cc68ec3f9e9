"""The list of blocks that a transfer may move, in the short form that travels beside its ticket.

A ticket carries the digest of the list, 32 bytes whatever the prompt. The list itself, 32 bytes a
block, goes with the push, the offer and the pull. Both pools compare the two, and refuse a block
that is not on the list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from prfaas.core.kv.blocks import HASH_BYTES, BlockKey, Layout
from prfaas.core.kv.shipping import listed_range

Manifest = Mapping[int, bytes]
"""By cache group, the hashes of its blocks, one behind the other in the order of the prompt."""
MANIFEST_BYTES_MAX = 4 << 20
"""131,072 blocks: two million tokens in blocks of 16."""
DIGEST_BYTES = 32


def manifest_of(
    layout: Layout, hashes: Sequence[bytes], *, have_tokens: int, final_tokens: int
) -> dict[int, bytes]:
    """List the blocks that are worth sending, and the states that may be checkpoints.

    Args:
        layout: Of the prompt's blocks.
        hashes: Hash chain of the prompt, one entry per `layout.tokens_per_hash` tokens, up to
            `final_tokens`. Entries at which no block ends are not read.
        have_tokens: Usable prefix that the other side holds already.
        final_tokens: Length at which the other side will resume.

    Raises:
        ValueError: The chain lacks the hash of a block.
    """
    manifest: dict[int, bytes] = {}
    for group in layout.groups:
        first, last = listed_range(layout, group, have_tokens, final_tokens)
        stride = group.tokens_per_block // layout.tokens_per_hash
        names = b"".join(hashes[(first + 1) * stride - 1 : last * stride : stride])
        if len(names) != (last - first) * HASH_BYTES:
            raise ValueError(
                f"cache group {group.index} has {last - first} blocks between {have_tokens} and "
                f"{final_tokens} tokens, and the chain names {len(names) // HASH_BYTES}"
            )
        if names:
            manifest[group.index] = names
    return manifest


def manifest_of_keys(keys: Iterable[BlockKey]) -> dict[int, bytes]:
    """List blocks by their keys, in the order of the prompt."""
    names: dict[int, list[bytes]] = {}
    for key in keys:
        names.setdefault(key.group, []).append(key.block_hash)
    return {group: b"".join(hashes) for group, hashes in names.items()}


def manifest_digest(manifest: Manifest) -> bytes:
    """BLAKE2b over groups and hashes, DIGEST_BYTES long; empty groups do not count."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"prfaas manifest")
    for group in sorted(manifest):
        names = manifest[group]
        if names:
            hasher.update(group.to_bytes(8, "big") + len(names).to_bytes(8, "big"))
            hasher.update(names)
    return hasher.digest()


class NamedBlocks:
    """The keys on a list, for as long as its transfer is open: about 130 bytes a block."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._hashes = {
            group: frozenset(names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES))
            for group, names in manifest.items()
        }

    def __contains__(self, key: BlockKey) -> bool:
        return key.block_hash in self._hashes.get(key.group, frozenset())
