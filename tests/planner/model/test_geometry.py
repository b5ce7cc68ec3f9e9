from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.shipping import shipped_bytes
from prfaas.engines.timing.profile import make_layout
from prfaas.planner.model.kv_geometry import (
    KvGeometry,
    LayerGroup,
    LayerKind,
    block_kv_bytes,
    hybrid_block_size,
    kv_bytes,
    kv_bytes_at,
    padded_page_bytes,
    shipped_kv_bytes,
)

LENGTHS = st.integers(1, 2_000_000)


@st.composite
def groups(draw: st.DrawFn) -> LayerGroup:
    kind = draw(st.sampled_from(LayerKind))
    is_state = kind in (LayerKind.LINEAR, LayerKind.SHORT_CONV)
    return LayerGroup(
        kind=kind,
        num_layers=draw(st.integers(1, 100)),
        token_bytes=0 if is_state else draw(st.integers(1, 100_000)),
        state_bytes=draw(st.integers(1, 10_000_000)) if is_state else 0,
        window=draw(st.integers(1, 100_000)) if kind is LayerKind.SLIDING else None,
    )


geometries = st.lists(groups(), min_size=1, max_size=5).map(
    lambda found: KvGeometry("random", tuple(found))
)


@given(geometries, LENGTHS, LENGTHS)
def test_longer_prompts_never_leave_fewer_bytes(geometry: KvGeometry, a: int, b: int) -> None:
    short, long = sorted((a, b))
    assert kv_bytes(geometry, short) <= kv_bytes(geometry, long)
    assert block_kv_bytes(geometry, short, 128) <= block_kv_bytes(geometry, long, 128)


@given(st.lists(groups(), min_size=1, max_size=5), LENGTHS)
def test_bytes_are_additive_over_groups(found: list[LayerGroup], num_tokens: int) -> None:
    whole = kv_bytes(KvGeometry("whole", tuple(found)), num_tokens)
    parts = [kv_bytes(KvGeometry("part", (group,)), num_tokens) for group in found]
    assert whole == sum(parts)


@given(geometries, LENGTHS, st.sampled_from([1, 16, 128, 384]))
def test_blocks_round_up_by_less_than_two_blocks(
    geometry: KvGeometry, num_tokens: int, block_size: int
) -> None:
    exact, rounded = (
        kv_bytes(geometry, num_tokens),
        block_kv_bytes(geometry, num_tokens, block_size),
    )
    slack = sum(2 * g.num_layers * g.token_bytes * block_size for g in geometry.groups)
    assert exact <= rounded <= exact + slack


@given(geometries, LENGTHS, st.sampled_from([1, 16, 128, 384]))
def test_shipped_bytes_are_those_of_the_blocks_that_a_transfer_ships(
    geometry: KvGeometry, num_tokens: int, block_size: int
) -> None:
    layout = make_layout(geometry, b"L" * 32, block_size, 1.0)
    shipped = shipped_bytes(layout, have_tokens=0, final_tokens=layout.last_boundary(num_tokens))
    assert shipped_kv_bytes(geometry, num_tokens, block_size) == shipped


@given(geometries, LENGTHS)
def test_array_form_agrees_with_integers(geometry: KvGeometry, num_tokens: int) -> None:
    array = kv_bytes_at(geometry, np.array([float(num_tokens)]))
    assert array[0] == pytest.approx(kv_bytes(geometry, num_tokens), rel=1e-15)


@given(geometries, st.sampled_from([16, 32, 128]))
def test_a_hybrid_block_holds_every_state(geometry: KvGeometry, alignment: int) -> None:
    block = hybrid_block_size(geometry, alignment)
    assert block % alignment == 0
    page = padded_page_bytes(geometry, block)
    assert all(page >= g.state_bytes for g in geometry.groups)


def test_full_blocks_cost_the_same_as_tokens() -> None:
    geometry = KvGeometry("mla", (LayerGroup(LayerKind.MLA, 15, 1152),))
    assert block_kv_bytes(geometry, 256, 128) == kv_bytes(geometry, 256)
    assert block_kv_bytes(geometry, 257, 128) == kv_bytes(geometry, 384)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_an_empty_prompt_is_an_error(num_tokens: int) -> None:
    geometry = KvGeometry("mla", (LayerGroup(LayerKind.MLA, 15, 1152),))
    with pytest.raises(ValueError, match=f"num_tokens is {num_tokens}"):
        kv_bytes(geometry, num_tokens)
