"""Slots go to the tenant that runs least for its weight; a few are kept for newcomers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.admission.fair_slots import PENDING_MIN, WINDOW_TOKENS, FairSlots, widest


def asked(slots: FairSlots, *requests: tuple[int, str, int]) -> None:
    for request in requests:
        slots.ask(*request)


def test_a_tenant_that_is_alone_gets_all_slots_but_a_sixteenth() -> None:
    slots = FairSlots({})
    asked(slots, *((number, "red", 1) for number in range(200)))
    assert len(slots.start(128)) == 120
    for few in range(1, 8):
        slots = FairSlots({})
        asked(slots, *((number, "red", 1) for number in range(200)))
        assert len(slots.start(few)) == few


def test_a_newcomer_starts_at_once_and_then_slots_that_fall_free_are_its_own() -> None:
    slots = FairSlots({})
    asked(slots, *((number, "red", 1) for number in range(300)))
    slots.start(128)
    asked(slots, *((1000 + number, "blue", 1) for number in range(100)))
    assert slots.start(128) == [1000 + number for number in range(8)]
    for number in range(8):
        slots.leave(number)
        assert slots.start(128) == []
    for number in range(30):
        slots.leave(8 + number)
        assert slots.start(128) == [1008 + number]
    assert slots.num_running == 120


def test_the_reserve_comes_back_before_anybody_else_starts() -> None:
    """A newcomer whose answer is long does not leave the next one without a slot."""
    slots = FairSlots({})
    asked(slots, *((number, "red", 1) for number in range(300)))
    slots.start(128)
    asked(slots, *((1000 + number, "blue", 1) for number in range(8)))
    assert len(slots.start(128)) == 8
    slots.ask(2000, "green", 1)
    assert slots.start(128) == []
    slots.leave(0)
    assert slots.start(128) == [2000]


def test_a_wide_request_that_waits_keeps_no_newcomer_waiting() -> None:
    slots = FairSlots({})
    asked(slots, (0, "red", 100), (1, "blue", 50), (2, "green", 1))
    assert slots.start(128) == [0, 2]
    # What is in the reserve is not in the way of who is next.
    slots.leave(0)
    assert slots.start(128) == [1]


def test_weights_divide_what_falls_free() -> None:
    slots = FairSlots({"red": 3.0, "blue": 1.0})
    asked(slots, *((number, "red", 1) for number in range(100)))
    asked(slots, *((number + 100, "blue", 1) for number in range(100)))
    started = slots.start(42)
    assert sum(number < 100 for number in started) == 30
    assert len(started) == 40


def test_a_wide_request_is_not_overtaken_for_ever() -> None:
    slots = FairSlots({})
    asked(slots, (0, "red", 10), (1, "blue", 70))
    assert slots.start(80) == [0]
    asked(slots, (2, "green", 6), (3, "red", 5))
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
            assert len(widths) < 2 or sum(widths) <= widest(num_slots)
        if leaves and running:
            slots.leave(running.pop(0))
    running += slots.start(num_slots)
    while running:
        slots.leave(running.pop())
        running += slots.start(num_slots)
    assert slots.num_waiting == slots.num_running == 0


# Prefill

LONG = 30_000


def long_ones(slots: FairSlots, first: int, count: int, tenant: str, lane: int = 0) -> None:
    for number in range(first, first + count):
        slots.ask(number, tenant, 1, work=LONG, lane=lane)


def test_an_engine_gets_one_long_prompt_at_a_time() -> None:
    slots = FairSlots({})
    long_ones(slots, 0, 38, "red")
    assert slots.start(240, (1, 1)) == [0]
    slots.ask(100, "blue", 1, work=5)
    assert slots.start(240, (1, 1)) == [100]
    slots.ask(101, "blue", 1, work=5)
    assert slots.start(240, (1, 1)) == [], "its second one waits until its first has begun"
    slots.prefilled(100)
    assert slots.start(240, (1, 1)) == [101]
    slots.prefilled(0)
    assert slots.start(240, (1, 1)) == [1]


def test_every_engine_gets_a_long_prompt_and_a_few_short_ones() -> None:
    slots = FairSlots({})
    long_ones(slots, 0, 38, "red")
    assert len(slots.start(240, (3, 1))) == 3
    slots = FairSlots({})
    for number in range(38):
        slots.ask(number, "red", 1, work=40)
    assert len(slots.start(240, (3, 1))) == 3 * WINDOW_TOKENS // PENDING_MIN


def test_the_lanes_of_prefill_do_not_hold_each_other() -> None:
    slots = FairSlots({})
    long_ones(slots, 0, 5, "red", lane=1)
    long_ones(slots, 5, 5, "red", lane=0)
    assert slots.start(240, (1, 2)) == [0, 1, 5]


def test_work_divides_prefill_by_weight() -> None:
    """Blue's prompts are a tenth as long: it gets ten of them for one of red's."""
    slots = FairSlots({})
    long_ones(slots, 0, 40, "red")
    for number in range(100, 400):
        slots.ask(number, "blue", 1, work=LONG // 10)
    had = {"red": 0, "blue": 0}
    for _ in range(200):
        for number in slots.start(240, (1, 1)):
            had["red" if number < 100 else "blue"] += LONG if number < 100 else LONG // 10
        for number in slots.pending:
            slots.leave(number)
    assert 0.7 <= had["blue"] / had["red"] <= 1.4


def test_a_prefill_that_is_known_better_is_counted_so() -> None:
    slots = FairSlots({})
    long_ones(slots, 0, 3, "red")
    assert slots.start(240, (1, 1)) == [0]
    slots.planned(0, 100, 0)
    assert slots.start(240, (1, 1)) == [1], "its prefix was cached"
    slots.planned(1, LONG, 1)
    assert slots.start(240, (1, 1)) == [2], "it is prefilled elsewhere"
    for number in range(3):
        slots.leave(number)
    assert not slots.pending
    assert slots._pending_tokens == [0, 0]
