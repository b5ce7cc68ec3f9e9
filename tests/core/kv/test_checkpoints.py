"""Checkpoints of linear state, and the blocks of windows."""

from __future__ import annotations

import math

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.checkpoints import (
    CheckpointRule,
    Checkpoints,
    default_spacing,
    num_checkpoints,
)
from prfaas.core.kv.manifest import manifest_of
from prfaas.core.kv.shipping import is_worth_sending, shipped_bytes, shipped_range
from prfaas.core.routing.cost_tables import CheckpointCosts, Costs, with_checkpoints

SPAN = 16
STATE = CacheGroup(1, GroupKind.LINEAR_STATE, SPAN, 1000)
HYBRID = Layout(bytes(32), SPAN, "", (CacheGroup(0, GroupKind.FULL_ATTENTION, SPAN, 10), STATE))


def test_the_default_is_where_the_cost_of_states_and_of_breaks_is_least() -> None:
    """The cost for each token, computed at all spacings."""
    state_bytes, token_ns, link_bits_per_s, between = 174 << 20, 200_000.0, 10e9, 3_276_800
    state_s = state_bytes * 8 / link_bits_per_s
    costs = {
        spacing: state_s / spacing + spacing / 2 * token_ns / 1e9 / between
        for spacing in range(1024, 400_000, 1024)
    }
    found = default_spacing(state_bytes, token_ns, link_bits_per_s, 1024)
    assert abs(found - min(costs, key=costs.__getitem__)) <= 1024


def test_the_default_grows_with_the_state_and_falls_with_the_cost_of_recompute() -> None:
    assert default_spacing(4 << 20, 1e5, 1e9, 1) == pytest.approx(
        2 * default_spacing(1 << 20, 1e5, 1e9, 1), rel=0.01
    )
    assert default_spacing(1 << 20, 4e5, 1e9, 1) == pytest.approx(
        default_spacing(1 << 20, 1e5, 1e9, 1) / 2, rel=0.01
    )


@pytest.mark.parametrize("costs", [(0, 1e5, 1e9), (1 << 20, 0.0, 1e9), (1 << 20, 1e5, 0.0)])
def test_without_state_or_a_known_cost_there_is_none(costs: tuple[int, float, float]) -> None:
    assert default_spacing(*costs, 16) == 0


def test_a_rule_rounds_up_to_boundaries_and_leaves_models_without_state_alone() -> None:
    assert CheckpointRule(100).of(HYBRID).checkpoint_tokens == 112
    assert CheckpointRule(0, 1e5, 1e9).of(HYBRID).checkpoint_tokens == 0
    assert CheckpointRule(None).of(HYBRID).checkpoint_tokens == 0
    planned = CheckpointRule.planned(None, lambda tokens: tokens * 100_000, [5e9, 1e9])
    expected = default_spacing(1000, 1e5, 1e9, SPAN)
    assert planned.of(HYBRID).checkpoint_tokens == expected > 0
    dense = Layout(bytes(32), SPAN, "", HYBRID.groups[:1])
    assert planned.of(dense) is dense


@pytest.mark.parametrize("have", [0, 64])
@pytest.mark.parametrize("spacing", [16, 48, 64, 1000])
@pytest.mark.parametrize("step", [16, 48, 160])
def test_what_is_chosen_is_listed_and_within_the_bytes_of_a_ticket(
    have: int, spacing: int, step: int
) -> None:
    """An engine keeps states wherever its steps end."""
    final = 640
    layout = CheckpointRule(spacing).of(HYBRID)
    hashes = [bytes([index]) * 32 for index in range(final // SPAN)]
    listed = manifest_of(layout, hashes, have_tokens=have, final_tokens=final)[1]
    chosen = Checkpoints(layout.checkpoint_tokens, have_tokens=have, final_tokens=final)
    ends = [end for end in range(have + step, final + 1, step) if chosen.takes(STATE, end)]
    names = [listed[at : at + 32] for at in range(0, len(listed), 32)]
    assert {hashes[end // SPAN - 1] for end in ends} <= set(names)
    assert names[-1] == hashes[-1]
    gaps = [b - a for a, b in zip([have, *ends], ends, strict=False)]
    assert all(gap >= spacing for gap in gaps)
    assert len(ends) <= num_checkpoints(have, final, layout.checkpoint_tokens)
    plain = shipped_bytes(HYBRID, have_tokens=have, final_tokens=final)
    most = shipped_bytes(layout, have_tokens=have, final_tokens=final)
    assert plain + len(ends) * STATE.block_bytes <= most
    if step == SPAN and spacing % SPAN == 0:
        assert plain + len(ends) * STATE.block_bytes == most


def test_attention_and_the_last_state_are_no_checkpoints() -> None:
    chosen = Checkpoints(16, have_tokens=0, final_tokens=64)
    assert not chosen.takes(HYBRID.groups[0], 32)
    assert not chosen.takes(STATE, 64)
    assert not Checkpoints(0, have_tokens=0, final_tokens=64).takes(STATE, 32)


def test_costs_with_checkpoints_ship_their_bytes_and_resume_at_the_last_whole_one() -> None:
    sizes = [500 + 10 * tokens for tokens in range(1001)]
    costs = Costs([], [], sizes, 500, 64)
    assert with_checkpoints(costs, 0) is costs
    assert costs.tokens_in(0, 5000) == 0
    found = with_checkpoints(costs, 100)
    assert isinstance(found, CheckpointCosts)
    assert found.shipped_bytes(1000, 0) == 500 + 10 * 1000 + 9 * 500
    assert found.shipped_bytes(1000, 300) == 10 * 700 + 7 * 500 + 500
    assert found.shipped_bytes(1201, 0) == 500 + 10 * 1201 + 12 * 500
    for num_bytes in range(0, 14_000, 7):
        # Attention of 100 tokens and a state follow each other.
        whole, rest = divmod(num_bytes, 100 * 10 + 500)
        expected = whole * 100
        assert abs(found.tokens_in(0, num_bytes) - expected) <= (100 if rest < 20 else 0)
        assert found.tokens_in(0, num_bytes) <= expected
        assert found.tokens_in(400, 0) == 400


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 130, 384, 385, 386, 401, 4097])
def test_a_window_ships_the_blocks_that_the_next_token_attends_to(window: int) -> None:
    """It attends to itself and to `window` - 1 tokens before it."""
    group = CacheGroup(0, GroupKind.SLIDING_WINDOW, 128, 1, window)
    final = 128 * 64
    first_token = final - max(window - 1, 1)
    first, last = shipped_range(group, 0, final)
    assert (first, last) == (first_token // 128, 64)
    assert last - first == math.ceil(max(window - 1, 1) / 128)
    ends = range(128, final + 1, 128)
    worth = [e for e in ends if is_worth_sending(group, e, have_tokens=0, final_tokens=final)]
    assert worth == list(range(first * 128 + 128, final + 1, 128))
