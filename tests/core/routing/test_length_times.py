"""Times by length: a fixed cost and a cost of each token, against noise, outliers, one length."""

from __future__ import annotations

from random import Random

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.observed import (
    KEPT_MAX,
    LIFETIME_NS,
    NOMINAL_NS_PER_TOKEN,
    SLOPE_SHARE_MIN,
    TRIAL_EVERY,
    TRIALS,
    ObservedRates,
)
from prfaas.units import NS_PER_S
from tests.core.lone_requests import arrive, serve, two_instances

FIXED_S, TOKEN_S = 0.1, 0.0001
"""Of an engine: 0.1 s for any prompt, and 0.1 ms for each token."""


def true_s(num_tokens: int) -> float:
    return FIXED_S + num_tokens * TOKEN_S


def serve_one(rates: ObservedRates, num_tokens: int, took_s: float, at_ns: int = 0) -> None:
    work = num_tokens * NOMINAL_NS_PER_TOKEN
    rates.sent(0, "pd", work, work, at_ns)
    rates.answered(0, at_ns + round(took_s * NS_PER_S))


def expected_s(rates: ObservedRates, num_tokens: int, now_ns: int = 0) -> float:
    work = num_tokens * NOMINAL_NS_PER_TOKEN
    found = rates.estimate("pd", work, work, now_ns)
    assert found is not None
    return found.ns / NS_PER_S


def test_a_long_prompt_after_short_ones_is_predicted_by_its_length() -> None:
    rates, random = ObservedRates(), Random(1)
    for _ in range(60):
        num_tokens = random.randint(50, 500)
        serve_one(rates, num_tokens, true_s(num_tokens))
    assert expected_s(rates, 6000) == pytest.approx(true_s(6000), rel=0.2)


