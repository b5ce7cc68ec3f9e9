"""Classes of service: their targets, the value of their seconds, and the order of admission."""

from __future__ import annotations

import pytest

from prfaas.core.admission.deadline_admission import LEAST_RATIO, WINDOW_NS, AdmissionControl
from prfaas.core.admission.fair_slots import FairSettings, FairSlots
from prfaas.core.market.choice import RequestTerms
from prfaas.core.market.classes import ServiceClass, terms_of
from prfaas.core.routing.decision import Path
from prfaas.units import NS_PER_S

S = NS_PER_S
GOLD = ServiceClass("gold", 2 * S, 0.5, priority=2)
BATCH = ServiceClass("batch", 100 * S, 0.0, priority=-1)


def test_a_class_gives_the_choice_its_target_and_the_value_of_a_second() -> None:
    usual = RequestTerms(0.1, 10 * S)
    assert terms_of(None, usual) == usual
    assert terms_of(GOLD, usual) == RequestTerms(0.5, 2 * S)
    assert terms_of(ServiceClass("plain"), usual) == usual
    assert terms_of(BATCH, usual) == RequestTerms(0.0, 100 * S)


@pytest.mark.parametrize("target_ns", [10 * S, None])
def test_admission_and_retry_after_go_by_the_target_of_the_class(target_ns: int | None) -> None:
    control = AdmissionControl(target_ns, FairSettings())
    asked = [
        control.decide("", Path.LOCAL, 8 * S, S, 0, service) for service in (None, GOLD, BATCH)
    ]
    assert [found.admitted for found in asked[:2]] == [True, False]
    assert asked[1].retry_after_s == 6
    assert control.decide("", Path.LOCAL, None, S, 0, GOLD).admitted, "what is not predicted"


def test_lower_classes_get_a_shorter_queue_while_a_higher_one_is_refused() -> None:
    control = AdmissionControl(10 * S, FairSettings())

    def admits(predicted_ns: int, now_ns: int, service: ServiceClass | None) -> bool:
        return control.decide("", Path.LOCAL, predicted_ns, S, now_ns, service).admitted

    assert admits(9 * S, 0, None)
    assert admits(99 * S, 0, BATCH)
    assert not admits(3 * S, 0, GOLD)
    assert not admits(9 * S, 1, None)
    assert not admits(99 * S, 1, BATCH)
    assert admits(round(10 * S * LEAST_RATIO), 1, None)
    assert admits(S, 1, GOLD)
    assert admits(9 * S, WINDOW_NS + 2, None), "the refusal is forgotten"
    assert not admits(999 * S, WINDOW_NS + 3, BATCH)
    assert admits(9 * S, WINDOW_NS + 4, None), "a lower class shortens no queue"


def test_requests_of_a_higher_class_start_first() -> None:
    slots = FairSlots({})
    for number in range(3):
        slots.ask(number, "red", 1)
    slots.ask(10, "blue", 1, priority=-1)
    slots.ask(11, "red", 1, priority=5)
    assert slots.waiting_of("red") == 4
    assert slots.start(2) == [11, 0]
    slots.leave(11)
    slots.ask(12, "blue", 1, priority=5)
    assert slots.start(2) == [12]
    for number in (0, 12):
        slots.leave(number)
    assert slots.start(2) == [1, 2]
    for number in (1, 2):
        slots.leave(number)
    assert slots.start(2) == [10]
    slots.leave(10)
    assert slots.num_running == slots.num_waiting == 0
