"""Kernel blocks: engines whose attention backends split pages differently have one block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.canonical.parts import block_bytes
from prfaas.core.kv.canonical.pieces import pieces
from prfaas.engines.canonical.vllm_parts import (
    CannotConvertError,
    Division,
    KernelPages,
    layer_parts,
    pieces_apart,
)
from tests.core.kv.canonical.model_kinds import write
from tests.engines.canonical.kernel_blocks import (
    SHAPES,
    Page,
    block_of,
    differing,
    page,
    parts_of,
    runs_of,
)
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(240)
TOKENS, HEADS = 192, 4


def engine(kernel: int, ranks: int, layout: str = "LBHNC") -> list[Page]:
    """The pages of all ranks of an engine."""
    each = HEADS // ranks
    return [
        page(TOKENS, kernel, range(rank * each, (rank + 1) * each), layout=layout)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("tokens", "kernel", "heads"), SHAPES)
def test_a_page_in_kernel_blocks_has_other_bytes_and_the_same_block(
    tokens: int, kernel: int, heads: int
) -> None:
    whole, split = (page(tokens, size, range(heads)) for size in (tokens, kernel))
    assert (differing(whole.data, split.data) > 0) == (heads > 1)
    assert parts_of([whole], heads)[0] == parts_of([split], heads)[0]
    assert differing(block_of([whole], heads), block_of([split], heads)) == 0


@pytest.mark.parametrize("target", [(192, 1), (64, 2), (16, 4), (96, 2)])
@pytest.mark.parametrize("source", [(192, 2), (32, 1), (64, 4), (48, 2)])
def test_a_block_of_one_backend_is_written_as_another_reads_it(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    """Kernel blocks and ranks of both sites differ."""
    here, there = engine(*source), engine(*target)
    block = block_of(here, HEADS)
    row = np.zeros(sum(len(each.data) for each in there), np.uint8)
    row = write(block, row, pieces(runs_of(there, HEADS), len(row), len(block)))
    assert (row == np.concatenate([each.data for each in there])).all()


@pytest.mark.parametrize("kernel", [16, 64])
def test_rows_of_tokens_are_the_same_in_kernel_blocks_of_any_length(kernel: int) -> None:
    """No copy is cut where the bytes are the same: token-major pages, and those of one head."""
    for heads, layout in ((2, "LBNHC"), (1, "LBHNC"), (1, "LBNHC")):
        whole, split = (page(TOKENS, n, range(heads), layout=layout) for n in (TOKENS, kernel))
        assert (whole.data == split.data).all()
        _, pages = parts_of([split], heads, layout)
        assert len(pages) == 1


def test_a_cache_of_another_order_than_the_configuration_says_is_not_converted() -> None:
    with pytest.raises(CannotConvertError, match="in the order NHC, and the cache is LBHNC"):
        parts_of([page(TOKENS, 64, range(2), layout="LBNHC")], 2, "LBHNC")


def spec(kind: str, **fields: Any) -> Any:
    cache, torch = needing_vllm("vllm.v1.kv_cache_interface"), needing_vllm("torch")
    given = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 132, "dtype": torch.uint8}
    return getattr(cache, kind)(**(given | fields))


def test_scales_behind_a_kernel_block_are_a_part_of_the_order() -> None:
    """An indexer keeps the values of all tokens of a kernel block before their scales."""
    role = needing_vllm("vllm.v1.kv_cache_interface").SparseCacheRole.INDEXER
    found = {}
    for kernel in (64, 192):
        division = Division(1, 1, "LBHNC", pieces=TOKENS // kernel)
        made = spec("MLAAttentionSpec", cache_role=role)
        found[kernel] = layer_parts(made, division)
        assert pieces_apart(made, division) == 1
    assert block_bytes([found[64]]) == block_bytes([found[192]])
    assert found[64] != found[192]
    assert found[64][0].words == "latent uint8 1(latent in blocks of 64 1x25344)"


def test_pages_of_an_indexer_are_joined_in_kernel_blocks_of_one_length() -> None:
    role = needing_vllm("vllm.v1.kv_cache_interface").SparseCacheRole.INDEXER
    long = layer_parts(spec("MLAAttentionSpec", cache_role=role), Division(1, 1, "LBHNC", pieces=3))
    short = spec("MLAAttentionSpec", cache_role=role, block_size=64)
    assert layer_parts(short, Division(1, 1, "LBHNC", num_pages=3)) == long


@pytest.mark.parametrize("kind", [None, "fp8_ds_mla"])
def test_a_latent_with_a_row_for_each_token_is_the_same_in_any_kernel_block(
    kind: str | None,
) -> None:
    made = spec("MLAAttentionSpec", head_size=656, cache_dtype_str=kind)
    parts = [layer_parts(made, Division(1, 1, "LBHNC", pieces=n)) for n in (1, 3)]
    assert parts[0] == parts[1]


@pytest.mark.parametrize(
    ("made", "pages", "words"),
    [
        ("FullAttentionSpec", KernelPages(4, "HNC"), "4 kernel blocks in the order HNC"),
        ("FullAttentionSpec", KernelPages(1, "HNC"), "1 kernel blocks in the order HNC"),
        ("FullAttentionSpec", KernelPages(4, "NHC"), "rows of tokens"),
        ("FullAttentionSpec", KernelPages(4, "NC"), "rows of tokens"),
        ("MLAAttentionSpec", KernelPages(4, "NC"), "rows of tokens"),
    ],
)
def test_kernel_blocks_of_pages_that_are_not_converted_are_a_fact(
    made: str, pages: KernelPages, words: str
) -> None:
    facts = needing_vllm("prfaas.engines.identity.vllm_facts")
    layout = Layout(b"", TOKENS, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, TOKENS, 8),))
    cache = needing_vllm("vllm.v1.kv_cache_interface")
    groups = [cache.KVCacheGroupSpec(["layer"], spec(made))]
    caches = cache.KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    found = facts._kernels(caches, layout, {"layer": pages})
    assert found == {"group.0.kernel_blocks": words}
    assert facts._kernels(caches, layout, {}) == {}


def test_the_connector_asks_for_head_major_pages_as_vllms_own_does() -> None:
    """The order of a site without `VLLM_KV_CACHE_LAYOUT`, on GPUs too."""
    connector = needing_vllm("prfaas.engines.vllm_connector").PrfaasConnector
    config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
    assert connector.get_required_kvcache_layout(config) == "LBHNC"


@pytest.mark.parametrize(
    "backend", ["rocm_attn.RocmAttentionBackend", "b12x.B12xPagedAttentionBackend"]
)
def test_slots_that_a_backend_makes_of_heads_are_not_taken_for_heads(backend: str) -> None:
    """Keys of all heads, then values: the sizes are those of a page of heads."""
    file, _, name = backend.partition(".")
    module = needing_vllm(f"vllm.v1.attention.backends.{file}")
    torch = needing_vllm("torch")
    made = spec("FullAttentionSpec", num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    customised = getattr(module, name).customize_spec(made)
    assert customised.unpadded_page_size_bytes == made.unpadded_page_size_bytes
    with pytest.raises(CannotConvertError, match="has 2 slots of 256 bytes for a token, where 2"):
        layer_parts(customised, Division(1, 2, "LBHNC"))
    assert layer_parts(made, Division(1, 2, "LBHNC"))


def test_ranks_report_the_pages_that_their_backends_see() -> None:
    reports = needing_vllm("prfaas.engines.canonical.vllm_ranks")
    for kernel, order in ((64, "HNC"), (TOKENS, "HNC")):
        made = page(TOKENS, kernel, range(2))
        expected = {"layer": KernelPages(TOKENS // kernel, order)}
        assert reports.kernel_pages(made.caches, made.views) == expected