@pytest.mark.parametrize("seed", range(10))
def test_noise_of_a_tenth_leaves_it_within_a_fifth(seed: int) -> None:
    """Lengths up to a quarter of the one that is predicted."""
    rates, random = ObservedRates(), Random(seed)
    for _ in range(100):
        num_tokens = random.randint(50, 1500)
        serve_one(rates, num_tokens, true_s(num_tokens) * random.uniform(0.9, 1.1))
    assert expected_s(rates, 6000) == pytest.approx(true_s(6000), rel=0.2)


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_outliers_move_nothing(factor: float) -> None:
    """Every fourth observation is a hundred times too long, or too short."""
    rates = ObservedRates()
    for number in range(80):
        num_tokens = 100 * 2 ** (number // 4 % 5)
        serve_one(rates, num_tokens, true_s(num_tokens) * (1 if number % 4 else factor))
    for num_tokens in (100, 400, 1600, 3200):
        assert expected_s(rates, num_tokens) == pytest.approx(true_s(num_tokens), rel=0.2)


def test_a_tenant_who_sends_one_length_hides_no_other() -> None:
    rates = ObservedRates()
    for num_tokens in (200, 6000):
        for _ in range(KEPT_MAX):
            serve_one(rates, num_tokens, true_s(num_tokens))
    for _ in range(10_000):
        serve_one(rates, 50, true_s(50))
    assert expected_s(rates, 6000) == pytest.approx(true_s(6000), rel=0.05)


def test_one_length_leaves_a_gap() -> None:
    """It may be all fixed cost or none."""
    rates, work = ObservedRates(), 6000 * NOMINAL_NS_PER_TOKEN
    for _ in range(KEPT_MAX):
        serve_one(rates, 300, true_s(300))
    found = rates.estimate("pd", work, work, 0)
    assert found is not None
    assert found.num_near == 0
    assert found.low_ns == pytest.approx(true_s(300) * NS_PER_S)
    assert found.high_ns == pytest.approx(20 * true_s(300) * NS_PER_S)
    assert found.low_ns < true_s(6000) * NS_PER_S < found.high_ns


def test_no_token_is_free() -> None:
    """Short prompts that take equally long do not show that long ones do."""
    rates = ObservedRates()
    for number in range(40):
        serve_one(rates, 50 + 10 * number, 0.1)
    assert expected_s(rates, 44_000) >= 100 * 0.1 * SLOPE_SHARE_MIN


def test_what_is_old_yields_to_what_is_new() -> None:
    """The engine has become three times as slow; long prompts have not come since."""
    rates, now_ns = ObservedRates(), 0
    for num_tokens in (100, 800, 6000):
        for _ in range(KEPT_MAX):
            serve_one(rates, num_tokens, true_s(num_tokens))
    now_ns = LIFETIME_NS + 10 * NS_PER_S
    for num_tokens in (100, 800):
        for _ in range(KEPT_MAX):
            serve_one(rates, num_tokens, 3 * true_s(num_tokens), now_ns)
    assert expected_s(rates, 6000, now_ns) == pytest.approx(3 * true_s(6000), rel=0.2)
    assert expected_s(rates, 6000, now_ns + 2 * LIFETIME_NS) > 0


# The dispatcher


@pytest.fixture
def made() -> Dispatcher:
    return two_instances(1000)


def one_by_one(made: Dispatcher, local_s: float, remote_s: float, rounds: int = 60) -> list[Reason]:
    """A short prompt and a long one in turns; the reasons of the long ones."""
    reasons = []
    for number in range(rounds):
        now_ns = 10 * number * NS_PER_S
        serve(made, 2 * number, 300, now_ns, round(true_s(300) * NS_PER_S))
        asked_ns = now_ns + 5 * NS_PER_S
        found = arrive(made, 2 * number + 1, 6000, asked_ns)
        took_s = local_s if found.decision.path is Path.LOCAL else remote_s
        end_ns = asked_ns + round(took_s * NS_PER_S)
        made.requests.prefilled(2 * number + 1, end_ns)
        made.requests.prompt_ready(2 * number + 1, end_ns)
        made.requests.begun(2 * number + 1, end_ns, is_streamed=True)
        made.requests.end(2 * number + 1, end_ns)
        reasons.append(found.decision.reason)
    return reasons


def test_an_idle_home_that_is_sooner_wins_within_some_requests(made: Dispatcher) -> None:
    """As on a laptop: 0.59 s at home, 0.79 s away, and short prompts of one length at home."""
    reasons = one_by_one(made, local_s=0.59, remote_s=0.79)
    assert reasons[TRIAL_EVERY] is Reason.TRIED_LOCAL
    learnt = (TRIALS + 1) * (TRIAL_EVERY + 1)
    # One prompt goes away again when the remote path has not been seen for five minutes.
    assert reasons[learnt:].count(Reason.FASTER_LOCAL) >= len(reasons[learnt:]) - 1


def test_a_home_that_is_later_is_tried_once(made: Dispatcher) -> None:
    reasons = one_by_one(made, local_s=1.5, remote_s=0.79)
    assert reasons.count(Reason.TRIED_LOCAL) == 1
    assert reasons.count(Reason.FASTER_LOCAL) == 0


def test_a_home_that_works_is_not_tried(made: Dispatcher) -> None:
    for number in range(2 * TRIAL_EVERY):
        now_ns = 10 * number * NS_PER_S
        serve(made, 2 * number, 300, now_ns, NS_PER_S // 10)
        serve(made, 2 * number + 1, 6000, now_ns + 5 * NS_PER_S, NS_PER_S)
        if number == TRIAL_EVERY - 2:
            arrive(made, 999, 300, now_ns + 7 * NS_PER_S)
    now_ns = 20 * TRIAL_EVERY * NS_PER_S
    assert arrive(made, 1000, 6000, now_ns).decision.reason is Reason.ABOVE_THRESHOLD


def test_a_home_that_would_take_far_longer_at_worst_is_not_tried(made: Dispatcher) -> None:
    """By the rate of its short prompts 2.6 s, against 0.2 s."""
    reasons = one_by_one(made, local_s=0.59, remote_s=0.2)
    assert set(reasons) == {Reason.ABOVE_THRESHOLD}
