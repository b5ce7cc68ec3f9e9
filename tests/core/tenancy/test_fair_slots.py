"""Slots go to the tenant that runs least for its weight, and nobody takes the last ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.tenancy.fair_slots import FairSlots, share_of


def asked(slots: FairSlots, *requests: tuple[int, str, int]) -> None:
    for request in requests:
        slots.ask(*request)


def test_one_tenant_leaves_slots_to_another() -> None:
    slots = FairSlots({})
    asked(slots, *((number, "red", 1) for number in range(200)))
    assert len(slots.start(100)) == 75
    slots.ask(1000, "blue", 25)
    assert slots.start(100) == [1000]
    assert (slots.num_running, slots.num_waiting) == (100, 125)
    slots.leave(0)
    slots.ask(1001, "blue", 1)
    assert slots.start(100) == [1001]


def test_weights_divide_what_falls_free() -> None:
    slots = FairSlots({"red": 3.0, "blue": 1.0})
    asked(slots, *((number, "red", 1) for number in range(100)))
    asked(slots, *((number + 100, "blue", 1) for number in range(100)))
    started = slots.start(40)
    assert sum(number < 100 for number in started) == 30
    assert len(started) == 40


def test_a_wide_request_is_not_overtaken_for_ever() -> None:
    slots = FairSlots({})
    asked(slots, (0, "red", 10), (1, "blue", 75))
    assert slots.start(80) == [0]
    asked(slots, (2, "green", 5), (3, "red", 5))
    assert slots.start(80) == []
    slots.leave(0)
    # Of those that run nothing, who came first is next.
    assert slots.start(80) == [3, 1]


def test_what_is_wider_than_the_limit_runs_alone() -> None:
    slots = FairSlots({})
    asked(slots, (0, "red", 500), (1, "blue", 1))
    assert slots.start(10) == [0]
    slots.leave(0)
    assert slots.start(10) == [1]


def test_who_leaves_the_queue_is_gone() -> None:
    slots = FairSlots({})
    asked(slots, (0, "red", 1), (1, "red", 1), (2, "red", 1))
    assert slots.start(1) == [0]
    slots.leave(1)
    assert slots.waiting_of("red") == 1
    slots.leave(0)
    assert slots.start(1) == [2]
    slots.leave(2)
    assert (slots.num_running, slots.num_waiting, slots.waiting_of("red")) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8), st.booleans()), max_size=60),
    st.integers(8, 16),
)
def test_nobody_starves_and_nothing_is_over(
    steps: list[tuple[str, int, bool]], num_slots: int
) -> None:
    slots, running, tenants = FairSlots({"a": 2.0}), [], {}
    for number, (tenant, width, leaves) in enumerate(steps):
        tenants[number] = (tenant, width)
        slots.ask(number, tenant, width)
        running += slots.start(num_slots)
        assert slots.num_running == sum(tenants[n][1] for n in running) <= num_slots
        for name in "abc":
            widths = [tenants[n][1] for n in running if tenants[n][0] == name]
            assert len(widths) < 2 or sum(widths) <= share_of(num_slots)
        if leaves and running:
            slots.leave(running.pop(0))
    running += slots.start(num_slots)
    while running:
        slots.leave(running.pop())
        running += slots.start(num_slots)
    assert slots.num_waiting == slots.num_running == 0
