"""The threshold that recent requests ask for, and how it takes over from the plan's."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.control.threshold_loop import NUM_FOR_HALF, NUM_KEPT, Balance
from prfaas.core.routing.predictions import PathWork

LENGTHS = list(range(100, 10_100, 100))


def asked(balance: Balance, num_local: float, num_remote: int, bits_per_s: float) -> int:
    found = balance.evidence(num_local, num_remote, bits_per_s)
    assert found is not None
    return found.threshold


def seen(planned: int, rounds: int = 1, *, bytes_per_token: int = 0) -> Balance:
    """Every length from 100 to 10,000 tokens once a round; remote prefill is twice as fast."""
    balance = Balance(planned)
    for length in LENGTHS * rounds:
        balance.note(PathWork(length, 2 * length, length, bytes_per_token * length))
    return balance


def test_without_requests_the_plan_decides() -> None:
    assert Balance(20_000).evidence(4, 4, 1e9) is None
    assert seen(20_000).evidence(4, 0, 1e9) is None


def test_the_plan_loses_its_weight_as_requests_come_in() -> None:
    after = [asked(seen(100_000, rounds), 4, 4, 1e12) for rounds in (1, 5, 50)]
    assert after == sorted(after, reverse=True)
    assert after[0] > 10_000
    # 2 x the tokens up to t are as many as those beyond it: t is 10,000 / sqrt(3).
    assert after[2] == pytest.approx(5_774, rel=0.1)


def test_plan_and_evidence_count_alike_after_so_many_requests() -> None:
    balance = Balance(40_000)
    for _ in range(NUM_FOR_HALF):
        balance.note(PathWork(10_000, 1, 1, 0))
    assert asked(balance, 1, 1, 1e12) == pytest.approx((40_000 * 10_000) ** 0.5, rel=0.5)


def test_a_slow_link_or_few_remote_instances_raise_it() -> None:
    free = asked(seen(5_000, 50), 4, 4, 1e12)
    assert asked(seen(5_000, 50), 4, 1, 1e12) > free
    assert asked(seen(5_000, 50, bytes_per_token=1000), 4, 4, 1e12) > free
    assert asked(seen(5_000, 50), 1, 4, 1e12) < free


def test_what_cannot_leave_is_work_of_home() -> None:
    balance = seen(5_000, 50)
    before = asked(balance, 4, 4, 1e12)
    for _ in range(200):
        balance.note(PathWork(500, 20_000, None, 0))
    assert asked(balance, 4, 4, 1e12) < before


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.integers(1, 10**11),
            st.none() | st.integers(1, 10**11),
            st.integers(0, 10**10),
        ),
        max_size=40,
    ),
    planned=st.integers(0, 10**6),
    num_local=st.integers(0, 9),
    num_remote=st.integers(0, 9),
    bits_per_s=st.floats(0, 1e12),
)
def test_it_is_a_length_between_the_plan_and_the_requests(
    rows: list[tuple[int, int, int | None, int]],
    planned: int,
    num_local: int,
    num_remote: int,
    bits_per_s: float,
) -> None:
    balance = Balance(planned)
    for row in rows:
        balance.note(PathWork(*row))
    found = balance.evidence(num_local, num_remote, bits_per_s)
    if found is None:
        assert not rows or not num_local or not num_remote or not bits_per_s
        return
    assert 1 <= found.threshold <= max([planned, 1, *(row[0] for row in rows)])


def test_a_threshold_that_moved_is_the_one_of_the_recent_requests_alone() -> None:
    draw, balance, kept = random.Random(15), Balance(5_000), deque[PathWork](maxlen=NUM_KEPT)
    for count in range(1, 3 * NUM_KEPT):
        length = draw.choice((1, 50, draw.randrange(1, 20_000)))
        remote_ns = None if draw.random() < 0.1 else draw.randrange(1, 2 * length + 1)
        kept.append(PathWork(length, 3 * length, remote_ns, 7 * length))
        balance.note(kept[-1])
        if count % 10 == 0:
            num_local, bits_per_s = draw.randrange(1, 20), 10 ** draw.uniform(6, 12)
            afresh = Balance(5_000)
            for work in kept:
                afresh.note(work)
            afresh._num_seen = balance._num_seen
            same = asked(afresh, num_local, 2, bits_per_s)
            assert asked(balance, num_local, 2, bits_per_s) == same
