"""The threshold rule: laws over all facts, and every reason once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.routing import Path, Reason, RoutingFacts, ThresholdPolicy

LENGTHS = st.integers(0, 100_000)
OBSTACLES = (
    Reason.NOT_OFFLOADABLE,
    Reason.NO_PREFILL_INSTANCE,
    Reason.LAYOUT_MISMATCH,
    Reason.LINK_DOWN,
)
FACTS = st.builds(
    RoutingFacts,
    num_prompt_tokens=LENGTHS,
    pd_hit_tokens=LENGTHS,
    prfaas_hit_tokens=LENGTHS,
    obstacle=st.none() | st.sampled_from(OBSTACLES),
)


@given(facts=FACTS, threshold=LENGTHS)
def test_remote_means_longer_than_the_threshold_and_nothing_in_the_way(
    facts: RoutingFacts, threshold: int
) -> None:
    decision = ThresholdPolicy(threshold).decide(facts)
    new = facts.num_prompt_tokens - facts.pd_hit_tokens
    free = facts.obstacle is None
    assert (decision.path is Path.REMOTE) == (new > threshold and free)
    assert (decision.reason is Reason.ABOVE_THRESHOLD) == (decision.path is Path.REMOTE)
    assert (decision.reason is Reason.BELOW_THRESHOLD) == (new <= threshold)


@given(facts=FACTS, threshold=LENGTHS, more=LENGTHS)
def test_a_longer_prompt_is_never_called_back(
    facts: RoutingFacts, threshold: int, more: int
) -> None:
    policy = ThresholdPolicy(threshold)
    longer = facts._replace(num_prompt_tokens=facts.num_prompt_tokens + more)
    if policy.decide(facts).path is Path.REMOTE:
        assert policy.decide(longer).path is Path.REMOTE


@given(facts=FACTS, threshold=LENGTHS, obstacle=st.sampled_from(OBSTACLES))
def test_an_obstacle_never_sends_a_request_away(
    facts: RoutingFacts, threshold: int, obstacle: Reason
) -> None:
    policy = ThresholdPolicy(threshold)
    hindered = facts._replace(obstacle=obstacle)
    assert policy.decide(hindered).path is Path.LOCAL


@given(facts=FACTS, threshold=LENGTHS)
def test_the_explanation_names_both_numbers(facts: RoutingFacts, threshold: int) -> None:
    decision = ThresholdPolicy(threshold).decide(facts)
    assert f"{facts.num_prompt_tokens - facts.pd_hit_tokens:,} new tokens" in decision.explanation
    assert f"against {threshold:,}" in decision.explanation
    assert decision.offload_threshold == threshold


LONG = RoutingFacts(num_prompt_tokens=2000)
CASES = {
    Reason.ABOVE_THRESHOLD: LONG,
    Reason.BELOW_THRESHOLD: RoutingFacts(num_prompt_tokens=2000, pd_hit_tokens=1000),
    **{obstacle: LONG._replace(obstacle=obstacle) for obstacle in OBSTACLES},
}


@pytest.mark.parametrize("reason", CASES)
def test_every_reason_is_reached_and_explains_itself_differently(reason: Reason) -> None:
    decision = ThresholdPolicy(1000).decide(CASES[reason])
    assert decision.reason is reason
    others = [ThresholdPolicy(1000).decide(CASES[other]) for other in CASES if other is not reason]
    assert decision.explanation not in [other.explanation for other in others]


def test_the_hit_of_the_prfaas_cluster_does_not_count() -> None:
    facts = LONG._replace(prfaas_hit_tokens=1990)
    assert ThresholdPolicy(1000).decide(facts).path is Path.REMOTE
