"""Steps of a scheduler that has nothing to run: they pause, and look up nothing twice."""

import pytest

from prfaas.engines.empty_steps import EmptySteps


class Tier:
    """A pool node that says something when told to."""

    def __init__(self) -> None:
        self.is_silent = True
        self.pauses = 0

    def must_wait(self, request: str) -> bool:
        return self.is_silent

    def wait(self, limit_s: float) -> None:
        self.pauses += 1


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def steps(tier: Tier) -> EmptySteps:
    return EmptySteps(tier.must_wait, tier.wait)


def test_a_step_pauses_only_while_no_request_runs(steps: EmptySteps, tier: Tier) -> None:
    steps.scheduled(["one", "two"], [])
    steps.pause()
    steps.scheduled([], ["one"])
    steps.pause()
    assert tier.pauses == 0
    steps.scheduled([], ["two"])
    steps.pause()
    assert tier.pauses == 1


def test_blocks_on_their_way_are_looked_up_once(steps: EmptySteps, tier: Tier) -> None:
    assert not steps.is_waiting("one", 0)
    steps.looked_up("one", 0, decided=False)
    assert steps.is_waiting("one", 0)
    assert steps.is_waiting("one", 0)
    tier.is_silent = False
    assert not steps.is_waiting("one", 0)


def test_a_longer_prefix_in_the_engine_is_looked_up_anew(steps: EmptySteps) -> None:
    steps.looked_up("one", 0, decided=False)
    assert not steps.is_waiting("one", 384)


def test_what_is_decided_or_gone_is_looked_up_anew(steps: EmptySteps) -> None:
    for request in ("decided", "preempted"):
        steps.looked_up(request, 0, decided=False)
    steps.looked_up("decided", 0, decided=True)
    steps.scheduled([], ["preempted"])
    assert not steps.is_waiting("decided", 0)
    assert not steps.is_waiting("preempted", 0)
