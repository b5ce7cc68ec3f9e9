"""Rows of an engine in memory of this process, as a pool node has them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.canonical.copies import row_runs
from prfaas.core.kv.canonical.parts import LayerParts, block_bytes
from prfaas.pool.engine.engine_memory import EngineMemory
from prfaas.wire.messages.engine import EngineHello
from prfaas.wire.messages.layouts import layout_spec
from tests.core.kv.canonical.model_kinds import Site

NUM_ROWS = 3


@contextmanager
def memory(
    site: Site, layers: Sequence[LayerParts], **changes: Any
) -> Iterator[tuple[EngineMemory, int, int]]:
    """Rows of an engine at a site, the descriptor and the bytes of a row."""
    ranks, row_bytes = site.ranks(layers)
    descriptor = os.memfd_create("rows")
    os.truncate(descriptor, row_bytes * NUM_ROWS)
    group = CacheGroup(0, GroupKind.FULL_ATTENTION, 16, block_bytes(layers))
    said: dict[str, Any] = {
        "engine": "e",
        "layout": layout_spec(Layout(b"L" * 32, 16, "0", (group,))),
        "row_bytes": row_bytes,
        "num_rows": NUM_ROWS,
        "extents": {},
        "runs": {0: [tuple(run) for run in row_runs(layers, ranks)]},
    }
    kept = os.dup(descriptor)
    made = EngineMemory(descriptor, EngineHello(**(said | changes)))
    try:
        yield made, kept, row_bytes
    finally:
        made.close()
        os.close(kept)
