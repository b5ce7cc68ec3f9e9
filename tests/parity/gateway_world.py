"""The gateway's driver in a world of its own.

It gets engines' health, pool states with telemetry, and prompts as hash chains, which it looks up
in its prefix index, which has pools and engines' own memories.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prfaas.config.deployment import Deployment
from prfaas.core.control.role_loop import Role, RoleLoop, StageLoad
from prfaas.core.control.roles import Roles
from prfaas.core.dispatch.types import Arrival, ThresholdMoved
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.prefix_index import PrefixIndex, Tier
from prfaas.core.routing.policies import PolicyName
from prfaas.gateway.loops.loops import Reroling
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.dispatcher_setup import Profiles
from prfaas.gateway.routing.part_states import PoolView
from prfaas.pool.send.link_control import LinkMeter
from prfaas.wire.sockets import TcpInfo

from .rules import (
    AWAY,
    BLOCK_TOKENS,
    CALIBRATION,
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

BLOCK_BYTES = COSTS.kv_bytes(512) - COSTS.state_bytes
LAYOUT = Layout(
    b"L" * 32, BLOCK_TOKENS, "7", (CacheGroup(0, GroupKind.FULL_ATTENTION, 512, BLOCK_BYTES),)
)
"""Of the bytes of the plan: the simulator's instances report no other ones."""


class GatewayWorld(World):
    """The gateway's `Driver`, fed as `Engines`, `Subscription` and `Planner` feed it."""

    driver: Driver
    decode_names = HOME

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._index = PrefixIndex()
        pools = rules.pools
        for pool in set(pools.values()):
            self._index.end_snapshot(pool)
        profiles = Profiles(
            COSTS,
            dict.fromkeys(CLUSTERS, COSTS),
            dict.fromkeys(CLUSTERS, PLANNED_BITS_PER_S),
            PRICES_PER_TB,
        )
        self.driver = Driver(_deployment(rules), profiles, self._index, CALIBRATION)
        self.links = self.driver.links()
        self._views = {
            pool: PoolView(is_live=True, layouts={n: LAYOUT for n in pools if pools[n] == pool})
            for pool in dict.fromkeys(pools.values())
        }
        self._meters = {ends: (LinkMeter(), Delivered()) for ends in self.links}
        self._arrived: dict[Ends, int] = {}
        for pool, view in self._views.items():
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
            tenant=f"t{family}",
            layout=LAYOUT,
            hashes=hashes,
        )
        if again:
            return self.driver.route_again(number, "", now_ns)
        return self.driver.route(arrival, now_ns)[0]

    def store(self, holder: str, family: int, num_blocks: int) -> None:
        keys = [BlockKey(0, _hash(block)) for block in block_ids(family, num_blocks)]
        tier = Tier.HOST if holder in self._views else Tier.DEVICE
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

    def set_link(self, ends: Ends, up: bool, now_ns: int) -> list[int]:
        source, destination = ends
        before = self._views[source]
        links = {**before.links, destination: up}
        self._views[source] = replace(before, links=links, telemetry={})
        lost = self.driver.pool_seen(source, self._views[source], now_ns)
        # Other links of the pool may have been down before, with requests that nobody ended here.
        return [number for number in lost if number in self.dispatcher.requests.crossing(*ends)]

    def count_link(self, ends: Ends, seen: Counted, now_ns: int) -> None:
        meter, delivered = self._meters[ends]
        acked = TcpInfo(RTT_NS, 10, 0, delivered.go_on(seen.bits_per_s, now_ns), 0)
        meter.sample(now_ns, [acked], int(seen.is_busy), 0)
        self._arrived[ends] = seen.arrived_bytes

    def report_link(self, ends: Ends, now_ns: int) -> None:
        if ends not in self._arrived:
            return
        meter, _ = self._meters[ends]
        telemetry = meter.telemetry(now_ns, open_arrived_bytes=self._arrived[ends])
        source, destination = ends
        self._views[source] = replace(self._views[source], telemetry={destination: telemetry})
        self.driver.pool_seen(source, self._views[source], now_ns)

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
        return self.driver.dispatcher.tick(now_ns)


def _hash(block: int) -> bytes:
    return block.to_bytes(32, "big")


ELSEWHERE = "http://127.0.0.1:1"
"""Engines of one machine would share its cores."""


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
    pools = rules.pools
    local = {
        name: {"pool": pools[name], "role": role, "url": ELSEWHERE}
        for name, role in zip(HOME, roles, strict=True)
    }
    remote = {
        name: {
            "role": "prfaas",
            "pools": {pools[engine]: {"address": "127.0.0.1:1"} for engine in engines},
            "engines": {engine: {"pool": pools[engine], "url": ELSEWHERE} for engine in engines},
        }
        for name, engines in CLUSTERS.items()
    }
    at_local = {pools[name]: {"address": "127.0.0.1:1"} for name in HOME}
    clusters = {PD_POOL: {"role": "pd", "pools": at_local, "engines": local}, **remote}
    tenants: dict[str, dict[str, Any]] = {
        name: {"keys": [f"sha256:{n:064}"]} for n, name in enumerate(TENANTS)
    }
    if rules.regions:
        clusters = {name: table | {"region": REGIONS[name]} for name, table in clusters.items()}
        limits = {name: regions for name, regions in TENANTS.items() if regions is not None}
        tenants = {name: t | {"regions": limits.get(name)} for name, t in tenants.items()}
    if rules.second_price is not None:
        routing["second_price"] = rules.second_price
    if rules.ttft_max_s is not None:
        routing["ttft_max"] = f"{rules.ttft_max_s}s"
    return Deployment.model_validate(
        {
            "model": {"name": "tiny", "path": "nowhere"},
            "routing": routing,
            "security": {"identities": "nowhere"},
            "clusters": clusters,
            "tenants": tenants,
        }
    )
