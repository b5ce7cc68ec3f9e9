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
    """Limits on a request, ns."""

    prefill_timeout_ns: int
    """From the start of a prefill leg to its answer."""
    transfer_timeout_ns: int
    """Time for which an engine waits for a pull."""
    ttft_max_ns: int | None = None
    """Target of the time to first token; None is no target."""
    legs_max: int = 3
    """Decode legs: a prompt that breaks engines does not get to break all of them."""
    prefills_max: int = 3
    """Prefill legs, for the same reason."""
    looks: float = 20
    """Number of checks of a route over a link within its predicted time."""
    look_ns_max: int = NS_PER_S
    """Longest time between two of them."""
    step_ns: int = STEP_NS
    """Time of a decode step."""


@dataclass(slots=True, eq=False)
class SharedState:
    """State shared by all requests of one driver."""

    books: DispatcherBooks
    breakers: Guards
    """Of engines and links."""
    limits: RequestLimits
    retries: Budget = field(default_factory=partial(Budget, RETRIES))
    """Budget of decode legs that run again."""
    hedges: Budget = field(default_factory=partial(Budget, HEDGES))
    """Budget of routes that are left because they are late or stalled."""
