"""(a) Two engines on one device: a remote answer is the answer from the engine's own cache.

64 tokens, their logprobs, and the bytes, which are those of the planner. Then engines whose
attention reads pages in blocks of other sizes: canonical blocks are converted, or refused.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tests.gpu.kit import models
from tests.gpu.kit.deployment import has_kernels, running, settings
from tests.gpu.kit.results import Results
from tests.lab.faults import Fault
from tests.live.identity_by_kind import Row, try_prompts

TOKENS_MAX = 8_192
KERNEL_BLOCK = 16


async def run(results: Results) -> None:
    """Try the descriptions, then both kinds of model, then unequal kernel blocks."""
    kernel_blocks(results)
    for kind in (models.HYBRID_KIND, models.DENSE):
        row = await handed_over(results, kind)
        results.add("answers", **_shown(row))
        for words in row.faults:
            results.check(False, f"{kind}: {words}")
    if results.device == "cpu" or has_kernels():
        results.skip("engines with kernel blocks of other sizes: they need the kit on a GPU")
        return
    try:
        row = await handed_over(results, models.HYBRID_KIND, KERNEL_BLOCK)
    except AssertionError as unlike:  # The engines announce unlike layouts.
        results.add("kernel blocks refused", tokens=KERNEL_BLOCK, words=str(unlike)[:500])
        return
    results.add("kernel blocks", tokens=KERNEL_BLOCK, **_shown(row))
    is_refused = row.num_remote == 0
    results.check(
        is_refused or row.num_as_cached == row.num_remote,
        f"kernel blocks of {KERNEL_BLOCK} tokens were neither refused nor converted: "
        f"{row.num_as_cached} of {row.num_remote} remote answers are those from the cache",
    )


def _shown(row: Row) -> dict[str, object]:
    return asdict(row) | {"line": row.line()}


async def handed_over(results: Results, kind: str, kernel_block: int = 0) -> Row:
    """Hand prompts over between two engines, and compare; a link that is cut copies nothing."""
    row = Row(kind)
    overlay = settings(results.device, kind, TOKENS_MAX, kernel_block=kernel_block)
    with tempfile.TemporaryDirectory(prefix="kit-") as local:
        async with running(Path(local), overlay, partial(models.make, kind)) as (live, link):
            if results.damage == "skipped copy":
                link.is_plugged = False
                link.strike(Fault.CUT)
            await try_prompts(live, row)
    return row


def kernel_blocks(results: Results) -> None:
    """Describe pages that a backend splits: the block that is made of them is the same, or none.

    vLLM's own code lays the caches out; no engine runs.
    """
    try:
        from tests.engines.canonical import kernel_blocks as described
        from tests.engines.canonical.kernel_blocks import SHAPES
    except ImportError as missing:
        results.skip(f"descriptions of kernel blocks: {missing}")
        return
    for tokens, kernel, heads in SHAPES:
        whole = described.page(tokens, tokens, range(heads))
        split = described.page(tokens, kernel, range(heads))
        as_pages = described.differing(whole.data, split.data)
        if results.damage == "wrong description":
            split = split._replace(views=whole.views)
        elif results.damage == "flipped byte":
            split.data[0] ^= 1
        one, other = (described.block_of([each], heads) for each in (whole, split))
        as_blocks = described.differing(one, other)
        results.add(
            "pages",
            tokens=tokens,
            kernel=kernel,
            heads=heads,
            num_bytes=len(whole.data),
            differ_as_pages=as_pages,
            differ_as_blocks=as_blocks,
        )
        results.check(
            as_blocks == 0,
            f"{as_blocks} bytes of a block differ: {tokens} tokens in kernel blocks of {kernel}",
        )
