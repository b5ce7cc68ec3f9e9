"""The two drivers of the core, side by side: the gateway's and the simulator's, without sockets.

A `World` takes events in plain words and hands them to its driver in the driver's own. The
gateway's gets engines' health, pool states with telemetry, and prompts as hash chains, which it
looks up in its prefix index, which has pools and engines' own memories. The simulator's gets names,
reports of links, and prompts as block ids of its caches, which are those of pools and instances.
Both read the same counters of links; a reading that is not reported is one that was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prfaas.config.deployment import Deployment
from prfaas.core.control.role_loop import Role, RoleLoop, RoleSettings, StageLoad
from prfaas.core.control.roles import Roles
from prfaas.core.control.stage_load import InstanceQueue
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.link_load import LinkReport
from prfaas.core.dispatch.types import Arrival, Refused, Routed, ThresholdMoved
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.prefix_index import PrefixIndex, Tier
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.cost_tables import Costs
from prfaas.core.routing.policies import Bandwidth, PolicyName
from prfaas.core.routing.predictions import LinkState
from prfaas.core.transfer.link_goodput import LinkGoodput
from prfaas.gateway.loops.role_rebalancing import Reroling
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.pool_state import PoolView
from prfaas.gateway.routing.profiles import Profiles
from prfaas.pool.send.link_meter import LinkMeter
from prfaas.sim.engine.dispatch_driver import Front
from prfaas.sim.engine.role_changes import Roles as SimulatedRoles
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
from prfaas.wire.sockets import TcpInfo

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
"""PrfaaS clusters; each has one pool of its name."""
AWAY = tuple(name for names in CLUSTERS.values() for name in names)
POOLS = (PD_POOL, *CLUSTERS)
NUM_BLOCKS_MAX = 40
"""Blocks of the longest prompt; of a prompt one more token follows its blocks."""

EAGER = RoleSettings(patience_ns=0, dwell_ns=NS_PER_S, smoothing_ns=NS_PER_S, conversion_ns=0)
CALIBRATION = CalibrationSettings(proven_first=True)
"""As the simulator has it."""
UNLIMITED = CacheSetup(host_blocks=None, device_blocks=None)
Action = Routed | Refused
COSTS = Costs(
    local_ns=[300_000 * n for n in range(200)],
    remote_ns=[100_000 * n for n in range(200)],
    bytes_of=[500_000 + 20_000 * n for n in range(200)],
    state_bytes=500_000,
    chunk_tokens=2048,
)
LAYOUT = Layout(b"L" * 32, BLOCK_TOKENS, "7", (CacheGroup(0, GroupKind.FULL_ATTENTION, 512, 1024),))


@dataclass(frozen=True)
class Rules:
    """How both route."""

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


class World(Protocol):
    """Events that every driver understands."""

    rules: Rules

    def arrive(self, number: int, family: int, num_blocks: int, now_ns: int, again: bool) -> Action:
        """A prompt of `num_blocks` blocks, equal to all of its family as far as they reach."""

    def prefilled(self, number: int, now_ns: int) -> None: ...
    def landed(self, number: int, now_ns: int) -> None: ...
    def ready(self, number: int, now_ns: int) -> None: ...
    def first_token(self, number: int, now_ns: int) -> None: ...
    def end(self, number: int, now_ns: int) -> None: ...
    def store(self, holder: str, family: int, num_blocks: int) -> None:
        """A pool, or an engine's own memory, has the first blocks of a family."""

    def forget(self, engine: str) -> None:
        """An engine's own memory is empty."""

    def set_ready(self, name: str, ready: bool, now_ns: int) -> None: ...
    def report_load(self, name: str, num_waiting: int, now_ns: int) -> None: ...
    def set_link(self, cluster: str, up: bool, now_ns: int) -> list[int]: ...
    def count_link(self, cluster: str, seen: Counted, now_ns: int) -> None:
        """The pool node of a cluster reads the counters of its link."""

    def report_link(self, cluster: str, now_ns: int) -> None:
        """The last reading, if any, reaches the driver."""

    def choose_decode(self, number: int) -> int | None:
        """Index of the PD instance that decodes an open request."""

    def weigh(self, prefill: StageLoad, decode: StageLoad, now_ns: int) -> list[Role]:
        """One interval of the long-term loop; the roles that instances take work in."""

    def report_queue(self, name: str, running: int, waiting: int, now_ns: int) -> None:
        """A PD instance reports what it has."""

    def turn(self, now_ns: int) -> list[Role]:
        """One interval of the long-term loop, by what instances reported; the roles as above."""

    def look(self, now_ns: int) -> list[Role]:
        """A draining instance is looked at; the same."""

    def tick(self, now_ns: int) -> list[ThresholdMoved]: ...
    @property
    def dispatcher(self) -> Dispatcher: ...


