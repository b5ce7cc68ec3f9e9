"""Answers that an instance goes on with after their prompts, until the blocks have come."""

from __future__ import annotations

from prfaas.core.dispatch.open_requests import RELAYS_MAX
from prfaas.core.routing.policies import PolicyName

from .one_each import MS, PROMPT, arrive, dispatcher


def test_an_instance_relays_if_it_has_nothing_to_prefill() -> None:
    made = dispatcher(PolicyName.REMOTE)
    requests = made.requests
    for number in (1, 2):
        arrive(made, number, {})
    assert not requests.begin_relay(1, 0), "its prompt is not computed yet"
    requests.prefilled(1, PROMPT * MS)
    assert not requests.begin_relay(1, PROMPT * MS), "the second prompt would be delayed"
    requests.prefilled(2, 2 * PROMPT * MS)
    assert requests.begin_relay(1, 2 * PROMPT * MS)
    assert requests.instances.relays == {1: "r"}
    made.validate()


def test_relays_have_a_limit_and_end_with_their_requests() -> None:
    made = dispatcher(PolicyName.REMOTE)
    requests = made.requests
    numbers = range(RELAYS_MAX + 1)
    for number in numbers:
        arrive(made, number, {})
    for number in numbers:
        requests.prefilled(number, (number + 1) * PROMPT * MS)
    now_ns = (RELAYS_MAX + 1) * PROMPT * MS
    assert [requests.begin_relay(n, now_ns) for n in numbers] == [True] * RELAYS_MAX + [False]
    requests.fall_back(0, now_ns)
    assert len(requests.instances.relays) == RELAYS_MAX - 1
    for number in numbers:
        requests.end(number, now_ns)
    assert not requests.instances.relays
    made.validate()
