"""Two worlds for the drivers of the core, side by side without sockets: what both are given.

A `World` takes events in plain words and hands them to its driver in the driver's own: the
gateway's (`gateway_world.py`) or the simulator's (`simulator_world.py`). Both read the same
counters of links; a reading that is not reported is one that was lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.core.control.role_loop import Role, RoleSettings, StageLoad
from prfaas.core.control.roles import Roles
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.types import RefusedRequest, Routed, ThresholdMoved
from prfaas.core.request.driver import DispatcherBooks
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.policies import Bandwidth, PolicyName
from prfaas.core.routing.predictions import Costs, LinkState
from prfaas.units import NS_PER_S

PD_POOL = "pd"
BLOCK_TOKENS = 512
THRESHOLD = 4000
PLANNED_BITS_PER_S = 2e9
RTT_NS = 30_000_000
PRICES_PER_TB = {"far": 80.0, "prfaas": 20.0}
SECOND_PRICE = 0.001
"""Of a second, where bytes have a price: the dearer link then costs 80 ns a byte."""
HOME = ("p00000", "p00001", "p00002")
CLUSTERS = {"far": ("r00000", "r00001"), "prfaas": ("r00002", "r00003", "r00004")}
"""PrfaaS clusters."""
AWAY = tuple(name for names in CLUSTERS.values() for name in names)
Ends = tuple[str, str]
"""Pools at both ends of a link."""
NUM_BLOCKS_MAX = 40
"""Blocks of the longest prompt; of a prompt one more token follows its blocks."""

REGIONS = {PD_POOL: "eu", "far": "us", "prfaas": "eu"}
TENANTS = {"t0": ["eu"], "t1": ["eu", "us"], "t2": ["eu"], "t3": None}
"""Regions of clusters and tenants; the prompts of a tenant are a family."""

EAGER = RoleSettings(patience_ns=0, dwell_ns=NS_PER_S, smoothing_ns=NS_PER_S, conversion_ns=0)
CALIBRATION = CalibrationSettings(proven_first=True)
"""As the simulator has it."""
Action = Routed | RefusedRequest
COSTS = Costs(
    local_ns=[300_000 * n for n in range(200)],
    remote_ns=[100_000 * n for n in range(200)],
    bytes_of=[500_000 + 20_000 * n for n in range(200)],
    state_bytes=500_000,
    chunk_tokens=2048,
)


@dataclass(frozen=True)
class Rules:
    """Settings by which both route."""

    policy: PolicyName
    ttft_max_s: int | None
    moving_threshold: bool
    pulls: bool = False
    """A prefill at home may fetch a prefix from a PrfaaS cluster."""
    abundant: bool = False
    """The paper's rule for abundant bandwidth, where the policy is the paper's."""
    priced: bool = False
    """Bytes have a price."""
    split: bool = False
    """One PD instance prefills and the others decode, instead of all doing both."""
    regions: bool = False
    """Clusters have regions, and half of the tenants exclude one."""
    num_hosts: int = 1
    """Of each cluster, with one pool each; a single pool has the name of its cluster."""

    @property
    def pools(self) -> dict[str, str]:
        """Pool of each instance."""
        clusters = {PD_POOL: HOME, **CLUSTERS}
        return {
            name: cluster if self.num_hosts == 1 else f"{cluster}-{i % self.num_hosts}"
            for cluster, names in clusters.items()
            for i, name in enumerate(names)
        }

    @property
    def bandwidth(self) -> Bandwidth:
        """Regime of the paper's rule."""
        is_abundant = self.abundant and self.policy is PolicyName.PAPER
        return Bandwidth.ABUNDANT if is_abundant else Bandwidth.SCARCE

    @property
    def second_price(self) -> float | None:
        """Price of a second of a request."""
        return SECOND_PRICE if self.priced else None

    @property
    def roles(self) -> list[Role]:
        """Of PD instances that do not do both."""
        return [Role.PREFILL] + [Role.DECODE] * (len(HOME) - 1)


@dataclass(frozen=True)
class Counted:
    """Reading of a link by its pool node: bytes delivered since the last reading, as a rate, what
    has arrived of open transfers, and whether bytes wait."""

    bits_per_s: int
    arrived_bytes: int
    is_busy: bool


