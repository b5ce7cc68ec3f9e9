"""A day whose load changes from long prompts to long answers: roles follow it, and rest."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks.reroling.day import requests
from benchmarks.reroling.live import role_changes
from benchmarks.reroling.outcome import Change, Run, Settings
from benchmarks.reroling.simulated import simulate
from benchmarks.reroling.table import is_good

SETTINGS = Settings()


def in_time(run: Run) -> float:
    return sum(is_good(o, SETTINGS) for o in run.outcomes) / len(run.outcomes)


def test_roles_follow_the_mix_there_and_back() -> None:
    changing, fixed = (
        simulate(SETTINGS, requests(SETTINGS.day_s, seed=1), reroling=on) for on in (True, False)
    )
    roles = [change.to for change in changing.changes]
    assert roles[0] == "prefill"
    assert roles.count("decode") >= 2
    turns = sum(a != b for a, b in pairwise(roles))
    assert turns <= 2, "the load turns twice"
    assert not fixed.changes
    assert in_time(changing) > 0.9 > in_time(fixed) + 0.2


def test_a_drain_that_was_given_up_is_no_change_of_roles() -> None:
    def entry(action: str, at: float, **numbers: float) -> dict[str, Any]:
        return {"action": action, "at_unix_s": at, "new": "prefill", "numbers": numbers}

    changed = [entry("drains", 6, requests_left=2), entry("changed", 7, drained_s=0.5)]
    found = role_changes([entry("drains", 1, requests_left=9), entry("kept", 5), *changed], 1.0)
    assert found == [Change(5.0, "prefill", 0.5, 2)]
