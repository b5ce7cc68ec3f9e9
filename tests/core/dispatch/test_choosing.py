"""Picking an instance, admission."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.admission.deadline_admission import admit
from prfaas.core.dispatch.scoring import (
    UNREACHABLE,
    Candidate,
    Weights,
    pick,
    score,
    scores,
    stopped_at,
)
from prfaas.core.routing.decision import Reason
from prfaas.units import NS_PER_S

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        name=st.text("abcdef", min_size=1, max_size=3),
        ready=st.booleans(),
        wait_ns=st.none() | st.integers(0, 10**10),
        hit_tokens=st.integers(0, 5000),
        num_open=st.integers(0, 40),
        num_tokens_max=st.integers(1, 10_000),
        layouts_agree=st.booleans(),
        adds_cores=st.booleans(),
        unreachable=st.none() | st.sampled_from(UNREACHABLE),
        device_tokens=st.integers(0, 5000),
    ),
    unique_by=lambda c: c.name,
    max_size=6,
)


def in_order(candidates: list[Candidate]) -> list[Candidate]:
    """Those that wait less first, unknown waits in front."""
    return sorted(candidates, key=lambda c: -1 if c.wait_ns is None else c.wait_ns)


@given(candidates=CANDIDATES, num_tokens=st.integers(1, 10_000))
def test_the_chosen_instance_passed_every_filter(
    candidates: list[Candidate], num_tokens: int
) -> None:
    found = pick(in_order(candidates), num_tokens, hit_tokens_max=5000)
    chosen = found.candidate
    passing = [c for c in candidates if stopped_at(c, num_tokens) is None]
    assert (chosen is None) == (not passing)
    assert chosen is None or chosen in passing
    assert (found.obstacle is None) == (chosen is not None)


@given(
    candidates=CANDIDATES,
    num_tokens=st.integers(1, 10_000),
    hits=st.booleans(),
    opens=st.booleans(),
    device=st.booleans(),
)
def test_looking_no_further_than_needed_finds_the_best_of_all(
    candidates: list[Candidate], num_tokens: int, hits: bool, opens: bool, device: bool
) -> None:
    weights = Weights(
        cached_prefix=0.5 if hits else 0.0,
        few_open=0.25 if opens else 0.0,
        on_device=0.05 if device else 0.0,
    )
    chosen = pick(
        in_order(candidates),
        num_tokens,
        hit_tokens_max=5000,
        weights=weights,
        device_tokens_max=5000,
    ).candidate
    passing = [c for c in candidates if stopped_at(c, num_tokens) is None]
    if chosen is not None:
        assert score(chosen, num_tokens, weights) == max(
            score(c, num_tokens, weights) for c in passing
        )


@given(candidates=CANDIDATES, num_tokens=st.integers(1, 10_000))
def test_the_parts_that_are_shown_add_up_to_the_score_that_decides(
    candidates: list[Candidate], num_tokens: int
) -> None:
    weights = Weights(*(1.0 + place for place in range(len(Weights._fields))))
    for candidate in candidates:
        _, parts = scores(candidate, num_tokens, weights)
        assert set(parts) == set(Weights._fields)
        assert sum(parts.values()) == pytest.approx(score(candidate, num_tokens, weights))


def test_the_obstacle_is_what_stopped_the_one_that_got_furthest() -> None:
    down, short = Candidate("a", ready=False), Candidate("b", num_tokens_max=5)
    other = Candidate("c", layouts_agree=False)
    cut = Candidate("d", unreachable=Reason.LINK_DOWN)
    lost = Candidate("g", unreachable=Reason.ENGINE_NOT_CONNECTED)
    shared = Candidate("f", adds_cores=False)
    cases = [
        ([], Reason.NO_PREFILL_INSTANCE),
        ([down], Reason.NO_PREFILL_INSTANCE),
        ([down, short], Reason.PROMPT_TOO_LONG),
        ([other, short], Reason.LAYOUT_MISMATCH),
        ([down, cut, other, lost], Reason.LINK_DOWN),
        ([lost, other], Reason.ENGINE_NOT_CONNECTED),
        ([shared, cut, other], Reason.SHARED_CORES),
        ([cut, Candidate("e")], None),
    ]
    for candidates, obstacle in cases:
        assert pick(candidates, 10, hit_tokens_max=0).obstacle is obstacle


@given(candidates=CANDIDATES, num_tokens=st.integers(1, 5000), extra=st.integers(1, 10**9))
def test_a_worse_candidate_changes_nothing(
    candidates: list[Candidate], num_tokens: int, extra: int
) -> None:
    ordered = in_order(candidates)
    chosen = pick(ordered, num_tokens, hit_tokens_max=5000).candidate
    if chosen is None:
        return
    worse = Candidate("z", wait_ns=(chosen.wait_ns or 10**10) + extra, hit_tokens=0)
    if chosen.wait_ns is not None:
        more = in_order([*ordered, worse])
        again = pick(more, num_tokens, hit_tokens_max=5000).candidate
        assert again == chosen


@given(predicted=st.none() | st.integers(0, 10**12), target=st.none() | st.integers(1, 10**11))
def test_only_a_predicted_miss_is_refused(predicted: int | None, target: int | None) -> None:
    answer = admit(predicted, target)
    miss = predicted is not None and target is not None and predicted > target
    assert answer.admitted is not miss
    assert (answer.retry_after_s > 0) is miss


@pytest.mark.parametrize(("over_s", "retry"), [(0.5, 1), (7, 7), (900, 60)])
def test_retry_after_is_how_much_too_late_it_would_be(over_s: float, retry: int) -> None:
    assert admit(round((10 + over_s) * NS_PER_S), 10 * NS_PER_S).retry_after_s == retry
