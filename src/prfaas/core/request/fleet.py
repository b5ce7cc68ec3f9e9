"""State shared by all requests: the dispatcher's driver, breakers, limits, and budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from prfaas.core.dispatch.types import Routed
from prfaas.core.resilience.budgets import HEDGES, RETRIES, Budget
from prfaas.core.resilience.circuit_breaker import BreakerOutcome
from prfaas.units import NS_PER_S

STEP_NS = NS_PER_S // 40
"""Time of a decode step where nobody knows it."""
PREFILL_TIMEOUT_NS = 60 * NS_PER_S
"""Default time limit of a prefill leg."""


class Again(NamedTuple):
    """A new route of a request whose prefill was given up."""

    routed: Routed
    decode: str


class Books(Protocol):
    """The driver of the dispatcher; `number` is the request's. The gateway's and the simulator's
    have all of these. None raises or takes long."""

    def prefilled(self, number: int, now_ns: int) -> None:
        """The prefill leg has answered."""

    def handed_over(self, number: int, now_ns: int) -> None:
        """All blocks are where the request is decoded."""

    def transfer_over(
        self, number: int, now_ns: int, num_bytes: int, link: tuple[str, str]
    ) -> None:
        """A link has no more to carry for the request; `num_bytes` if all of these blocks landed
        and were counted."""

    def begun(self, number: int, now_ns: int, *, is_streamed: bool) -> None:
        """The engine that decodes has begun to answer, with the first token of a stream or with
        all of the answer: it has taken the blocks from its pool."""

    def begin_relay(self, number: int, now_ns: int) -> bool:
        """The engine that prefilled goes on with the answer; returns False, and nothing changes, if
        it has other prompts to prefill or enough answers."""

    def end_relay(self, number: int) -> None:
        """It does so no more."""

    def fall_back(self, number: int, now_ns: int) -> None:
        """The prefill was aborted: the engine that decodes prefills."""

    def lose_pull(self, number: int, now_ns: int) -> None:
        """The pulled prefix will not come whole."""

    def end(self, number: int, now_ns: int) -> None:
        """The request is over."""

    def choose_decode(self, number: int, avoid: str = "") -> str | None:
        """The engine that decodes a request, chosen when first asked for; None without any."""

    def elsewhere(self, number: int, avoid: str, now_ns: int) -> str | None:
        """Route a request again to another engine that decodes; None without any."""

    def prefill_again(
        self, number: int, avoid: str, now_ns: int, *, offloadable: bool
    ) -> Again | None:
        """Route a request anew whose prefill was given up, to another engine than `avoid`; None if
        the engine that decodes is to prefill it."""

    def prefill_left_ns(self, number: int, now_ns: int) -> int | None:
        """Expected time until its prefill leg ends, ns; None is unknown, or it does not get on."""

    def expected_prefill_ns(self, number: int) -> int | None:
        """Expected time of its prefill leg, ns; None is unknown."""

    def expected_local_ns(
        self,
        name: str,
        num_new_tokens: int,
        prefix_tokens: int,
        now_ns: int,
        *,
        apart: bool = False,
    ) -> int | None:
        """Expected time of a prefill that is sent to a PD instance now, ns; None is unknown.
        `apart`: to one that only prefills, where instances have roles."""

    def local_path_ns(
        self, number: int, name: str, now_ns: int, *, beside: bool = False
    ) -> int | None:
        """Predicted time to the first token on the local path from now on, ns; None is unknown.
        `beside`: the engine that decodes has the request already, and would compute it."""

    def backlog_bytes(self, source: str, destination: str, now_ns: int) -> int | None:
        """Bytes that a link was promised and has not carried; None is unknown."""

    def link_bits_per_s(self, source: str, destination: str, now_ns: int) -> float | None:
        """Rate of a link; None is unknown."""


class Breakers(Protocol):
    """Circuit breakers of engines and of links, a link being its two pools."""

    def began(self, target: str | tuple[str, str], now_ns: int) -> None:
        """Something is sent to an engine or over a link."""

    def ended(self, target: str | tuple[str, str], told: BreakerOutcome, now_ns: int) -> None:
        """Record its end for the breaker of the target."""


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


@dataclass(slots=True)
class SharedState:
    """State shared by all requests of one driver.

    Attributes:
        breakers: Of engines and links.
        retries: Budget of decode legs that run again.
        hedges: Budget of routes that are left because they are late or stalled.
    """

    books: Books
    breakers: Breakers
    limits: RequestLimits
    retries: Budget = field(default_factory=lambda: Budget(RETRIES))
    hedges: Budget = field(default_factory=lambda: Budget(HEDGES))
