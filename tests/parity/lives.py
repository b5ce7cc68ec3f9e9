"""Requests led by the core's machine over the books of either driver, side by side.

Each `Lives` has its own driver, breakers and budgets, and takes the same events. Instances of the
PD cluster that only decode have names of their own in the simulator; the gateway's are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from prfaas.core.control.split import instance_of
from prfaas.core.dispatch.types import Routed
from prfaas.core.request.actions import AnyAction, ContinueOn, HoldBack, StartDecode, WarmDecode
from prfaas.core.request.events import AnyEvent
from prfaas.core.request.fleet import RequestLimits, SharedState
from prfaas.core.request.held import life_of
from prfaas.core.request.machine import RequestLife, Route
from prfaas.core.request.states import Stage
from prfaas.core.resilience.circuit_breaker import BreakerOutcome
from prfaas.core.resilience.quarantine import Guards
from prfaas.core.routing.decision import Path
from prfaas.units import NS_PER_S

from .rules import BLOCK_TOKENS, World, held

LIMITS = RequestLimits(prefill_timeout_ns=20 * NS_PER_S, transfer_timeout_ns=10 * NS_PER_S)
HELD_ONE_IN = 4
"""One request in so many is for engines that cannot wait for blocks."""


@dataclass
class NotedBreakers:
    """Breakers that note what they are told."""

    told: list[tuple[str | tuple[str, str], BreakerOutcome | None]] = field(default_factory=list)

    def began(self, target: str | tuple[str, str], now_ns: int) -> None:
        self.told.append((target, None))

    def ended(self, target: str | tuple[str, str], told: BreakerOutcome, now_ns: int) -> None:
        self.told.append((target, told))


class Lives:
    """Requests over one driver."""

    def __init__(self, world: World) -> None:
        self.world, self.now_ns = world, 0
        self.breakers = NotedBreakers()
        self._fleet = SharedState(world.driver, cast(Guards, self.breakers), LIMITS)
        self._lives: dict[int, RequestLife] = {}

    def arrive(self, number: int, family: int, num_blocks: int) -> object:
        """A request comes; what was decided, and whether it can be led."""
        found = self.world.arrive(number, family, num_blocks, self.now_ns, False)
        if isinstance(found, Routed):
            route = self._route(number, found, num_blocks)
            if route is not None:
                self._lives[number] = life_of(route, self._fleet)
        return found

    def _route(self, number: int, found: Routed, num_blocks: int) -> Route | None:
        decode = found.decode
        if decode is None:
            index = self.world.choose_decode(number)
            if index is None:
                self.world.end(number, self.now_ns)
                return None
            decode = self.world.decode_names[index]
        is_remote = found.decision.path is Path.REMOTE
        prefill = found.prefill if is_remote or found.prefill != decode else ""
        pools = found.prefill_pool, found.destination
        holds = number % HELD_ONE_IN == 0
        return Route(
            number,
            found,
            decode,
            prefill,
            pools,
            num_blocks * BLOCK_TOKENS,
            holds=holds,
            relay_max=number % 3 * 50,
            num_bytes=number % 5 * 10**7,
        )

    def step(self, number: int, event: AnyEvent) -> list[AnyAction]:
        """Something happens to a request; what is to be done, in the gateway's names."""
        self._fleet.retries.deposit(self.now_ns)
        return [_named(action) for action in self._lives[number].step(event, self.now_ns)]

    def state(self) -> object:
        """State that has to be equal, besides the actions."""
        stages = {number: life.stage for number, life in self._lives.items()}
        told = [(_gateways(target), what) for target, what in self.breakers.told]
        return stages, told, held(self.world)

    def stage_of(self, number: int) -> Stage:
        """Stage of a request."""
        return self._lives[number].stage

    @property
    def numbers(self) -> list[int]:
        """Requests that were let in."""
        return sorted(self._lives)


def _gateways(target: str | tuple[str, str]) -> str | tuple[str, str]:
    """The gateway's name for an instance: the simulator has another one for those that decode."""
    return instance_of(target) if isinstance(target, str) else target


def _named(action: AnyAction) -> AnyAction:
    match action:
        case StartDecode(engine) | WarmDecode(engine) | ContinueOn(engine) | HoldBack(engine):
            return action._replace(engine=str(_gateways(engine)))
    return action