def held(world: World) -> tuple[int, int]:
    """Open requests, and bytes promised to the links."""
    return len(world.dispatcher.requests), world.dispatcher.promised_bytes


def signals(world: World, now_ns: int) -> list[tuple[LinkState | None, float]]:
    """State of the links, as far as it is known."""
    books = [world.dispatcher.links.between(cluster, PD_POOL).book for cluster in CLUSTERS]
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


class GatewayWorld:
    """The gateway's `Driver`, fed as `Engines`, `Subscription` and `Planner` feed it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._index = PrefixIndex()
        for pool in POOLS:
            self._index.end_snapshot(pool)
        profiles = Profiles(
            COSTS,
            dict.fromkeys(CLUSTERS, COSTS),
            dict.fromkeys(CLUSTERS, PLANNED_BITS_PER_S),
            PRICES_PER_TB,
        )
        self.driver = Driver(_deployment(rules), profiles, self._index, CALIBRATION)
        self._away = {
            pool: PoolView(is_live=True, layouts=dict.fromkeys(names, LAYOUT))
            for pool, names in CLUSTERS.items()
        }
        self._meters = {cluster: (LinkMeter(), Delivered()) for cluster in CLUSTERS}
        self._arrived: dict[str, int] = {}
        pd = PoolView(is_live=True, layouts=dict.fromkeys(HOME, LAYOUT))
        for pool, view in {PD_POOL: pd, **self._away}.items():
            self.driver.pool_seen(pool, view, 0)
        if self.driver.split is not None:
            self.driver.split.roles = Roles(rules.roles, RoleLoop(THRESHOLD, EAGER))
            self._reroling = Reroling(self.driver, self.driver.split, Journal())
        for name in (*HOME, *AWAY):
            self.forget(name)
            self.driver.engine_ready(name, 10**6, 0)

    def arrive(self, number: int, family: int, num_blocks: int, now_ns: int, again: bool) -> Action:
        num_tokens = num_blocks * BLOCK_TOKENS + 1
        hashes = [_hash(block) for block in block_ids(family, num_blocks)]
        arrival = Arrival(
            number,
            num_tokens,
            num_tokens,
            shippable_tokens=LAYOUT.last_boundary(num_tokens),
            layout=LAYOUT,
            hashes=hashes,
        )
        if again:
            return self.driver.route_again(number, "", now_ns)
        return self.driver.route(arrival, now_ns)[0]

    def prefilled(self, number: int, now_ns: int) -> None:
        self.driver.prefilled(number, now_ns)

    def landed(self, number: int, now_ns: int) -> None:
        self.driver.transfer_over(number, now_ns)

    def first_token(self, number: int, now_ns: int) -> None:
        self.driver.dispatcher.requests.first_token(number, now_ns)

    def ready(self, number: int, now_ns: int) -> None:
        self.driver.dispatcher.requests.prompt_ready(number, now_ns)

    def end(self, number: int, now_ns: int) -> None:
        self.driver.end(number, now_ns)

    def store(self, holder: str, family: int, num_blocks: int) -> None:
        keys = [BlockKey(0, _hash(block)) for block in block_ids(family, num_blocks)]
        tier = Tier.HOST if holder in POOLS else Tier.DEVICE
        self._index.add(holder, LAYOUT.layout_id, keys, tier)

    def forget(self, engine: str) -> None:
        self._index.begin_snapshot(engine)
        self._index.end_snapshot(engine)

    def set_ready(self, name: str, ready: bool, now_ns: int) -> None:
        if ready:
            self.driver.engine_ready(name, 10**6, now_ns)
        else:
            self.driver.engine_gone(name, now_ns)

    def report_load(self, name: str, num_waiting: int, now_ns: int) -> None:
        self.driver.engine_seen(name, num_waiting, now_ns)

    def set_link(self, cluster: str, up: bool, now_ns: int) -> list[int]:
        self._away[cluster] = replace(self._away[cluster], links={PD_POOL: up}, telemetry={})
        return self.driver.pool_seen(cluster, self._away[cluster], now_ns)

    def count_link(self, cluster: str, seen: Counted, now_ns: int) -> None:
        meter, delivered = self._meters[cluster]
        acked = TcpInfo(RTT_NS, 10, 0, delivered.go_on(seen.bits_per_s, now_ns), 0)
        meter.sample(now_ns, [acked], int(seen.is_busy), 0)
        self._arrived[cluster] = seen.arrived_bytes

    def report_link(self, cluster: str, now_ns: int) -> None:
        if cluster not in self._arrived:
            return
        meter, _ = self._meters[cluster]
        telemetry = meter.telemetry(now_ns, open_arrived_bytes=self._arrived[cluster])
        self._away[cluster] = replace(self._away[cluster], telemetry={PD_POOL: telemetry})
        self.driver.pool_seen(cluster, self._away[cluster], now_ns)

    def choose_decode(self, number: int) -> int | None:
        name = self.driver.choose_decode(number)
        return None if name is None else HOME.index(name)

    def weigh(self, prefill: StageLoad, decode: StageLoad, now_ns: int) -> list[Role]:
        self._reroling.weigh(prefill, decode, now_ns)
        return self.look(now_ns)

    def report_queue(self, name: str, running: int, waiting: int, now_ns: int) -> None:
        self.driver.engine_seen(name, waiting, now_ns, running)

    def turn(self, now_ns: int) -> list[Role]:
        self._reroling.turn(now_ns)
        return self.look(now_ns)

    def look(self, now_ns: int) -> list[Role]:
        self._reroling.beat(now_ns)
        return working(self._reroling.roles)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        return self.driver.tick(now_ns)

    @property
    def dispatcher(self) -> Dispatcher:
        return self.driver.dispatcher


@dataclass
class SimulatorWorld:
    """The simulator's `Front`, fed as `Simulation`, `Transport` and `Telemetry` feed it."""

    rules: Rules
    front: Front = field(init=False)
    _goodputs: dict[str, tuple[LinkGoodput, Delivered]] = field(
        default_factory=lambda: {cluster: (LinkGoodput(), Delivered()) for cluster in CLUSTERS}
    )
    _reports: dict[str, LinkReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setup = _setup(self.rules)
        self.front = Front(setup)
        for cluster in CLUSTERS:
            self.front.set_link(cluster, up=False)
        if self.rules.split:
            self._clock = _Clock()
            system = _System(setup, self.front, self._clock)
            self._roles = SimulatedRoles(system)  # type: ignore[arg-type]
            self._roles.start()
            self._clock.due.clear()

    def arrive(self, number: int, family: int, num_blocks: int, now_ns: int, again: bool) -> Action:
        blocks = block_ids(family, num_blocks)
        request = Request(number, now_ns, num_blocks * BLOCK_TOKENS + 1, 1, blocks)
        if again:
            return self.front.route_again(number, "", now_ns)
        return self.front.route(request, self.front.caches.hits(request), now_ns)[0]

    def prefilled(self, number: int, now_ns: int) -> None:
        self.front.prefilled(number, now_ns)

    def landed(self, number: int, now_ns: int) -> None:
        self.front.transfer_over(number, now_ns)

    def first_token(self, number: int, now_ns: int) -> None:
        self.front.dispatcher.requests.first_token(number, now_ns)

    def ready(self, number: int, now_ns: int) -> None:
        self.front.dispatcher.requests.prompt_ready(number, now_ns)

    def end(self, number: int, now_ns: int) -> None:
        self.front.end(number, now_ns)

    def store(self, holder: str, family: int, num_blocks: int) -> None:
        caches, blocks = self.front.caches, block_ids(family, num_blocks)
        if holder in POOLS:
            caches.pools[holder].store(blocks)
        else:
            caches.devices.store(holder, blocks)

    def forget(self, engine: str) -> None:
        self.front.caches.devices.clear(engine)

    def set_ready(self, name: str, ready: bool, now_ns: int) -> None:
        """With roles, PD instances do not fail: the simulator knows no such run."""
        self.front.set_ready(name, ready=ready, now_ns=now_ns)

    def report_load(self, name: str, num_waiting: int, now_ns: int) -> None:
        self.front.report_loads(now_ns, [(name, num_waiting)])

    def set_link(self, cluster: str, up: bool, now_ns: int) -> list[int]:
        return self.front.set_link(cluster, up=up)

    def count_link(self, cluster: str, seen: Counted, now_ns: int) -> None:
        goodput, delivered = self._goodputs[cluster]
        num_bytes = delivered.go_on(seen.bits_per_s, now_ns)
        goodput.sample(now_ns, num_bytes, is_busy=seen.is_busy, rtt_ns=RTT_NS)
        rate, busy_ns = goodput.bits_per_s, goodput.busy_ns
        self._reports[cluster] = LinkReport(now_ns, rate, seen.arrived_bytes, busy_ns, RTT_NS)

    def report_link(self, cluster: str, now_ns: int) -> None:
        if cluster in self._reports:
            self.front.report_link(cluster, PD_POOL, self._reports[cluster])

    def choose_decode(self, number: int) -> int | None:
        name = self.front.choose_decode(number)
        return None if name is None else self.front.decode_names.index(name)

    def weigh(self, prefill: StageLoad, decode: StageLoad, now_ns: int) -> list[Role]:
        self._clock.now_ns = now_ns
        self._roles.weigh(prefill, decode)
        return self.look(now_ns)

    def report_queue(self, name: str, running: int, waiting: int, now_ns: int) -> None:
        self._roles._hear([(name, InstanceQueue(now_ns, running, waiting))])
        if self._roles._roles.all[HOME.index(name)] is Role.PREFILL:
            self.front.report_loads(now_ns, [(name, waiting)])

    def turn(self, now_ns: int) -> list[Role]:
        self._clock.now_ns = now_ns
        self._roles.weigh(*self._roles._split.load(self.front.dispatcher, now_ns))
        return self.look(now_ns)

    def look(self, now_ns: int) -> list[Role]:
        self._clock.run(now_ns)
        return working(self._roles._roles)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        return self.front.tick(now_ns)

    @property
    def dispatcher(self) -> Dispatcher:
        return self.front.dispatcher


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

    def __init__(self, setup: Setup, front: Front, clock: _Clock) -> None:
        self.setup, self.front, self.clock = setup, front, clock


def working(roles: Roles) -> list[Role]:
    """The role that every instance works in; one that drains has none."""
    changing = roles.change.index if roles.change else None
    return [role for index, role in enumerate(roles.all) if index != changing]


def _hash(block: int) -> bytes:
    return block.to_bytes(32, "big")


def _deployment(rules: Rules) -> Deployment:
    routing: dict[str, Any] = {
        "offload_threshold": THRESHOLD,
        "policy": rules.policy.value,
        "plan": "given.toml",
        "short_term_loop": rules.moving_threshold,
        "reroling": rules.split,
        "pull": rules.pulls and rules.policy is PolicyName.ADAPTIVE,
        "bandwidth": rules.bandwidth.value,
    }
    roles = [role.value for role in rules.roles] if rules.split else ["both"] * len(HOME)
    home = {name: {"pool": PD_POOL, "role": role} for name, role in zip(HOME, roles, strict=True)}
    away = {
        name: {
            "role": "prfaas",
            "pools": {name: {}},
            "engines": {engine: {"pool": name} for engine in engines},
        }
        for name, engines in CLUSTERS.items()
    }
    if rules.second_price is not None:
        routing["second_price"] = rules.second_price
    if rules.ttft_max_s is not None:
        routing["ttft_max"] = f"{rules.ttft_max_s}s"
    return Deployment.model_validate(
        {
            "model": {"name": "tiny", "path": "nowhere"},
            "routing": routing,
            "security": {"identities": "nowhere"},
            "clusters": {PD_POOL: {"role": "pd", "pools": {PD_POOL: {}}, "engines": home}, **away},
        }
    )


def _setup(rules: Rules) -> Setup:
    """Without a split no instance only decodes: those that prefill decode as well."""
    links = {
        name: LinkSetup(1.0, price_per_tb=price, planned_bits_per_s=PLANNED_BITS_PER_S)
        for name, price in PRICES_PER_TB.items()
    }
    num_prefill = rules.roles.count(Role.PREFILL) if rules.split else len(HOME)
    return Setup(
        prfaas=tuple(
            ClusterSetup(name, len(names), COSTS, links[name], UNLIMITED)
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
        ),
        placement=PlacementSetup(rules.pulls, second_price=rules.second_price),
        name=PD_POOL,
        cache=UNLIMITED,
        blocks=BlockSetup(BLOCK_TOKENS),
        slo=SloSetup(None if rules.ttft_max_s is None else rules.ttft_max_s * NS_PER_S),
    )
