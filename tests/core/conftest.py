"""Objects with state are in order when a test of the core ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.core.admission.fair_slots import FairSlots
from prfaas.core.admission.quotas import Quota
from prfaas.core.dispatch.hosts import DestinationMemory
from prfaas.core.dispatch.instances import PrefillInstances
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.membership.machine import Membership
from prfaas.core.resilience.budgets import Budget
from prfaas.core.resilience.circuit_breaker import Breaker
from prfaas.core.resilience.quarantine import Guards, Quarantine

KINDS: tuple[type[Any], ...] = (
    *(Breaker, Budget, DestinationMemory, FairSlots, Guards, Membership),
    *(PrefillInstances, PrefixIndex, Quarantine, Quota),
)
"""Not dispatchers, which tests give the jobs of nobody: those of simulated runs are checked."""
KEPT_MAX = 50


@pytest.fixture(autouse=True)
def _validated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = deque[Any](maxlen=KEPT_MAX)

    def noting(kind: type[Any]) -> None:
        begin = kind.__init__

        def noted(self: Any, *args: Any, **named: Any) -> None:
            begin(self, *args, **named)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", noted)

    for kind in KINDS:
        noting(kind)
    yield
    for each in made:
        each.validate()
