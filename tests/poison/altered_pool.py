"""`prfaas pool` whose node alters blocks that it keeps, and digests them afterwards.

    python -m tests.poison.altered_pool FILE pool --name prfaas-pool ...

Only while FILE is there at its start: a restart without it is the honest pool. FILE holds `byte`
(one byte of every block) or `block` (one block of attention in `PERIOD` is zeroed), and how its
transfers end once all blocks are sent: `abort` (the node stops them), `silent` (it says nothing) or
`miscount` (it commits one block too few); nothing after it is the honest commit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prfaas.cli.main import main
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.actions import SendCommit
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.pool.send import outbound_link
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.store.block_store import BlockStore
from prfaas.wire.fragments import block_digest
from prfaas.wire.messages.link import Commit

ALTERED_BYTE = 1
"""Of a bfloat16 in little-endian order that with the exponent's higher bits: an even number is also
another number in the engines' other formats, and in a timing engine's blocks."""


PERIOD = 8
"""Blocks of attention that a prompt of the experiment has with real engines, at least."""
ATTENTION_GROUP = 3
"""Of the demo's checkpoint; groups 0 to 2 hold linear state."""


def alter(what: str) -> None:
    """Have every store alter what it keeps."""
    keep = BlockStore.keep
    seen: set[BlockKey] = set()

    def damage(key: BlockKey, buffer: memoryview) -> None:
        if what == "byte":
            buffer[ALTERED_BYTE] ^= 0x40
        elif key.group == ATTENTION_GROUP and key not in seen:
            seen.add(key)
            if len(seen) % PERIOD == PERIOD // 2:
                buffer[:] = bytes(len(buffer))

    def altered(
        self: BlockStore, layout_id: bytes, key: BlockKey, buffer: memoryview, *rest: Any
    ) -> Any:
        if self.get(layout_id, key) is None:
            damage(key, buffer)
        digest = block_digest(layout_id, key, buffer)
        return keep(self, layout_id, key, buffer, digest, *rest[1:])

    BlockStore.keep = altered  # type: ignore[assignment, method-assign]


def evade(how: str) -> None:
    """Have transfers end otherwise than by a commit."""

    def announce(self: OutboundLink, commit: SendCommit) -> None:
        transfer_id, num_blocks = commit.transfer_id, commit.num_blocks
        if how == "abort":
            self.abort(transfer_id, TransferEnd.ABORTED)
        elif how == "miscount":
            self._dialer.send(Commit(transfer_id=transfer_id, num_blocks=num_blocks - 1))

    outbound_link._METHODS[SendCommit] = announce


if __name__ == "__main__":
    flag = Path(sys.argv.pop(1))
    if flag.exists():
        what, *ending = flag.read_text().split()
        alter(what)
        if ending:
            evade(ending[0])
    main()
