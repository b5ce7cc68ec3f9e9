"""Python instructions of a gateway's decision: a count, since times depend on the machine.

`benchmarks/gateway/decide.py` measures times.
"""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.gateway.decide import LAYOUT, chain, make, report
from prfaas.core.dispatch.types import Arrival
from prfaas.units import NS_PER_S
from tests.instructions import counted

BLOCKS, ROUNDS = 64, 40


@pytest.mark.parametrize("num_engines", [200, 1250])
def test_a_decision_takes_no_more_instructions_than_it_did(num_engines: int) -> None:
    driver, num_families = make(LAYOUT, num_engines, 20_000, BLOCKS, 0)
    now_ns, steps, length = report(driver), list[int](), BLOCKS * LAYOUT.tokens_per_hash + 1
    for number in range(ROUNDS):
        hashes = chain(number % (2 * num_families), BLOCKS, 0)
        arrival = Arrival(
            number, length, length, shippable_tokens=length - 1, layout=LAYOUT, hashes=hashes
        )
        at_ns = now_ns + number * NS_PER_S // 1000
        steps.append(counted(partial(driver.route, arrival, at_ns))[1])
    found = sum(steps[ROUNDS // 4 :]) / len(steps[ROUNDS // 4 :])
    assert found <= 11_400, f"{found:,.0f} instructions a decision; find out what has been added"
