"""The simulator's driver in a world of its own.

It gets names, reports of links, and prompts as block ids of its caches, which are those of pools
and instances.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prfaas.core.control.role_loop import InstanceQueue, Role, StageLoad
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import ThresholdMoved
from prfaas.core.transfer.link_goodput import LinkGoodput
from prfaas.core.transfer.residency import EVERYWHERE, Residency, frozen
from prfaas.sim.engine.dispatch_driver import SimulatedDriver
from prfaas.sim.engine.role_changes import RoleChanges as SimulatedRoles
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import (
    BlockSetup,
    CacheSetup,
    ClusterSetup,
    DecodeLimits,
    LinkSetup,
    PlacementSetup,
    RolesSetup,
    RoutingSetup,
    Setup,
    SloSetup,
)
from prfaas.units import NS_PER_S

from .rules import (
    BLOCK_TOKENS,
    CLUSTERS,
    COSTS,
    EAGER,
    HOME,
    PD_POOL,
    PLANNED_BITS_PER_S,
    PRICES_PER_TB,
    REGIONS,
    RTT_NS,
    TENANTS,
    THRESHOLD,
    Action,
    Counted,
    Delivered,
    Ends,
    Rules,
    World,
    block_ids,
    working,
)

UNLIMITED = CacheSetup(host_blocks=None, device_blocks=None)


@dataclass
class SimulatorWorld(World):
    """`SimulatedDriver`, fed as `Simulation`, `Transport` and `Telemetry` feed it."""

    rules: Rules
    driver: SimulatedDriver = field(init=False)
    _goodputs: defaultdict[Ends, tuple[LinkGoodput, Delivered]] = field(
        default_factory=lambda: defaultdict(lambda: (LinkGoodput(), Delivered()))
    )
    _reports: dict[Ends, LinkReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setup = _setup(self.rules)
        self.driver = SimulatedDriver(setup)
        self.decode_names = self.driver.decode_names if self.driver.has_roles else HOME
        self.links = self.driver.links
        for ends in self.links:
            self.driver.set_link(ends, up=False)
        if self.rules.split:
            self._clock = _Clock()
            system = _System(setup, self.driver, self._clock)
            self._roles = SimulatedRoles(system)  # type: ignore[arg-type]
            self._roles.start()
            self._clock.due.clear()

    def arrive(self, number: int, family: int, num_blocks: int, now_ns: int, again: bool) -> Action:
        blocks = block_ids(family, num_blocks)
        request = Request(number, now_ns, num_blocks * BLOCK_TOKENS + 1, 1, blocks, f"t{family}")
        if again:
            return self.driver.route_again(number, "", now_ns)
        return self.driver.route(request, now_ns)[0]

    def store(self, holder: str, family: int, num_blocks: int) -> None:
        caches, blocks = self.driver.caches, block_ids(family, num_blocks)
        if holder in caches.pools:
            caches.pools[holder].store(blocks)
        else:
            caches.devices.store(holder, blocks)

    def forget(self, engine: str) -> None:
        self.driver.caches.devices.clear(engine)

    def set_ready(self, name: str, ready: bool, now_ns: int) -> None:
        """With roles, PD instances do not fail: the simulator knows no such run."""
        self.driver.set_ready(name, ready=ready, now_ns=now_ns)

    def report_load(self, name: str, num_waiting: int, now_ns: int) -> None:
        self.driver.report_loads(now_ns, [(name, num_waiting)])

    def set_link(self, ends: Ends, up: bool, now_ns: int) -> list[int]:
        return self.driver.set_link(ends, up=up)

    def count_link(self, ends: Ends, seen: Counted, now_ns: int) -> None:
        goodput, delivered = self._goodputs[ends]
        num_bytes = delivered.go_on(seen.bits_per_s, now_ns)
        goodput.sample(now_ns, num_bytes, is_busy=seen.is_busy, rtt_ns=RTT_NS)
        rate, busy_ns = goodput.bits_per_s, goodput.busy_ns
        self._reports[ends] = LinkReport(now_ns, rate, seen.arrived_bytes, busy_ns, RTT_NS)

    def report_link(self, ends: Ends, now_ns: int) -> None:
        if ends in self._reports:
            self.driver.dispatcher.links.report(*ends, self._reports[ends])

    def weigh(self, prefill: StageLoad, decode: StageLoad, now_ns: int) -> list[Role]:
        self._clock.now_ns = now_ns
        self._roles.weigh(prefill, decode)
        return self.look(now_ns)

    def report_queue(self, name: str, running: int, waiting: int, now_ns: int) -> None:
        self._roles._hear([(name, InstanceQueue(now_ns, running, waiting))])
        if self._roles._roles.all[HOME.index(name)] is Role.PREFILL:
            self.driver.report_loads(now_ns, [(name, waiting)])

    def turn(self, now_ns: int) -> list[Role]:
        self._clock.now_ns = now_ns
        self._roles.weigh(*self._roles._split.load(self.driver.dispatcher, now_ns))
        return self.look(now_ns)

    def look(self, now_ns: int) -> list[Role]:
        self._clock.run(now_ns)
        return working(self._roles._roles)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        return self.driver.dispatcher.tick(now_ns)


@dataclass
class _Clock:
    """Runs what is due when it is told to."""

    now_ns: int = 0
    due: list[tuple[Callable[[Any], None], Any]] = field(default_factory=list)

    def after(self, _delay_ns: int, then: Callable[[Any], None], argument: Any = None) -> None:
        self.due.append((then, argument))

    def run(self, now_ns: int) -> None:
        """A look at a draining instance, and the conversion that may follow at once."""
        self.now_ns = now_ns
        for _ in range(2):
            due, self.due = self.due, []
            for then, argument in due:
                then(argument)


class _System:
    """As much of a simulated run as its roles look at."""

    def __init__(self, setup: Setup, front: SimulatedDriver, clock: _Clock) -> None:
        self.setup, self.front, self.clock = setup, front, clock


def _residency() -> Residency:
    limits = {name: regions for name, regions in TENANTS.items() if regions is not None}
    return Residency(frozen({name: [region] for name, region in REGIONS.items()}), frozen(limits))


def _setup(rules: Rules) -> Setup:
    """Without a split no instance only decodes: those that prefill decode as well."""
    links = {
        name: LinkSetup(1.0, price_per_tb=price, planned_bits_per_s=PLANNED_BITS_PER_S)
        for name, price in PRICES_PER_TB.items()
    }
    num_prefill = rules.roles.count(Role.PREFILL) if rules.split else len(HOME)
    return Setup(
        prfaas=tuple(
            ClusterSetup(name, len(names), COSTS, links[name], UNLIMITED, rules.num_hosts)
            for name, names in CLUSTERS.items()
        ),
        num_prefill=num_prefill,
        num_decode=len(HOME) - num_prefill,
        roles=RolesSetup(EAGER) if rules.split else None,
        costs=COSTS,
        step_ns=lambda _batch, _context: 1,
        decode=DecodeLimits(1),
        routing=RoutingSetup(
            rules.policy,
            THRESHOLD,
            rules.bandwidth,
            moving_threshold=rules.moving_threshold,
            admission=rules.ttft_max_s is not None,
            residency=_residency() if rules.regions else EVERYWHERE,
        ),
        placement=PlacementSetup(rules.pulls, second_price=rules.second_price),
        name=PD_POOL,
        cache=UNLIMITED,
        num_hosts=rules.num_hosts,
        blocks=BlockSetup(BLOCK_TOKENS),
        slo=SloSetup(None if rules.ttft_max_s is None else rules.ttft_max_s * NS_PER_S),
    )
