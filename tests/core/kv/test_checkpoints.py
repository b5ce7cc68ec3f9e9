"""Checkpoints of linear state, and the blocks of windows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.shipping import (
    CheckpointRule,
    Checkpoints,
    default_spacing,
    is_worth_sending,
    manifest_of,
    num_checkpoints,
    shipped_bytes,
    shipped_range,
)
from prfaas.core.routing.predictions import CheckpointCosts, Costs, with_checkpoints

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


def spacing(rule: CheckpointRule, layout: Layout = HYBRID, final_tokens: int = 1_600_000) -> int:
    return rule.of(layout, have_tokens=0, final_tokens=final_tokens).checkpoint_tokens


def test_a_rule_rounds_up_to_boundaries_and_leaves_models_without_state_alone() -> None:
    assert spacing(CheckpointRule(2000)) == 2000
    assert spacing(CheckpointRule(2001)) == 2016
    assert spacing(CheckpointRule()) == spacing(CheckpointRule(0, 1e5, 1e9)) == 0
    assert spacing(CheckpointRule(None)) == 0, "no cost is known"
    planned = CheckpointRule.planned("auto", lambda tokens: tokens * 100_000, [5e6, 1e6])
    expected = default_spacing(1000, 1e5, 1e6, SPAN)
    assert spacing(planned) == expected > 0
    dense = Layout(bytes(32), SPAN, "", HYBRID.groups[:1])
    assert planned.of(dense, have_tokens=0, final_tokens=16_000) is dense
    assert planned.of(HYBRID, have_tokens=64, final_tokens=64) is HYBRID


@pytest.mark.parametrize("have", [0, 512, 66_048])
@pytest.mark.parametrize("gbps", [1, 10, 25, 100, 400, 1e9])
@pytest.mark.parametrize(
    ("tokens", "share"), [("auto", 0.1), (1, 1.0), (4_096, 1.0), (1 << 30, 0.0), (0, 0.0)]
)
def test_states_add_no_more_to_a_hand_off_than_their_share(
    tokens: Any, share: float, gbps: float, have: int
) -> None:
    """The case study's model, with and without a sliding window."""
    groups = (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 512, 17_280 * 512),
        CacheGroup(1, GroupKind.LINEAR_STATE, 512, 91_171_226),
        CacheGroup(2, GroupKind.LINEAR_STATE, 512, 91_171_226),
        CacheGroup(3, GroupKind.SLIDING_WINDOW, 512, 1 << 20, 1024),
    )
    rule = CheckpointRule.planned(tokens, lambda tokens: tokens * 213_000, [gbps * 1e9])
    most = 0.0
    for groups_here in (groups, groups[:3]):
        layout = Layout(bytes(32), 512, "", groups_here)
        for final in (have + 512, 32_768, 67_072, 131_072, 1_048_576):
            made = rule.of(layout, have_tokens=have, final_tokens=final)
            plain, whole = (
                shipped_bytes(each, have_tokens=have, final_tokens=max(final, have))
                for each in (layout, made)
            )
            assert whole <= plain * (1 + share)
            most = max(most, whole / plain - 1 if plain else 0)
    assert (most > 0) == (share > 0)


def test_a_long_prompt_has_its_one_state_in_the_middle() -> None:
    """At 100 Gbit/s the rule alone would ship one each 25,088 tokens, 37 % more."""
    groups = (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 512, 17_280 * 512),
        CacheGroup(1, GroupKind.LINEAR_STATE, 512, 182_342_452),
    )
    layout = Layout(bytes(32), 512, "", groups)
    rule = CheckpointRule.planned("auto", lambda tokens: tokens * 213_000, [100e9])
    assert spacing(rule, layout, 131_072) == 65_536
    assert spacing(rule, layout, 32_768) == 0


@pytest.mark.parametrize("have", [0, 64])
@pytest.mark.parametrize("spacing", [16, 48, 64, 320, 1000])
@pytest.mark.parametrize("step", [16, 48, 160])
def test_what_is_chosen_is_listed_and_within_the_bytes_of_a_ticket(
    have: int, spacing: int, step: int
) -> None:
    """An engine keeps states wherever its steps end."""
    final = 640
    layout = replace(HYBRID, checkpoint_tokens=spacing)
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
