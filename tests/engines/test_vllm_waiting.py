"""Idle vLLM processes; needs vLLM to import, not to run."""

import importlib
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.engines.empty_steps import EmptySteps

pytestmark = pytest.mark.timeout(180)


def needing_vllm(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed here")
        return importlib.import_module(name)


@pytest.fixture
def connector() -> Any:
    """A connector whose vLLM half has nothing to copy, and which counts its pauses."""
    made = object.__new__(needing_vllm("prfaas.engines.vllm_connector").PrfaasConnector)
    made.pauses = []
    made.lookups = []

    def look_up(request: Any, num_computed_tokens: int, **_: Any) -> tuple[int | None, bool]:
        made.lookups.append(request.request_id)
        return None, False

    made.connector_scheduler = SimpleNamespace(
        _jobs={},
        build_connector_meta=lambda _: SimpleNamespace(jobs_to_flush=set()),
        get_num_new_matched_tokens=look_up,
    )
    made._bounding_group_ids = ()
    made._may_pause, made._unchecked = True, ()
    made._steps = EmptySteps(lambda _: True, made.pauses.append)
    return made


def step(scheduled: dict[str, int], finished: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=finished,
        preempted_req_ids=None,
    )


def test_a_step_that_runs_nothing_pauses_for_ten_milliseconds_at_most(connector: Any) -> None:
    connector.build_connector_meta(step({}))
    assert connector.pauses == [0.01]


def test_a_pause_never_holds_up_a_request_that_runs(connector: Any) -> None:
    connector.build_connector_meta(step({"one": 1}))
    # Its result may still be computed; with asynchronous scheduling it is.
    connector.build_connector_meta(step({}))
    assert connector.pauses == []
    connector.build_connector_meta(step({}, {"one"}))
    assert len(connector.pauses) == 1


def test_a_pause_never_holds_up_copies_of_the_device(connector: Any) -> None:
    connector.connector_scheduler._jobs[7] = "a store"
    connector.build_connector_meta(step({}))
    assert connector.pauses == []


def test_ranks_of_data_parallelism_do_not_pause(connector: Any) -> None:
    connector._may_pause = False
    connector.build_connector_meta(step({}))
    assert connector.pauses == []


def test_steps_look_blocks_up_once_while_they_are_on_their_way(connector: Any) -> None:
    request = SimpleNamespace(request_id="one")
    for _ in range(100):
        assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert connector.lookups == ["one"]


@pytest.fixture
def spins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A reader of a message queue, what it yields and how long it sleeps."""
    cpu = needing_vllm("prfaas.engines.vllm_cpu")
    broadcast = needing_vllm("vllm.distributed.device_communicators.shm_broadcast")
    monkeypatch.setattr(broadcast.SpinCondition, "wait", broadcast.SpinCondition.wait)
    cpu.sleep_when_idle()
    seen = SimpleNamespace(yields=0, sleeps=[])

    def poll(timeout: int | None) -> dict[Any, Any]:
        seen.sleeps.append(timeout)
        return {}

    def sched_yield() -> None:
        seen.yields += 1

    monkeypatch.setattr(broadcast, "sched_yield", sched_yield)
    reader = object.__new__(broadcast.SpinCondition)
    reader.is_reader, reader.busy_loop_s = True, 1.0
    reader.poller = SimpleNamespace(poll=poll)
    reader.read_cancel_socket = reader.local_notify_socket = None
    seen.reader = reader
    return seen


def test_a_cpu_worker_sleeps_between_steps(spins: Any) -> None:
    spins.reader.last_read = time.monotonic() - 0.1
    spins.reader.wait(5000)
    assert spins.yields == 0
    assert len(spins.sleeps) == 1


@pytest.mark.parametrize("idle_s", [0.01, 1.0, 8.0])
def test_a_lost_notification_costs_a_quarter_of_the_time_since_the_last(
    spins: Any, idle_s: float
) -> None:
    before = time.monotonic()
    spins.reader.last_read = before - idle_s
    spins.reader.wait(None)
    [sleep_ms] = spins.sleeps
    passed_ms = (time.monotonic() - before + idle_s) * 1000
    assert idle_s * 250 - 1 <= sleep_ms <= passed_ms / 4


def test_a_cpu_worker_keeps_to_a_shorter_limit(spins: Any) -> None:
    spins.reader.last_read = 0.0
    spins.reader.wait(3)
    assert spins.sleeps == [3]


def test_a_cpu_worker_does_not_poll_between_steps_that_wait_for_blocks(spins: Any) -> None:
    """They are ten milliseconds apart: two of polling in each are a fifth of a core."""
    reader = spins.reader
    reader.last_read = time.monotonic() - 0.010
    reader.wait(0)
    reader.last_read = time.monotonic()
    reader.wait(5000)
    assert (spins.yields, len(spins.sleeps)) == (0, 2)


def test_a_cpu_worker_polls_while_steps_follow_each_other(spins: Any) -> None:
    """Being woken costs a decode step of five milliseconds a third of its time."""
    reader, now = spins.reader, time.monotonic()
    for at in (now - 0.020, now - 0.015):
        reader.last_read = at
        reader.wait(0)
    assert spins.yields == 0
    reader.last_read = reader.read_before[1] + 0.005
    reader.wait(5000)
    reader.last_read = time.monotonic()
    reader.wait(5000)
    num_sleeps = len(spins.sleeps)
    reader.last_read += 0.005
    reader.wait(5000)
    assert reader.busy_loop_s == pytest.approx(0.010)
    assert (spins.yields > 0, len(spins.sleeps)) == (True, num_sleeps)
    reader.last_read += 0.010
    reader.wait(5000)
    assert reader.busy_loop_s == 0.0
