"""Requests led by the core's machine over the books of either driver, side by side.

Each `Lives` has its own driver, breakers and budgets, and takes the same events. Engines of the PD
cluster that only decode have names of their own in the simulator; here they have the gateway's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas.core.dispatch.types import NOTHING, Arrival, Refused, Routed
from prfaas.core.request.actions import AnyAction
from prfaas.core.request.books import DispatcherBooks
from prfaas.core.request.events import AnyEvent
from prfaas.core.request.fleet import Books, Fleet, Limits
from prfaas.core.request.machine import RequestLife, Route
from prfaas.core.resilience.circuit_breaker import Told
from prfaas.core.routing.decision import Path
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S

from .worlds import BLOCK_TOKENS, HOME, PD_POOL, GatewayWorld, SimulatorWorld, World, held

LIMITS = Limits(prefill_timeout_ns=20 * NS_PER_S, transfer_timeout_ns=10 * NS_PER_S)


@dataclass
class NotedBreakers:
    """Breakers that note what they are told."""

    told: list[tuple[str | tuple[str, str], Told | None]] = field(default_factory=list)

    def began(self, target: str | tuple[str, str]) -> None:
        self.told.append((target, None))

    def ended(self, target: str | tuple[str, str], told: Told) -> None:
        self.told.append((target, told))


class SimulatorBooks(DispatcherBooks):
    """The books of a simulated run: its prompts and caches, and its names of instances."""

    def __init__(self, world: SimulatorWorld) -> None:
        self._world, self._front = world, world.front
        self.dispatcher = world.front.dispatcher

    @property
    def has_roles(self) -> bool:
        return self._world.rules.split

    def route_again(self, number: int, avoid: str, now_ns: int) -> Routed | Refused:
        prompt = self._request(number).num_prompt_tokens
        arrival = Arrival(
            number,
            prompt,
            prompt,
            self.hits(number),
            NOTHING,
            offloadable=False,
            shippable_tokens=(prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
            avoid=avoid,
        )
        return self.dispatcher.arrive(arrival, now_ns, again=True)

    def hits(self, number: int) -> Mapping[str, int]:
        found = self._front.caches.hits(self._request(number))
        return {name: hit.num_tokens for name, hit in found.items()}

    def choose_decode(self, number: int, avoid: str = "") -> str | None:
        names = self._front.decode_names
        if not self.has_roles:
            return self.dispatcher.requests.choose_decode(number)
        name = self.dispatcher.requests.choose_decode(
            number, names[HOME.index(avoid)] if avoid else ""
        )
        return None if name is None else HOME[names.index(name)]

    def _request(self, number: int) -> Request:
        return self._world._requests[number]


def books_of(world: World) -> Books:
    """The books of a world's driver."""
    if isinstance(world, GatewayWorld):
        return world.driver
    assert isinstance(world, SimulatorWorld)
    return SimulatorBooks(world)


class Lives:
    """Requests over one driver."""

    def __init__(self, world: World) -> None:
        self.world, self.now_ns = world, 0
        self.breakers = NotedBreakers()
        self._fleet = Fleet(books_of(world), self.breakers, LIMITS)
        self._lives: dict[int, RequestLife] = {}

    def arrive(self, number: int, family: int, num_blocks: int) -> object:
        """A request comes; what was decided, and whether it can be led."""
        found = self.world.arrive(number, family, num_blocks, self.now_ns, False)
        if isinstance(found, Routed):
            route = self._route(number, found, num_blocks)
            if route is not None:
                self._lives[number] = RequestLife(route, self._fleet)
        return found

    def _route(self, number: int, found: Routed, num_blocks: int) -> Route | None:
        decode = found.decode
        if decode is None:
            index = self.world.choose_decode(number)
            if index is None:
                self.world.end(number, self.now_ns)
                return None
            decode = HOME[index]
        is_remote = found.decision.path is Path.REMOTE
        prefill = found.prefill if is_remote or found.prefill != decode else ""
        pools = (found.source if is_remote else PD_POOL, PD_POOL)
        return Route(number, found, decode, prefill, pools, num_blocks * BLOCK_TOKENS)

    def step(self, number: int, event: AnyEvent) -> list[AnyAction]:
        """Something happens to a request; what is to be done."""
        self._fleet.retries.deposit(self.now_ns)
        return self._lives[number].step(event, self.now_ns)

    def state(self) -> object:
        """What has to be equal beside the actions."""
        stages = {number: life.stage for number, life in self._lives.items()}
        return stages, self.breakers.told, held(self.world)

    @property
    def numbers(self) -> list[int]:
        """Requests that were let in."""
        return sorted(self._lives)
