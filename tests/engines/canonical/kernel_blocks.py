"""Pages that an attention backend splits into kernel blocks, and the canonical blocks made of them.

    python -m tests.engines.canonical.kernel_blocks

Caches are allocated and viewed by vLLM's own code, as on a GPU, and filled through those views, so
that each backend would find its tokens there. The table compares the block that is made of each
with that of an engine whose backend reads pages as they are; docs/results/unequal-sites.md has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from prfaas.core.kv.canonical.copies import CopyRun, RankPages, row_runs
from prfaas.core.kv.canonical.parts import LayerParts, block_bytes
from prfaas.core.kv.canonical.pieces import pieces
from tests.core.kv.canonical.model_kinds import Bytes, read
from tests.engines.vllm_modules import needing_vllm

NUM_BLOCKS = 3
"""Blocks of a cache; the last is described and read."""
HEAD_SIZE = 16
SHAPES = ((1056, 32, 2), (1056, 16, 2), (1056, 352, 2), (256, 64, 8), (256, 128, 8), (256, 64, 1))
"""Tokens of a block, tokens of a kernel block, KV heads."""


class Page(NamedTuple):
    """A page of one rank, as vLLM keeps it.

    Attributes:
        caches: vLLM's description of the cache.
        views: Layers by name, in kernel blocks.
        data: Bytes of the last block.
    """

    caches: Any
    views: dict[str, Any]
    data: Bytes


def page(tokens: int, kernel: int, heads: range, *, layout: str = "LBHNC") -> Page:
    """Fill a cache through the view that an attention backend gets.

    Args:
        tokens: Of a page.
        kernel: Tokens of a kernel block.
        heads: Heads of this rank.
        layout: Physical order of the cache.
    """
    cache = needing_vllm("vllm.v1.kv_cache_interface")
    torch, worker = needing_vllm("torch"), needing_vllm("vllm.v1.worker.utils")
    spec = cache.FullAttentionSpec(
        block_size=tokens, num_kv_heads=len(heads), head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    size = spec.page_size_bytes * NUM_BLOCKS
    tensor = cache.KVCacheTensor(
        size=size, layers=["layer"], layer_stride=size, block_stride=spec.page_size_bytes
    )
    caches = cache.KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[cache.KVCacheGroupSpec(["layer"], spec)],
    )
    views = worker.allocate_kv_cache(
        caches, torch.device("cpu"), cache.KVCacheLayout[layout], [kernel]
    )
    view = views["layer"]
    first = (NUM_BLOCKS - 1) * tokens
    for token in range(tokens):
        at, slot = divmod(first + token, kernel)
        for number, head in enumerate(heads):
            view[at, number, slot] = _content(torch, token, head)
    raw = view.untyped_storage()
    data = torch.tensor([], dtype=torch.uint8).set_(raw)[-spec.page_size_bytes :].numpy().copy()
    return Page(caches, views, data)


def _content(torch: Any, token: int, head: int) -> Any:
    """Key and value of a token at a head: no two are alike."""
    values = torch.arange(2 * HEAD_SIZE, dtype=torch.int16) + 97 * token + 1009 * head
    return values.view(torch.bfloat16)


def runs_of(pages: list[Page], kv_heads: int, layout: str = "LBHNC") -> list[CopyRun]:
    """Copies between a row of an engine and its block, as the connector describes them.

    Args:
        pages: Of all its ranks, in their order in the row.
        kv_heads: KV heads of the model.
        layout: Physical order of the cache.
    """
    layer, every = parts_of(pages, kv_heads, layout)
    size = len(pages[0].data)
    ranks = [
        RankPages(rank, len(pages), {0: [rank * size + at for at, _ in every]})
        for rank in range(len(pages))
    ]
    return row_runs([layer], ranks)


def parts_of(
    pages: list[Page], kv_heads: int, layout: str = "LBHNC"
) -> tuple[LayerParts, Sequence[tuple[int, int]]]:
    """Parts of the layer, and the pages or kernel blocks of a rank that hold them."""
    rows = needing_vllm("prfaas.engines.canonical.vllm_rows")
    caches, views, data = pages[0]
    kernel = needing_vllm("prfaas.engines.canonical.vllm_ranks").kernel_pages(caches, views)[
        "layer"
    ]
    [spec] = rows.layer_specs(caches, 0)
    division = rows.Division(len(pages), kv_heads, layout)
    found: tuple[LayerParts, Sequence[tuple[int, int]]] = rows.layer_in_pages(
        spec, division, kernel, [(0, len(data))]
    )
    return found


def block_of(pages: list[Page], kv_heads: int, layout: str = "LBHNC") -> Bytes:
    """The canonical block of a row."""
    row = np.concatenate([each.data for each in pages])
    layer, _ = parts_of(pages, kv_heads, layout)
    found = pieces(runs_of(pages, kv_heads, layout), len(row), block_bytes([layer]))
    return read(row, found, block_bytes([layer]))


def differing(one: Bytes, other: Bytes) -> int:
    """Number of bytes that differ."""
    return int(np.count_nonzero(one != other))


def main() -> None:
    """Print the table."""
    print("| tokens of a block | kernel block | KV heads | bytes | differ as pages | as blocks |")
    print("|---|---|---|---|---|---|")
    for tokens, kernel, heads in SHAPES:
        whole, split = (page(tokens, size, range(heads)) for size in (tokens, kernel))
        blocks = [block_of([each], heads) for each in (whole, split)]
        print(
            f"| {tokens:,} | {kernel} | {heads} | {len(whole.data):,} "
            f"| {differing(whole.data, split.data):,} | {differing(*blocks):,} |"
        )


if __name__ == "__main__":
    main()
