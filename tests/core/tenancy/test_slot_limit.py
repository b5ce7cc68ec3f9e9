"""The sequences that an engine runs at once, learnt from what waits in it."""

from __future__ import annotations

from prfaas.core.admission.concurrency_slots import NUM_STABLE, SlotLimit


def waits(limit: SlotLimit, num_running: int, times: int = NUM_STABLE + 1) -> None:
    for _ in range(times):
        limit.report(num_running, num_waiting=4, num_expected=0)


def test_what_waits_in_a_full_engine_shows_its_limit() -> None:
    limit = SlotLimit(256)
    waits(limit, 20, NUM_STABLE)
    assert limit.now == 256
    waits(limit, 19, 1)
    assert limit.now == 20, "the most that ran"


def test_an_engine_that_fills_up_is_not_full() -> None:
    limit = SlotLimit(256)
    for num_running in range(1, 60):
        waits(limit, num_running, 2)
        assert limit.now == 256
    limit.report(num_running=60, num_waiting=0, num_expected=0)
    waits(limit, 10, NUM_STABLE)
    assert limit.now == 256


def test_what_waits_for_blocks_or_prefill_shows_nothing() -> None:
    limit = SlotLimit(256)
    for _ in range(9):
        limit.report(num_running=20, num_waiting=4, num_expected=4)
        limit.report(num_running=0, num_waiting=4, num_expected=0)
    assert limit.now == 256


def test_it_rises_again_while_a_full_engine_lets_nothing_wait() -> None:
    limit = SlotLimit(40)
    waits(limit, 8)
    limit.report(num_running=5, num_waiting=0, num_expected=0)
    assert limit.now == 8, "it is not full"
    seen = []
    for _ in range(30):
        limit.report(num_running=limit.now, num_waiting=0, num_expected=0)
        seen.append(limit.now)
    assert seen[:2] == [9, 10]
    assert limit.now == limit.most == 40
