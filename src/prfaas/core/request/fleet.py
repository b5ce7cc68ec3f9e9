"""State shared by all requests: the dispatcher's driver, breakers, limits, and budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from prfaas.core.resilience.budgets import HEDGES, RETRIES, Budget
from prfaas.core.resilience.quarantine import Guards
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.core.request.driver import DispatcherBooks

STEP_NS = NS_PER_S // 40
"""Time of a decode step where nobody knows it."""
PREFILL_TIMEOUT_NS = 60 * NS_PER_S
"""Default time limit of a prefill leg."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on a request, ns.

    Attributes:
        prefill_timeout_ns: From the start of a prefill leg to its answer.
        transfer_timeout_ns: Time for which an engine waits for a pull.
        ttft_max_ns: Target of the time to first token; None is no target.
        legs_max: Decode legs: a prompt that breaks engines does not get to break all of them.
        prefills_max: Prefill legs, for the same reason.
        looks: Number of checks of a route over a link within its predicted time.
        look_ns_max: Longest time between two of them.
        step_ns: Time of a decode step.
    """

    prefill_timeout_ns: int
    transfer_timeout_ns: int
    ttft_max_ns: int | None = None
    legs_max: int = 3
    prefills_max: int = 3
    looks: float = 20
    look_ns_max: int = NS_PER_S
    step_ns: int = STEP_NS


@dataclass(slots=True, eq=False)
class SharedState:
    """State shared by all requests of one driver.

    Attributes:
        breakers: Of engines and links.
        retries: Budget of decode legs that run again.
        hedges: Budget of routes that are left because they are late or stalled.
    """

    books: DispatcherBooks
    breakers: Guards
    limits: RequestLimits
    retries: Budget = field(default_factory=partial(Budget, RETRIES))
    hedges: Budget = field(default_factory=partial(Budget, HEDGES))
