"""Booked work follows what engines will compute: cached prefixes are looked up until they start."""

from __future__ import annotations

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.open_requests import LOOKUPS_MAX
from prfaas.core.routing.policies import PolicyName

from .one_each import MS, PROMPT, arrive, dispatcher

WARM = {"home": 1000, "far": 1000}


def wait_ms(made: Dispatcher, name: str, now_ms: int) -> int:
    wait_ns = made.load(name).wait_ns(name, now_ms * MS)
    assert wait_ns is not None
    return wait_ns // MS


@pytest.fixture(params=[PolicyName.LOCAL, PolicyName.REMOTE])
def made(request: pytest.FixtureRequest) -> Dispatcher:
    return dispatcher(request.param)


def test_a_request_whose_prefix_was_computed_meanwhile_takes_less_once_it_starts(
    made: Dispatcher,
) -> None:
    name, *_ = {arrive(made, number, {}).prefill for number in range(3)}
    assert wait_ms(made, name, 0) == 3 * PROMPT
    assert made.requests.prefilled(0, PROMPT * MS) == 1
    made.requests.look_up(1, WARM, PROMPT * MS)
    assert wait_ms(made, name, PROMPT) == 50 + PROMPT
    # A report of one that waits brings the lookup of the other one.
    made.report_load(name, PROMPT * MS, 1)
    assert list(made.requests.due(name, 1)) == [2]
    made.requests.look_up(2, WARM, PROMPT * MS)
    assert wait_ms(made, name, PROMPT) == 100


def test_a_request_whose_prefix_was_evicted_meanwhile_takes_longer(made: Dispatcher) -> None:
    name = arrive(made, 0, {}).prefill
    arrive(made, 1, WARM)
    made.requests.prefilled(0, PROMPT * MS)
    assert wait_ms(made, name, PROMPT) == 50
    made.requests.look_up(1, {}, PROMPT * MS)
    assert wait_ms(made, name, PROMPT) == PROMPT


def test_a_prefill_that_runs_is_not_looked_up(made: Dispatcher) -> None:
    name = arrive(made, 0, {}).prefill
    assert list(made.requests.due(name, 0)) == []
    assert list(made.requests.due(name, 5)) == []
    arrive(made, 1, {})
    # What others sent waits too, and does not make the running one wait.
    assert list(made.requests.due(name, 5)) == [1]


def test_an_end_that_was_known_before_starts_nothing(made: Dispatcher) -> None:
    arrive(made, 0, {})
    arrive(made, 1, {})
    assert made.requests.prefilled(1, MS) is None
    assert made.requests.prefilled(1, MS) is None
    assert made.requests.prefilled(0, MS) is None


def test_all_of_a_long_queue_have_their_turn(made: Dispatcher) -> None:
    name = arrive(made, 0, {}).prefill
    waiting = set(range(1, 3 * LOOKUPS_MAX + 1))
    for number in waiting:
        arrive(made, number, {})
    seen: set[int] = set()
    for turn in range(1, 4):
        due = made.requests.due(name, len(waiting))
        assert len(due) == LOOKUPS_MAX
        seen.update(due)
        for number in due:
            made.requests.look_up(number, {}, turn * MS)
    assert seen == waiting


def test_a_request_that_ended_is_not_looked_up(made: Dispatcher) -> None:
    name = arrive(made, 0, {}).prefill
    made.requests.end(0, MS)
    made.requests.look_up(0, WARM, MS)
    assert wait_ms(made, name, 1) == 0


def test_predictions_learn_nothing_from_a_request_whose_work_changed(made: Dispatcher) -> None:
    arrive(made, 0, {})
    arrive(made, 1, {})
    made.requests.prefilled(0, PROMPT * MS)
    made.requests.look_up(1, WARM, PROMPT * MS)
    made.requests.prompt_ready(1, (PROMPT + 50) * MS)
    assert all(found.factor == 1 for found in made.calibrations.values())
