"""The restart policy of a part: a state machine, without processes or a clock."""

import ast
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cli.host.processes import how_it_ended
from prfaas.cli.supervision import restarts as module
from prfaas.cli.supervision.restarts import (
    FIRST_DELAY_NS,
    MISSES_MAX,
    STABLE_NS,
    Instruction,
    Phase,
    RestartPolicy,
    Restarts,
)
from prfaas.units import NS_PER_S

POLICY = RestartPolicy(is_enabled=True, start_timeout_ns=20 * NS_PER_S, restarts_max=3)


def ready(policy: RestartPolicy = POLICY, chance: float = 0.0) -> Restarts:
    """A part that is ready at time 0."""
    part = Restarts(policy, lambda: chance, 0)
    assert part.tick(0) is Instruction.START
    part.started(0)
    part.probed(0, answers=True)
    assert part.phase is Phase.READY
    return part


def test_a_part_that_ends_is_started_after_a_wait_that_doubles() -> None:
    part, now = ready(), 0
    for number in range(POLICY.restarts_max):
        part.ended(now, "ended with code 1")
        assert part.phase is Phase.WAITING
        due = part.due_at_ns
        assert due is not None
        assert due - now == FIRST_DELAY_NS * 2**number / 2
        assert part.tick(due - 1) is None
        assert part.tick(due) is Instruction.START
        part.started(due)
        now = due
    part.ended(now, "ended with code 98")
    assert part.phase is Phase.FAILED
    assert part.reason == "ended with code 98"
    assert part.tick(now + 10**18) is None


def test_a_part_that_was_ready_for_long_starts_the_count_anew() -> None:
    part = ready()
    for _ in range(3 * POLICY.restarts_max):
        now = part.since_ns
        # Not to answer for a moment does not make it new.
        for _ in range(MISSES_MAX):
            part.probed(now + STABLE_NS - 1, answers=False)
        assert part.phase is Phase.UNHEALTHY
        part.ended(now + STABLE_NS, "ended with code 1")
        assert (part.phase, part.failures) == (Phase.WAITING, 1)
        due = part.due_at_ns or 0
        assert part.tick(due) is Instruction.START
        part.started(due)
        part.probed(due, answers=True)


def test_a_part_that_hangs_while_starting_is_ended_and_tried_again() -> None:
    part = Restarts(POLICY, lambda: 0.0, 0)
    part.tick(0)
    part.started(0)
    part.probed(1, answers=False)
    assert part.tick(POLICY.start_timeout_ns - 1) is None
    assert part.tick(POLICY.start_timeout_ns) is Instruction.END
    assert part.tick(POLICY.start_timeout_ns + 1) is None
    part.ended(POLICY.start_timeout_ns + 2, "ended with code -15")
    assert (part.phase, part.reason) == (Phase.WAITING, "was not ready within 20 s")


def test_a_part_that_does_not_answer_is_unhealthy_and_left_running() -> None:
    part = ready()
    phases = []
    for answers in [*[False] * (MISSES_MAX - 1), True, *[False] * MISSES_MAX, True]:
        part.probed(1, answers=answers)
        phases.append(part.phase)
        assert part.tick(10**18) is None
    *before, unhealthy, last = phases
    assert set(before) == {Phase.READY}
    assert (unhealthy, last) == (Phase.UNHEALTHY, Phase.READY)


def test_without_restarts_a_part_stays_down_until_it_is_asked_for() -> None:
    part = ready(RestartPolicy(is_enabled=False, start_timeout_ns=NS_PER_S))
    part.ended(5, "ended with code 7")
    assert (part.phase, part.due_at_ns) == (Phase.FAILED, None)
    assert part.asked(6) is None
    assert part.tick(6) is Instruction.START


def test_an_operator_starts_a_part_anew_whatever_it_does() -> None:
    part = ready()
    assert part.asked(1) is Instruction.END
    part.ended(2, "ended with code 0")
    assert (part.phase, part.failures) == (Phase.WAITING, 0)
    assert part.tick(2) is Instruction.START
    part.started(2)
    assert part.tick(2 + POLICY.start_timeout_ns) is Instruction.END
    assert part.asked(3 + POLICY.start_timeout_ns) is None
    part.ended(4 + POLICY.start_timeout_ns, "ended with code -9")
    assert part.tick(4 + POLICY.start_timeout_ns) is Instruction.START


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["tick", "started", "answers", "misses", "ended", "asked", "start_failed"]),
        st.integers(0, 200 * NS_PER_S),
    ),
    max_size=60,
)


@given(EVENTS, st.booleans(), st.integers(0, 5), st.integers(0, 2**32))
def test_a_start_is_asked_for_only_while_nothing_runs(
    events: list[tuple[str, int]], is_enabled: bool, restarts_max: int, seed: int
) -> None:
    policy = RestartPolicy(is_enabled, 20 * NS_PER_S, restarts_max)
    part, now, runs = Restarts(policy, random.Random(seed).random, 0), 0, False
    for event, later in events:
        now += later
        instruction = None
        match event:
            case "tick":
                instruction = part.tick(now)
            case "asked":
                instruction = part.asked(now)
            case "start_failed" if runs:
                instruction = part.start_failed(now, "did not answer")
            case "answers" | "misses" if runs:
                part.probed(now, answers=event == "answers")
            case "ended" if runs:
                part.ended(now, "ended")
                runs = False
        if instruction is Instruction.START:
            assert not runs
            part.started(now)
            runs = True
        elif instruction is Instruction.END:
            assert runs
        assert runs == (part.phase not in (Phase.WAITING, Phase.FAILED))
        assert part.failures <= restarts_max + 1
        # Whoever waits has a time to wait for; nothing is forgotten.
        assert (part.due_at_ns is not None) or part.phase not in (Phase.WAITING, Phase.STARTING)


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True), st.integers(10**6, 10**12))
def test_a_wait_is_bounded_and_left_to_chance_by_half(
    failures: int, chance: float, delay_max: int
) -> None:
    policy = RestartPolicy(True, NS_PER_S, delay_max_ns=delay_max)
    shortest, longest = policy.delay_ns(failures, 0.0), policy.delay_ns(failures, 1.0)
    assert shortest <= policy.delay_ns(failures, chance) <= longest <= delay_max
    assert longest == pytest.approx(2 * shortest, abs=2)


def test_the_policy_has_no_clock_no_processes_and_no_randomness() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert imported == {"__future__", "collections.abc", "dataclasses", "enum", "prfaas.units"}


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (1, "ended with code 1: RuntimeError: out of blocks"),
        (-9, "was ended by SIGKILL; by somebody, or by the kernel for want of memory (dmesg)"),
        (-11, "was ended by SIGSEGV"),
        (-99, "was ended by signal 99"),
    ],
)
def test_a_signal_is_the_reason_and_no_line_of_the_log(exit_code: int, expected: str) -> None:
    assert how_it_ended(exit_code, "RuntimeError: out of blocks") == expected
