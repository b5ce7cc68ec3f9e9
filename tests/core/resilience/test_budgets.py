"""Budgets: a share of the requests and a floor, whatever is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.resilience.budgets import Budget, BudgetSettings
from prfaas.units import NS_PER_S

SETTINGS = BudgetSettings(ratio=0.2, per_s=1.0, reserve=10.0)
PATIENT = BudgetSettings(ratio=0.2, per_s=2.0, reserve=3.0, wait_max_ns=NS_PER_S)


def take(budget: Budget, now_ns: int, times: int) -> list[int | None]:
    return [budget.take(now_ns) for _ in range(times)]


def test_the_reserve_covers_a_burst_and_no_more() -> None:
    assert take(Budget(SETTINGS), 0, 12) == [0] * 10 + [None] * 2


def test_requests_and_time_fill_it() -> None:
    budget = Budget(SETTINGS)
    take(budget, 0, 10)
    for _ in range(10):
        budget.deposit(0)
    assert take(budget, 0, 3) == [0, 0, None]
    assert take(budget, 3 * NS_PER_S, 4) == [0, 0, 0, None]


def test_a_crowd_comes_spread_out() -> None:
    waits = take(Budget(PATIENT), 0, 6)
    assert waits == [0, 0, 0, NS_PER_S // 2, NS_PER_S, None]


def test_a_budget_that_nothing_fills_gives_nothing() -> None:
    assert take(Budget(BudgetSettings(ratio=0, per_s=0, reserve=0)), 0, 1) == [None]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, NS_PER_S)), max_size=300))
def test_never_more_than_the_share_the_floor_and_the_reserve(
    steps: list[tuple[bool, int]],
) -> None:
    budget, now, num_requests, num_taken = Budget(SETTINGS), 0, 0, 0
    for is_request, wait_ns in steps:
        now += wait_ns
        if is_request:
            budget.deposit(now)
            num_requests += 1
        elif budget.take(now) is not None:
            num_taken += 1
    most = SETTINGS.reserve + SETTINGS.ratio * num_requests + SETTINGS.per_s * now / NS_PER_S
    assert num_taken <= most + 1e-6
