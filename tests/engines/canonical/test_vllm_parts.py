"""Parts of vLLM's layers: ranks of any number announce the same block, with the model's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from prfaas.core.kv.blocks import KvPage
from prfaas.core.kv.canonical.copies import page_bytes
from prfaas.core.kv.canonical.parts import LayerParts, block_bytes, layer_bytes
from prfaas.engines.canonical.vllm_pages import kv_pages
from prfaas.engines.canonical.vllm_parts import CannotConvertError, Division, layer_parts
from prfaas.errors import ConfigError
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import LayerKind
from prfaas.planner.model.kv_geometry import page_bytes as planned_bytes
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(240)
SIZES = (1, 2, 4, 8)
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 1000,
}
"""Of Qwen/Qwen3-Next-80B-A3B-Instruct."""


@dataclass(frozen=True)
class Vllm:
    """vLLM's own modules."""

    torch: Any
    cache: Any
    states: Any
    backends: Any

    def attention(self, heads: int, tp_size: int, **fields: Any) -> Any:
        said = {"block_size": 16, "head_size": 256, "dtype": self.torch.bfloat16} | fields
        kind = said.pop("kind", self.cache.FullAttentionSpec)
        return kind(num_kv_heads=max(1, heads // tp_size), **said)

    def state(self, kind: str, shapes: Any, **fields: Any) -> Any:
        dtypes = (self.torch.bfloat16, self.torch.float32)[: len(shapes)]
        backend = self.backends.MambaAttentionBackendEnum[kind]
        return self.cache.MambaSpec(
            block_size=16, shapes=tuple(shapes), dtypes=dtypes, mamba_type=backend, **fields
        )

    def delta_net(self, tp_size: int) -> Any:
        shapes = self.states.MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp_size, 16, 32, 128, 128, 4
        )
        return self.state("GDN_ATTN", shapes)

    def mamba2(self, tp_size: int, groups: int) -> Any:
        shapes = self.states.MambaStateShapeCalculator.mamba2_state_shape(
            tp_size, 2048, groups, 32, 64, 128, 4
        )
        return self.state("MAMBA2", shapes)

    def short(self, tp_size: int) -> Any:
        shapes = self.states.MambaStateShapeCalculator.short_conv_state_shape(tp_size, 256, 3)
        return self.state("SHORT_CONV", shapes)


@pytest.fixture(scope="module")
def vllm() -> Vllm:
    return Vllm(
        needing_vllm("torch"),
        needing_vllm("vllm.v1.kv_cache_interface"),
        needing_vllm("vllm.model_executor.layers.mamba.mamba_utils"),
        needing_vllm("vllm.v1.attention.backends.registry"),
    )


def division(
    tp_size: int, kv_heads: int = 2, layout: str | None = "LBNHC", groups: int | None = None
) -> Division:
    return Division(tp_size, kv_heads, layout, groups)


def check_sizes(of_ranks: dict[int, tuple[Any, LayerParts]]) -> None:
    """All sizes have the block of one rank, and pages of the size that vLLM gives them."""
    _, whole = of_ranks[1]
    for tp_size, (spec, parts) in of_ranks.items():
        assert parts == whole
        assert page_bytes(parts, tp_size) == spec.page_size_bytes


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("heads", [1, 2, 8, 16])
def test_heads_are_those_of_the_model_at_any_number_of_ranks(
    vllm: Vllm, heads: int, layout: str
) -> None:
    specs = {size: vllm.attention(heads, size) for size in SIZES}
    check_sizes(
        {n: (spec, layer_parts(spec, division(n, heads, layout))) for n, spec in specs.items()}
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_windows_of_any_type_are_parts(vllm: Vllm, dtype: str) -> None:
    found = {}
    for size in SIZES:
        spec = vllm.attention(
            4,
            size,
            kind=vllm.cache.SlidingWindowSpec,
            sliding_window=128,
            dtype=getattr(vllm.torch, dtype),
        )
        found[size] = spec, layer_parts(spec, division(size, 4))
        assert found[size][1][0].dtype == dtype
    check_sizes(found)


def test_every_rank_has_the_whole_latent(vllm: Vllm) -> None:
    spec = vllm.cache.MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, head_size_v=0, dtype=vllm.torch.bfloat16
    )
    check_sizes({size: (spec, layer_parts(spec, division(size))) for size in SIZES})


def test_states_are_those_of_the_model_at_any_number_of_ranks(vllm: Vllm) -> None:
    check_sizes({n: (s := vllm.delta_net(n), layer_parts(s, division(n))) for n in SIZES})
    check_sizes({n: (s := vllm.short(n), layer_parts(s, division(n))) for n in SIZES})


@pytest.mark.parametrize("groups", [1, 8])
def test_groups_of_mamba2_are_divided_or_copied(vllm: Vllm, groups: int) -> None:
    specs = {size: vllm.mamba2(size, groups) for size in SIZES}
    check_sizes({n: (s, layer_parts(s, division(n, groups=groups))) for n, s in specs.items()})


@pytest.mark.parametrize("tp_size", SIZES)
def test_a_block_has_the_bytes_that_the_planner_counts(vllm: Vllm, tp_size: int) -> None:
    """Qwen3-Next: at TP 8 the rows of ranks have four times the bytes of attention."""
    geometry = geometry_from_config(QWEN3_NEXT, state_dtype="float32")
    attention = vllm.attention(2, tp_size)
    parts = {
        LayerKind.FULL: layer_parts(attention, division(tp_size)),
        LayerKind.LINEAR: layer_parts(vllm.delta_net(tp_size), division(tp_size)),
    }
    for group in geometry.groups:
        layers = [parts[group.kind]] * group.num_layers
        assert block_bytes(layers) == group.num_layers * planned_bytes(group, 16)
    if tp_size == 8:
        assert 8 * attention.page_size_bytes == 4 * layer_bytes(parts[LayerKind.FULL])


def test_a_convolution_of_the_other_order_is_another_block(vllm: Vllm) -> None:
    spec = vllm.delta_net(2)
    (steps, channels), state = spec.shapes
    turned = vllm.state("GDN_ATTN", ((channels, steps), state))
    one, other = (layer_parts(each, division(2)) for each in (spec, turned))
    assert layer_bytes(one) == layer_bytes(other)
    assert one[0].words != other[0].words


@pytest.mark.parametrize(
    ("value", "of_one", "of_eight"),
    [(None, True, False), ("canonical", True, True), ("ranks", False, False)],
)
def test_blocks_of_several_ranks_are_canonical_where_that_is_set(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch, value: str | None, of_one: bool, of_eight: bool
) -> None:
    rows = needing_vllm("prfaas.engines.canonical.vllm_rows")
    monkeypatch.delenv(rows.SETTING, raising=False)
    if value is not None:
        monkeypatch.setenv(rows.SETTING, value)
    assert (rows.is_wanted(1), rows.is_wanted(8)) == (of_one, of_eight)
    monkeypatch.setenv(rows.SETTING, "rows")
    with pytest.raises(ConfigError, match="PRFAAS_BLOCKS is 'rows'"):
        rows.is_wanted(1)


@pytest.mark.parametrize(
    ("make", "ranks", "words"),
    [
        (lambda v: v.attention(2, 2), division(2, 2, "BHLNC"), "the order of the cache is BHLNC"),
        (lambda v: v.attention(2, 2), division(2, 2, None), "the order of the cache is None"),
        (lambda v: v.attention(4, 2), division(2, 8), "2 KV heads at each of 2 ranks, the model 8"),
        (lambda v: v.attention(3, 2), division(2, 3), "1 KV heads at each of 2 ranks, the model 3"),
        (
            lambda v: v.attention(2, 2, state_content_bytes=300),
            division(2),
            "hold more than keys and values of 1 heads and 16 tokens",
        ),
        (lambda v: v.mamba2(2, 8), division(2), "the model an unknown number"),
        (
            lambda v: v.state("GDN_ATTN", ((3, 100), (8, 16, 16))),
            division(2),
            "100 channels are not q, k and v of 8 heads",
        ),
        (
            lambda v: v.state("GDN_ATTN", ((3, 512), (8, 16, 16), (4, 4))[:1]),
            division(1),
            "states of kind GDN_ATTN with 1 tensors",
        ),
    ],
)
def test_what_can_not_be_divided_is_refused_with_a_reason(
    vllm: Vllm, make: Any, ranks: Division, words: str
) -> None:
    with pytest.raises(CannotConvertError, match=words):
        layer_parts(make(vllm), ranks)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_keys_and_values_are_told_apart_where_the_backend_is_known(vllm: Vllm, layout: str) -> None:
    spec = vllm.attention(8, 4, head_size_v=128)
    layers = [layer_parts(spec, Division(4, 8, layout))] * 3
    specs = [spec] * 3

    pages = kv_pages(specs, layers, "FLASH_ATTN")

    assert pages == (KvPage(3, 16, 8, 256, 128, is_token_major=layout == "LBNHC"),)
    assert sum(page.num_bytes for page in pages) == block_bytes(layers)
    for backend in ("CPU_ATTN", "FLASHINFER", ""):
        assert not kv_pages(specs, layers, backend)


def test_latents_and_fp8_caches_have_no_keys_and_values(vllm: Vllm) -> None:
    coded = vllm.attention(8, 1, dtype=vllm.torch.float8_e4m3fn)
    latent = vllm.cache.MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=vllm.torch.bfloat16
    )
    for spec in (coded, latent):
        layers = [layer_parts(spec, Division(1, 8, "LBHNC"))]
        assert not kv_pages([spec], layers, "FLASH_ATTN")
