"""A bound on uncounted tokens: the rate of the fastest recent answers."""

from __future__ import annotations

from prfaas.core.admission.quotas import OutputRate, TokenBucket
from prfaas.units import NS_PER_S


def most(rate: OutputRate, num_sequences: int, duration_ns: int) -> int:
    found = rate.most(num_sequences, duration_ns)
    assert found is not None
    return found


def test_without_an_observation_no_speed_is_known() -> None:
    rate = OutputRate()
    assert rate.most(128, NS_PER_S) is None
    assert rate.since(128, NS_PER_S) == 0


def test_sequences_are_made_side_by_side() -> None:
    rate = OutputRate()
    rate.observe(800, 8, 2 * NS_PER_S)  # 50 a second each
    assert most(rate, 128, 2 * NS_PER_S) == 128 * 100
    assert rate.since(2, 3 * NS_PER_S) == 300


def test_the_fastest_counts_and_fades() -> None:
    rate = OutputRate()
    rate.observe(100, 1, NS_PER_S)
    rate.observe(10, 1, NS_PER_S)
    assert 97 <= most(rate, 1, NS_PER_S) <= 100
    for _ in range(500):
        rate.observe(10, 1, NS_PER_S)
    assert most(rate, 1, NS_PER_S) <= 12
    rate.observe(7, 1, 1)
    rate.observe(100, 1, 0)
    assert most(rate, 1, NS_PER_S) <= 12


def test_an_answer_that_came_all_at_once_doubles_the_speed_at_most() -> None:
    rate = OutputRate()
    rate.observe(50, 1, NS_PER_S)
    rate.observe(16, 1, 100_000)
    assert most(rate, 1, NS_PER_S) == 100
    for _ in range(4):
        rate.observe(800, 1, NS_PER_S)
    assert most(rate, 1, NS_PER_S) == 800


def test_a_bucket_takes_back_no_more_than_it_holds() -> None:
    bucket = TokenBucket(10, NS_PER_S)
    bucket.take(25, 0)
    assert bucket.left(0) == 0
    bucket.take(-5, 0)
    assert bucket.wait_ns(0) > 0
    bucket.take(-100, 0)
    assert bucket.left(0) == 10
