"""The threshold rule: laws over all facts, and every reason once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.routing.decision import Decision, Path, Reason, RoutingFacts
from prfaas.core.routing.policies import PaperPolicy
from prfaas.core.routing.predictions import Prediction

LENGTHS = st.integers(0, 100_000)
OBSTACLES = (
    Reason.NOT_OFFLOADABLE,
    Reason.NO_PREFILL_INSTANCE,
    Reason.LAYOUT_MISMATCH,
    Reason.SHARED_CORES,
    Reason.LINK_DOWN,
)
FACTS = st.builds(
    RoutingFacts,
    num_prompt_tokens=LENGTHS,
    pd_hit_tokens=LENGTHS,
    prfaas_hit_tokens=LENGTHS,
    obstacle=st.none() | st.sampled_from(OBSTACLES),
)


def decide(facts: RoutingFacts, threshold: int) -> Decision:
    """The rule, where nothing is predicted."""
    return PaperPolicy(threshold).decide(facts, Prediction(None, None))


@given(facts=FACTS, threshold=LENGTHS)
def test_remote_means_longer_than_the_threshold_and_nothing_in_the_way(
    facts: RoutingFacts, threshold: int
) -> None:
    decision = decide(facts, threshold)
    new = facts.num_prompt_tokens - facts.pd_hit_tokens
    free = facts.obstacle is None
    assert (decision.path is Path.REMOTE) == (new > threshold and free)
    assert (decision.reason is Reason.ABOVE_THRESHOLD) == (decision.path is Path.REMOTE)
    assert (decision.reason is Reason.BELOW_THRESHOLD) == (new <= threshold)


@given(facts=FACTS, threshold=LENGTHS, more=LENGTHS)
def test_a_longer_prompt_is_never_called_back(
    facts: RoutingFacts, threshold: int, more: int
) -> None:
    longer = facts._replace(num_prompt_tokens=facts.num_prompt_tokens + more)
    if decide(facts, threshold).path is Path.REMOTE:
        assert decide(longer, threshold).path is Path.REMOTE


@given(facts=FACTS, threshold=LENGTHS, obstacle=st.sampled_from(OBSTACLES))
def test_an_obstacle_never_sends_a_request_away(
    facts: RoutingFacts, threshold: int, obstacle: Reason
) -> None:
    hindered = facts._replace(obstacle=obstacle)
    assert decide(hindered, threshold).path is Path.LOCAL


@given(facts=FACTS, threshold=LENGTHS)
def test_the_explanation_names_both_numbers(facts: RoutingFacts, threshold: int) -> None:
    decision = decide(facts, threshold)
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
    decision = decide(CASES[reason], 1000)
    assert decision.reason is reason
    others = [decide(CASES[other], 1000) for other in CASES if other is not reason]
    assert decision.explanation not in [other.explanation for other in others]


def test_the_hit_of_the_prfaas_cluster_does_not_count() -> None:
    facts = LONG._replace(prfaas_hit_tokens=1990)
    assert decide(facts, 1000).path is Path.REMOTE
