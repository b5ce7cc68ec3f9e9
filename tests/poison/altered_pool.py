"""`prfaas pool` whose node alters one byte of every block it keeps, and digests it afterwards.

    python -m tests.poison.altered_pool FILE pool --name prfaas-pool ...

Only while FILE is there at its start: a restart without it is the honest pool.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prfaas.cli.main import main
from prfaas.core.blocks import BlockKey
from prfaas.pool.store import BlockStore
from prfaas.wire.fragments import block_digest

ALTERED_BYTE = 1
"""Of a bfloat16 in little-endian order that with the exponent's higher bits: an even number is also
another number in the engines' other formats, and in a timing engine's blocks."""


def alter() -> None:
    """Have every store alter what it keeps."""
    keep = BlockStore.keep

    def altered(
        self: BlockStore, layout_id: bytes, key: BlockKey, buffer: memoryview, *rest: Any
    ) -> Any:
        if self.get(layout_id, key) is None:
            buffer[ALTERED_BYTE] ^= 0x40
        digest = block_digest(layout_id, key, buffer)
        return keep(self, layout_id, key, buffer, digest, *rest[1:])

    BlockStore.keep = altered  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    if Path(sys.argv.pop(1)).exists():
        alter()
    main()
