"""Two ends of sealed data connections, and fragments for them."""

from __future__ import annotations

import itertools

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock, TenantShare
from prfaas.wire.fragments import FRAGMENT_BYTES_MAX, FragmentPrefix, block_digest, encode_prefix
from prfaas.wire.sealed.keys import LIMITS, KeyLimits, LinkSecret
from prfaas.wire.sealed.records import OPENING_BYTES, Opener, Sealer, decode_opening
from prfaas.wire.sealed.streams import ClearStream, SealedParts, SealedStream

LAYOUT = b"L" * 32
BOTH = (LinkEncryption.SEALED, LinkEncryption.NETWORK)


def session(
    encryption: LinkEncryption = LinkEncryption.SEALED,
    secret: bytes = b"s" * 32,
    source: str = "prfaas-pool",
    destination: str = "pd-pool",
    link: str = "word",
) -> LinkSecret:
    return LinkSecret(encryption, source, destination, link, secret)


def fragments(*sizes: int) -> list[Fragment]:
    """A fragment of each size, each a block of its own."""
    made = []
    for index, size in enumerate(sizes):
        data = bytes(itertools.islice(itertools.cycle(range(index + 1, 256)), size))
        key = BlockKey(0, index.to_bytes(32))
        digest = block_digest(LAYOUT, key, data)
        block = OutgoingBlock(
            b"t" * 16, (LAYOUT, key), digest, memoryview(data), TenantShare("", 1)
        )
        made.append(Fragment(block, 0, size))
    return made


class Source:
    """Seals fragments, and keeps the records of each apart."""

    def __init__(self, secret: LinkSecret, number: int = 0, limits: KeyLimits = LIMITS) -> None:
        sealer = Sealer(secret, number, limits)
        self.opening = sealer.opening
        self._parts = SealedParts(sealer)

    def send(self, fragment: Fragment) -> bytes:
        parts = self._parts.parts(memoryview(encode_prefix(fragment)), fragment.data)
        return b"".join(parts)


class Destination:
    """Opens a stream, and keeps what it brought."""

    def __init__(
        self, secret: LinkSecret, opening: bytes, limits: KeyLimits = LIMITS, step: int = 1 << 30
    ) -> None:
        self.came: list[tuple[BlockKey, bytes]] = []
        self._step = step
        self._placed: FragmentPrefix | None = None
        self._into = bytearray(FRAGMENT_BYTES_MAX)
        opener = Opener(secret, decode_opening(opening), limits)
        assert len(opening) == OPENING_BYTES
        kind = SealedStream if opener.is_encrypted else ClearStream
        self.stream = kind(opener, self._place)

    def _place(self, prefix: FragmentPrefix) -> memoryview:
        assert self._placed is None, "a fragment gets its place before the last one is complete"
        self._placed = prefix
        return memoryview(self._into)[: prefix.payload_bytes]

    def feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            view = self.stream.view
            count = min(len(rest), len(view), self._step)
            assert count > 0
            view[:count] = rest[:count]
            rest = rest[count:]
            done = self.stream.filled(count)
            if done is not None:
                assert done is self._placed
                self._placed = None
                self.came.append((done.key, bytes(self._into[: done.num_bytes])))


def content(sent: list[Fragment]) -> list[tuple[BlockKey, bytes]]:
    return [(fragment.block.name[1], bytes(fragment.data)) for fragment in sent]