class World(ABC):
    """Events that every driver understands; what both do alike is here."""

    rules: Rules
    driver: DispatcherBooks
    decode_names: Sequence[str]
    """Names by which the driver knows PD instances that decode."""
    links: Sequence[Ends]
    """Links that the driver knows, those to the PD cluster first."""

    @abstractmethod
    def arrive(self, number: int, family: int, num_blocks: int, now_ns: int, again: bool) -> Action:
        """A prompt of `num_blocks` blocks, equal to all of its family as far as they reach."""

    def prefilled(self, number: int, now_ns: int) -> None:
        self.driver.prefilled(number, now_ns)

    def landed(self, number: int, now_ns: int, num_bytes: int) -> None:
        self.driver.transfer_over(number, now_ns, num_bytes)

    def ready(self, number: int, now_ns: int) -> None:
        self.dispatcher.requests.prompt_ready(number, now_ns)

    def first_token(self, number: int, now_ns: int) -> None:
        self.driver.begun(number, now_ns, is_streamed=True)

    def end(self, number: int, now_ns: int) -> None:
        self.driver.end(number, now_ns)

    @abstractmethod
    def store(self, holder: str, family: int, num_blocks: int) -> None:
        """A pool, or an engine's own memory, has the first blocks of a family."""

    @abstractmethod
    def forget(self, engine: str) -> None:
        """An engine's own memory is empty."""

    @abstractmethod
    def set_ready(self, name: str, ready: bool, now_ns: int) -> None: ...

    @abstractmethod
    def report_load(self, name: str, num_waiting: int, now_ns: int) -> None: ...

    @abstractmethod
    def set_link(self, ends: Ends, up: bool, now_ns: int) -> list[int]: ...

    @abstractmethod
    def count_link(self, ends: Ends, seen: Counted, now_ns: int) -> None:
        """The pool node that sends over a link reads its counters."""

    @abstractmethod
    def report_link(self, ends: Ends, now_ns: int) -> None:
        """The last reading, if any, reaches the driver."""

    def choose_decode(self, number: int) -> int | None:
        """Index of the PD instance that decodes an open request."""
        name = self.driver.choose_decode(number)
        return None if name is None else self.decode_names.index(name)

    @abstractmethod
    def weigh(self, prefill: StageLoad, decode: StageLoad, now_ns: int) -> list[Role]:
        """One interval of the long-term loop; the roles that instances take work in."""

    @abstractmethod
    def report_queue(self, name: str, running: int, waiting: int, now_ns: int) -> None:
        """A PD instance reports what it has."""

    @abstractmethod
    def turn(self, now_ns: int) -> list[Role]:
        """One interval of the long-term loop, by what instances reported; the roles as above."""

    @abstractmethod
    def look(self, now_ns: int) -> list[Role]:
        """A draining instance is looked at; the same."""

    @abstractmethod
    def tick(self, now_ns: int) -> list[ThresholdMoved]: ...

    @property
    def dispatcher(self) -> Dispatcher:
        return self.driver.dispatcher


def held(world: World) -> tuple[int, int]:
    """Open requests, and bytes promised to the links."""
    return len(world.dispatcher.requests), world.dispatcher.promised_bytes


def signals(world: World, now_ns: int) -> list[tuple[LinkState | None, float]]:
    """State of the links, as far as it is known."""
    books = [world.dispatcher.links.between(*ends).book for ends in world.links]
    return [(book.latest(now_ns), book.mean_utilisation(now_ns)) for book in books]


class Delivered:
    """Bytes that a link has delivered, from the rates of its readings."""

    def __init__(self) -> None:
        self.num_bytes, self._at_ns = 0, 0

    def go_on(self, bits_per_s: int, now_ns: int) -> int:
        """Deliver at a rate since the last reading; all so far."""
        self.num_bytes += bits_per_s * (now_ns - self._at_ns) // (8 * NS_PER_S)
        self._at_ns = now_ns
        return self.num_bytes


def block_ids(family: int, num_blocks: int) -> tuple[int, ...]:
    """Blocks of a prompt: those of one family share their beginning."""
    return tuple(1000 * family + n for n in range(num_blocks))


def working(roles: Roles) -> list[Role]:
    """The role that every instance works in; one that drains has none."""
    changing = roles.change.index if roles.change else None
    return [role for index, role in enumerate(roles.all) if index != changing]
