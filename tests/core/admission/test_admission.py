"""Admission stays below the target by as much as requests come later than predicted."""

from __future__ import annotations

import random

from prfaas.core.admission.deadline_admission import AdmissionControl, Margin
from prfaas.core.admission.fair_slots import FairSettings
from prfaas.core.routing.decision import Decision, Path, Reason
from prfaas.units import NS_PER_S

TARGET_NS = 10 * NS_PER_S


def decision(predicted_s: float) -> Decision:
    predicted_ns = round(predicted_s * NS_PER_S)
    return Decision(Path.LOCAL, Reason.BELOW_THRESHOLD, 1, 1, predicted_ns, predicted_ns)


def test_requests_that_come_as_predicted_leave_the_whole_target() -> None:
    margin = Margin(TARGET_NS)
    for _ in range(1000):
        margin.seen(0)
    assert margin.margin_ns <= TARGET_NS // 100


def test_nine_of_ten_requests_come_within_the_margin() -> None:
    margin, draw = Margin(TARGET_NS), random.Random(1)
    late = [draw.uniform(-2, 2) * NS_PER_S for _ in range(5000)]
    within = 0
    for each in late:
        within += each <= margin.margin_ns
        margin.seen(round(each))
    assert 0.85 < within / len(late) < 0.95


def test_the_margin_is_at_most_three_tenths_of_the_target() -> None:
    margin = Margin(TARGET_NS)
    for _ in range(1000):
        margin.seen(60 * NS_PER_S)
    assert margin.margin_ns == 3 * NS_PER_S


def test_what_would_fill_the_target_is_refused_while_predictions_are_missed() -> None:
    control = AdmissionControl(TARGET_NS, FairSettings())
    assert control.decide("", Path.LOCAL, 9 * NS_PER_S, 0, 0).admitted
    for _ in range(100):
        control.seen(decision(5), 8 * NS_PER_S)
    found = control.decide("", Path.LOCAL, 9 * NS_PER_S, 0, 0)
    assert not found.admitted
    assert found.retry_after_s >= 1
    assert control.decide("", Path.LOCAL, 6 * NS_PER_S, 0, 0).admitted


def test_the_other_path_has_a_margin_of_its_own() -> None:
    control = AdmissionControl(TARGET_NS, FairSettings())
    for _ in range(100):
        control.seen(decision(5), 8 * NS_PER_S)
    assert control.decide("", Path.REMOTE, 9 * NS_PER_S, 0, 0).admitted


def test_without_a_target_everything_is_admitted() -> None:
    control = AdmissionControl(None, FairSettings())
    control.seen(decision(5), 80 * NS_PER_S)
    assert control.decide("", Path.LOCAL, 900 * NS_PER_S, 0, 0).admitted
