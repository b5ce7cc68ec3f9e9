"""Writers of one block's fragments, and the block."""

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.receive.block_assembly import Assembly
from prfaas.wire.fragments import FragmentPrefix, ReceivedBlock, block_digest

LAYOUT_ID, KEY = b"L" * 32, BlockKey(0, b"h" * 32)
DATA = bytes(range(100))
PART = 30
BLOCKS_MAX = 20
DIGEST = block_digest(LAYOUT_ID, KEY, DATA)


def wanted() -> bool:
    """The transfer is open."""
    return True


class Hand:
    """Writes fragments as they come."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.is_disowned = False
        self.is_elsewhere = False
        """True if another thread writes at this moment."""

    def disown(self, prefix: FragmentPrefix) -> bool:
        self.is_disowned = not self.is_elsewhere
        return self.is_disowned

    def claim(self, offset: int) -> memoryview | None:
        return self.assembly.claim(prefix(offset), self, wanted)

    def write(self, offset: int) -> ReceivedBlock | None:
        place = self.claim(offset)
        if place is None:
            return None
        place[:] = DATA[offset : offset + len(place)]
        return self.assembly.written(prefix(offset), self)


def prefix(offset: int, num_bytes: int | None = None) -> FragmentPrefix:
    size = min(PART, len(DATA) - offset) if num_bytes is None else num_bytes
    return FragmentPrefix(b"t" * 16, LAYOUT_ID, KEY, DIGEST, len(DATA), offset, size)
