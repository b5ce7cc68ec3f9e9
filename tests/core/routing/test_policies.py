"""The selectable policies: laws over all facts and signals."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.routing.decision import Decision, Path, Reason, RoutingFacts, Unpredicted, judge
from prfaas.core.routing.policies import (
    AdaptivePolicy,
    Bandwidth,
    PaperPolicy,
    PolicyName,
    make_policy,
)
from prfaas.core.routing.predictions import CostModel, LinkState, PathSignals, predict
from prfaas.units import NS_PER_S

LENGTHS = st.integers(0, 100_000)
OBSTACLES = (
    Reason.NOT_OFFLOADABLE,
    Reason.NO_PREFILL_INSTANCE,
    Reason.LAYOUT_MISMATCH,
    Reason.SHARED_CORES,
    Reason.LINK_DOWN,
)
WAITS = st.none() | st.integers(0, 100 * NS_PER_S)


@st.composite
def facts_of_a_request(draw: st.DrawFn) -> RoutingFacts:
    prompt = draw(st.integers(1, 100_000))
    there = draw(st.integers(0, prompt - 1))
    return RoutingFacts(
        num_prompt_tokens=prompt,
        pd_hit_tokens=draw(st.integers(0, prompt - 1)),
        prfaas_hit_tokens=there,
        obstacle=draw(st.none() | st.sampled_from(OBSTACLES)),
        remote_device_only_tokens=draw(st.just(0) | st.integers(0, there)),
    )


SIGNALS = st.builds(
    PathSignals,
    local_wait_ns=WAITS,
    remote_wait_ns=WAITS,
    link=st.none()
    | st.builds(
        LinkState, st.floats(0, 1e12), st.integers(0, 10**12), rtt_ns=st.integers(0, NS_PER_S)
    ),
)


@dataclass(frozen=True)
class Costs(CostModel):
    """100 µs a token remotely, 300 locally; 1,000 bytes a token."""

    def local_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        return 300_000 * num_new_tokens

    def remote_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        return 100_000 * num_new_tokens

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        return 1000 * (num_prompt_tokens - present_tokens)

    def tail_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        return min(1_000_000, self.shipped_bytes(num_prompt_tokens, present_tokens))


COSTS = Costs()
IDLE = PathSignals(0, 0, LinkState(1e10))


@pytest.mark.parametrize("name", PolicyName)
@given(facts=facts_of_a_request(), signals=SIGNALS, threshold=st.integers(1, 100_000))
def test_no_policy_sends_away_what_cannot_go(
    name: PolicyName, facts: RoutingFacts, signals: PathSignals, threshold: int
) -> None:
    decision = make_policy(name, threshold).decide(facts, predict(facts, signals, COSTS))
    if decision.path is Path.REMOTE:
        assert facts.obstacle is None
    assert decision.explanation


@given(facts=facts_of_a_request(), signals=SIGNALS)
def test_local_never_and_remote_always(facts: RoutingFacts, signals: PathSignals) -> None:
    found = predict(facts, signals, COSTS)
    assert make_policy(PolicyName.LOCAL, 1).decide(facts, found).path is Path.LOCAL
    remote = make_policy(PolicyName.REMOTE, 1).decide(facts, found)
    assert (remote.path is Path.REMOTE) == (facts.obstacle is None)


@given(facts=facts_of_a_request(), signals=SIGNALS, threshold=LENGTHS)
def test_paper_tells_what_is_predicted_and_does_not_go_by_it(
    facts: RoutingFacts, signals: PathSignals, threshold: int
) -> None:
    found = predict(facts, signals, COSTS)
    decision = PaperPolicy(threshold).decide(facts, found)
    assert (decision.path, decision.reason) == judge(facts, facts.num_new_tokens, threshold)
    told = decision.predicted_local_ns, decision.predicted_remote_ns
    assert told == (found.local_ns, found.remote_ns)


@given(facts=facts_of_a_request(), threshold=LENGTHS)
def test_paper_with_abundant_bandwidth_takes_the_longer_cache(
    facts: RoutingFacts, threshold: int
) -> None:
    decision = PaperPolicy(threshold, Bandwidth.ABUNDANT).decide(facts, predict(facts, IDLE, COSTS))
    # What only an engine's memory holds cannot be pulled.
    new = facts.num_prompt_tokens - max(facts.pd_hit_tokens, facts.pullable_tokens)
    assert (decision.path is Path.REMOTE) == (new > threshold and facts.obstacle is None)
    if decision.reason is Reason.BELOW_THRESHOLD and facts.obstacle is None:
        assert decision.pull_tokens == max(0, facts.pullable_tokens - facts.pd_hit_tokens)


@given(facts=facts_of_a_request(), threshold=st.integers(1, 100_000), signals=SIGNALS)
def test_adaptive_without_predictions_is_the_threshold_rule_and_says_why(
    facts: RoutingFacts, threshold: int, signals: PathSignals
) -> None:
    blind = predict(facts, signals._replace(local_wait_ns=None), COSTS)
    usual = judge(facts, facts.num_new_tokens, threshold)
    for found, why in (
        (blind, Unpredicted.STALE_SIGNALS),
        (predict(facts, signals, None), Unpredicted.NO_PROFILE),
    ):
        decision = AdaptivePolicy(threshold).decide(facts, found)
        assert (decision.path, decision.reason) == usual
        assert decision.unpredicted is why
        assert decision.explanation.endswith(f"not predicted: {why.value}")


@given(facts=facts_of_a_request(), threshold=st.integers(1, 100_000), signals=SIGNALS)
def test_adaptive_overrules_only_for_a_predicted_gain(
    facts: RoutingFacts, threshold: int, signals: PathSignals
) -> None:
    decision = AdaptivePolicy(threshold).decide(facts, predict(facts, signals, COSTS))
    local, remote = decision.predicted_local_ns, decision.predicted_remote_ns
    if decision.reason is Reason.FASTER_LOCAL:
        assert local is not None
        assert remote is not None
        assert local < remote
    if decision.reason is Reason.FASTER_REMOTE:
        assert local is not None
        assert remote is not None
        assert remote < local


def decided(policy: AdaptivePolicy, facts: RoutingFacts, signals: PathSignals) -> Decision:
    return policy.decide(facts, predict(facts, signals, COSTS))


def test_adaptive_leaves_a_jammed_link_and_a_jammed_cluster() -> None:
    long, short = RoutingFacts(num_prompt_tokens=30_000), RoutingFacts(num_prompt_tokens=9_000)
    jammed_link = IDLE._replace(link=LinkState(1e10, 10**11))
    jammed_local = IDLE._replace(local_wait_ns=60 * NS_PER_S)
    policy = AdaptivePolicy(10_000)
    assert decided(policy, long, IDLE).reason is Reason.ABOVE_THRESHOLD
    assert decided(policy, long, jammed_link).reason is Reason.FASTER_LOCAL
    tiny = RoutingFacts(num_prompt_tokens=1_000)
    assert decided(policy, tiny, IDLE).reason is Reason.BELOW_THRESHOLD
    assert decided(policy, short, jammed_local).reason is Reason.FASTER_REMOTE


def test_hysteresis_keeps_an_overruling_going_at_half_the_margin() -> None:
    request = RoutingFacts(num_prompt_tokens=10_000)
    slightly = IDLE._replace(remote_wait_ns=0, local_wait_ns=0)
    policy = AdaptivePolicy(10_000)
    # Home takes 3 s plus the wait, away 1 s: a gain of 10 % of home's prediction is the margin.
    worse, little = slightly._replace(remote_wait_ns=1_600_000_000), 1_800_000_000
    small_gain = slightly._replace(remote_wait_ns=little)
    assert decided(policy, request, small_gain).path is Path.LOCAL
    assert decided(policy, request, worse).path is Path.REMOTE
    assert decided(policy, request, small_gain).path is Path.REMOTE


@given(facts=facts_of_a_request(), wait=st.integers(0, 10**11), more=st.integers(0, 10**11))
def test_a_longer_queue_never_shortens_a_prediction(
    facts: RoutingFacts, wait: int, more: int
) -> None:
    before = predict(facts, IDLE._replace(local_wait_ns=wait, remote_wait_ns=wait), COSTS)
    after = predict(
        facts, IDLE._replace(local_wait_ns=wait + more, remote_wait_ns=wait + more), COSTS
    )
    assert before.local_ns is not None
    assert after.local_ns is not None
    assert before.local_ns <= after.local_ns
    assert before.remote_ns is not None
    assert after.remote_ns is not None
    assert before.remote_ns <= after.remote_ns
