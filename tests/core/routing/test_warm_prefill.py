"""T(prefix, new): tables, decisions and observed times charge attention over a cached prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.routing.decision import RoutingFacts
from prfaas.core.routing.observed import NOMINAL_NS_PER_TOKEN, nominal_ns
from prfaas.core.routing.policies import choose_pull
from prfaas.core.routing.predictions import RESUME_SHIFT, Costs, LinkState, PathSignals, predict

FIXED, LINEAR, SQUARE = 5_000_000, 20_000, 1
"""ns, ns a token, ns for each pair of tokens: attention is half of a token's time at 20,000."""


def quadratic(num_tokens: int, factor: int = 1) -> int:
    return factor * (FIXED + LINEAR * num_tokens + SQUARE * num_tokens**2 // 2)


def costs(num_tokens_max: int = 4096) -> Costs:
    local = [quadratic(n, 3) for n in range(num_tokens_max + 1)]
    remote = [quadratic(n) for n in range(num_tokens_max + 1)]
    sizes = [1000 * n for n in range(num_tokens_max + 1)]
    return Costs([0, *local[1:]], [0, *remote[1:]], sizes, 0, 512)


COSTS = costs()


def exact(prefix: int, new: int) -> int:
    return FIXED + LINEAR * new + SQUARE * (prefix * new + new**2 // 2)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_new_tokens_are_charged_for_attention_over_the_prefix(prefix: int, new: int) -> None:
    found = COSTS.remote_prefill_ns(new, prefix)
    assert found == pytest.approx(exact(prefix, new), abs=4)
    assert COSTS.local_prefill_ns(new, prefix) == pytest.approx(3 * exact(prefix, new), abs=12)
    assert found >= COSTS.remote_prefill_ns(new)


def test_without_a_prefix_a_prompt_is_cold() -> None:
    assert COSTS.remote_prefill_ns(700, 0) == COSTS.remote_prefill_ns(700) == quadratic(700)


def test_linear_times_do_not_know_a_prefix() -> None:
    linear = [100 * n for n in range(1001)]
    found = Costs(linear, linear, linear, 0, 512)
    assert found.local_prefill_ns(100, 800) == found.local_prefill_ns(100)
    assert found.remote_prefill_ns(100, 5000) == found.remote_prefill_ns(100)


def test_a_resumed_prefill_costs_what_was_measured_beside_its_tokens() -> None:
    resume = [FIXED, FIXED + 7_000_000, *[FIXED + 9_000_000] * 3]
    known = Costs(COSTS.local_ns, COSTS.remote_ns, COSTS.bytes_of, 0, 512, remote_resume_ns=resume)
    for place, extra in ((1, 7_000_000), (2, 9_000_000), (3, 9_000_000)):
        prefix = place << RESUME_SHIFT
        more = known.remote_prefill_ns(100, prefix) - COSTS.remote_prefill_ns(100, prefix)
        assert more == pytest.approx(extra, abs=4)


def test_chunks_of_a_resumed_prefill_end_with_all_of_it() -> None:
    found = COSTS.chunks(1200, 2000)
    assert [tokens for tokens, _ in found] == [512, 1024, 1200]
    assert found[-1][1] == COSTS.remote_prefill_ns(1200, 2000)
    assert found[0][1] == COSTS.remote_prefill_ns(512, 2000)


def test_both_paths_are_predicted_after_their_own_prefix() -> None:
    facts = RoutingFacts(3000, pd_hit_tokens=2500, prfaas_hit_tokens=1000)
    found = predict(facts, PathSignals(0, 0, LinkState(1e12)), COSTS)
    assert found.local_ns == COSTS.local_prefill_ns(500, 2500)
    assert found.computed_ns == COSTS.remote_prefill_ns(2000, 1000)


def test_a_pull_of_a_long_prefix_does_not_make_the_rest_a_short_prompt() -> None:
    """The rest attends to the pulled prefix, too: a pull saves the prefix alone."""
    pull = choose_pull(
        4000,
        0,
        3500,
        wait_ns=0,
        prefill_ns=COSTS.local_prefill_ns,
        num_bytes=3_500_000,
        link=LinkState(1e12),
    )
    assert pull is not None
    saved = COSTS.local_prefill_ns(4000) - COSTS.local_prefill_ns(500, 3500)
    assert saved == pytest.approx(COSTS.local_prefill_ns(3500) - 3 * FIXED, abs=20)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_nominal_work_counts_attention_where_the_model_is_known(
    new: int, prefix: int, half: int
) -> None:
    assert nominal_ns(new, prefix, 0) == new * NOMINAL_NS_PER_TOKEN
    expected = NOMINAL_NS_PER_TOKEN * new * (1 + (prefix + new / 2) / half)
    assert nominal_ns(new, prefix, half) == pytest.approx(expected, rel=1e-6, abs=1)
