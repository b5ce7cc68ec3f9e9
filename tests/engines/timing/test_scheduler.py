"""Steps take as long as the profile says, and nobody is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engines.timing.profile import InstanceProfile, load_profile
from prfaas.engines.timing.scheduler import Scheduler, Sequence

from .worlds import MODEL, SPAN, write_plan


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> InstanceProfile:
    plan = write_plan(tmp_path_factory.mktemp("plan"))
    return load_profile(plan, None, MODEL, block_tokens=SPAN, bytes_scale=1.0)


def run(scheduler: Scheduler) -> list[tuple[int, list[Sequence]]]:
    """Let everything finish; the end of every step, and who got a token."""
    now, seen = 0, []
    while (step := scheduler.begin_step()) is not None:
        now += step.duration_ns
        seen.append((now, scheduler.end_step(step)))
    return seen


def test_a_prefill_takes_as_long_as_its_new_tokens(profile: InstanceProfile) -> None:
    for prompt, hit in ((1, 0), (SPAN, 0), (100, 0), (300, 0), (300, 64), (300, 128)):
        scheduler = Scheduler(profile)
        scheduler.add(Sequence(prompt, 1, hit_tokens=hit))
        steps = run(scheduler)
        assert steps[-1][0] == profile.costs.local_prefill_ns(prompt - hit, hit)
        assert [len(got) for _, got in steps] == [0] * (len(steps) - 1) + [1]


def test_chunks_end_where_blocks_end(profile: InstanceProfile) -> None:
    scheduler, ends = Scheduler(profile), []
    scheduler.add(Sequence(300, 1, hit_tokens=32))
    while (step := scheduler.begin_step()) is not None:
        ends.append(step.end_token)
        scheduler.end_step(step)
    assert ends == [96, 160, 224, 288, 300]


def test_a_batch_decodes_at_its_own_pace(profile: InstanceProfile) -> None:
    scheduler = Scheduler(profile)
    first = Sequence(64, 5, hit_tokens=48)
    scheduler.add(first)
    assert run(scheduler)[-1][0] == 5 * profile.step_ns(1, 66)
    for _ in range(4):
        scheduler.add(Sequence(64, 5, hit_tokens=48))
    steps = run(scheduler)
    assert steps[-1][0] == 5 * profile.step_ns(4, 66)
    assert all(len(got) == 4 for _, got in steps)


def test_a_prefill_slows_the_batch_down_and_the_other_way_round(profile: InstanceProfile) -> None:
    scheduler = Scheduler(profile)
    scheduler.add(Sequence(64, 50, hit_tokens=48))
    scheduler.add(Sequence(64, 1))
    step = scheduler.begin_step()
    assert step is not None
    assert step.end_token == 48
    assert step.duration_ns == profile.costs.local_prefill_ns(48) + profile.step_ns(1, 64)


def test_a_full_batch_makes_others_wait(profile: InstanceProfile) -> None:
    scheduler = Scheduler(profile)
    sequences = [Sequence(64, 3, hit_tokens=48) for _ in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.begin_step()
    assert (scheduler.num_running, scheduler.num_waiting) == (profile.batch_max, 2)
    assert run(scheduler)[-1][1] == sequences[4:]


def test_kv_memory_is_a_limit_and_comes_back(profile: InstanceProfile) -> None:
    room = profile.costs.kv_bytes(64 + 3) * 2
    scheduler = Scheduler(replace(profile, kv_capacity_bytes=room))
    for _ in range(3):
        scheduler.add(Sequence(64, 3, hit_tokens=48))
    scheduler.begin_step()
    assert (scheduler.num_running, scheduler.kv_used_bytes) == (2, room)
    run(scheduler)
    assert scheduler.kv_used_bytes == 0


def test_more_cached_by_the_time_it_starts_is_not_computed(profile: InstanceProfile) -> None:
    def refresh(sequence: Sequence) -> None:
        sequence.hit_tokens = 128

    scheduler = Scheduler(profile, refresh)
    scheduler.add(Sequence(300, 1))
    assert run(scheduler)[-1][0] == profile.costs.local_prefill_ns(300 - 128)


@given(
    asked=st.lists(
        st.tuples(st.integers(1, 200), st.integers(1, 6), st.integers(1, 3), st.integers(0, 12)),
        max_size=12,
    ),
    leave=st.sets(st.integers(0, 11)),
)
def test_everybody_gets_all_tokens_or_leaves(
    profile: InstanceProfile, asked: list[tuple[int, int, int, int]], leave: set[int]
) -> None:
    scheduler = Scheduler(replace(profile, kv_capacity_bytes=profile.costs.kv_bytes(300)))
    sequences = [
        Sequence(prompt, output, width, hit_tokens=min(blocks * SPAN, (prompt - 1) // SPAN * SPAN))
        for prompt, output, width, blocks in asked
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    for number in sorted(leave):
        step = scheduler.begin_step()
        if number < len(sequences):
            scheduler.remove(sequences[number])
        if step is not None:
            gone = [sequences[n] for n in leave if n <= number and n < len(sequences)]
            assert not set(gone) & set(scheduler.end_step(step))
    run(scheduler)
    for number, sequence in enumerate(sequences):
        assert sequence.is_done or number in leave
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_used_bytes) == (0, 0, 0)
