"""The two drivers of the core, side by side: the gateway's and the simulator's, without sockets.

A `World` takes events in plain words and hands them to its driver in the driver's own. The
gateway's gets engines' health, pool states with telemetry, and prompts as hash chains, which it
looks up in its prefix index. The simulator's gets names, link reports, and prompts as block ids of
its caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prfaas.config.deployment import Deployment
from prfaas.core.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.costs import Costs
from prfaas.core.dispatch import Refused, Routed, ThresholdMoved
from prfaas.core.link_book import LinkReport
from prfaas.core.policies import PolicyName
from prfaas.core.prefix_index import PrefixIndex
from prfaas.gateway.driver import Ask, Driver, PoolView
from prfaas.gateway.profiles import Profiles
from prfaas.sim.decode import DecodeLimits
from prfaas.sim.front import Front
from prfaas.sim.request import Request
from prfaas.sim.setup import (
    BlockSetup,
    CacheSetup,
    ClusterSetup,
    LinkSetup,
    RoutingSetup,
    Setup,
    SloSetup,
)
from prfaas.units import NS_PER_S
from prfaas.wire.messages import LinkTelemetry

PD_POOL, PRFAAS_POOL = "pd", "prfaas"
BLOCK_TOKENS = 512
THRESHOLD = 4000
PLANNED_BITS_PER_S = 2e9
RTT_NS = 30_000_000
HOME, AWAY = ("p00000", "p00001"), ("r00000", "r00001", "r00002")
NUM_BLOCKS_MAX = 40
"""Blocks of the longest prompt; of a prompt one more token follows its blocks."""

UNLIMITED = CacheSetup(host_blocks=None)
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


@dataclass(frozen=True)
class Seen:
    """What a pool node measured of the link."""

    bits_per_s: int
    arrived_bytes: int
    is_queued: bool
    age_ns: int


class World(Protocol):
    """Events that every driver understands."""

    def arrive(self, number: int, family: int, num_blocks: int, now_ns: int, again: bool) -> Action:
        """A prompt of `num_blocks` blocks, equal to all of its family as far as they reach."""

    def prefilled(self, number: int, now_ns: int) -> None: ...
    def landed(self, number: int) -> None: ...
    def end(self, number: int, now_ns: int) -> None: ...
    def store(self, pool: str, family: int, num_blocks: int) -> None: ...
    def set_ready(self, name: str, ready: bool, now_ns: int) -> None: ...
    def report_load(self, name: str, num_waiting: int, now_ns: int) -> None: ...
    def set_link(self, up: bool, now_ns: int) -> list[int]: ...
    def report_link(self, seen: Seen, now_ns: int) -> None: ...
    def pause(self, now_ns: int) -> None:
        """A second without news of the link."""

    def tick(self, now_ns: int) -> list[ThresholdMoved]: ...
    def held(self) -> tuple[int, int]:
        """Open requests, and bytes promised to the link."""


def block_ids(family: int, num_blocks: int) -> tuple[int, ...]:
    """Blocks of a prompt: those of one family share their beginning."""
    return tuple(1000 * family + n for n in range(num_blocks))


class GatewayWorld:
    """The gateway's `Driver`, fed as `Engines`, `Subscription` and `Planner` feed it."""

    def __init__(self, rules: Rules) -> None:
        self._index = PrefixIndex()
        for pool in (PD_POOL, PRFAAS_POOL):
            self._index.end_snapshot(pool)
        profiles = Profiles(COSTS, {"prfaas": COSTS}, {"prfaas": PLANNED_BITS_PER_S})
        self.driver = Driver(_deployment(rules), profiles, self._index)
        self._pd = PoolView(is_live=True, layouts=dict.fromkeys(HOME, LAYOUT))
        self._prfaas = PoolView(is_live=True, layouts=dict.fromkeys(AWAY, LAYOUT))
        self.driver.pool_seen(PD_POOL, self._pd, 0)
        self.driver.pool_seen(PRFAAS_POOL, self._prfaas, 0)
        for name in (*HOME, *AWAY):
            self.driver.engine_ready(name, 10**6, 0)

    def arrive(self, number: int, family: int, num_blocks: int, now_ns: int, again: bool) -> Action:
        num_tokens = num_blocks * BLOCK_TOKENS + 1
        hashes = [_hash(block) for block in block_ids(family, num_blocks)]
        ask = Ask(number, num_tokens, num_tokens, LAYOUT, hashes, offloadable=True)
        return self.driver.route(ask, now_ns, again=again)

    def prefilled(self, number: int, now_ns: int) -> None:
        self.driver.prefilled(number, now_ns)

    def landed(self, number: int) -> None:
        self.driver.transfer_over(number)

    def end(self, number: int, now_ns: int) -> None:
        self.driver.end(number, now_ns)

    def store(self, pool: str, family: int, num_blocks: int) -> None:
        keys = [BlockKey(0, _hash(block)) for block in block_ids(family, num_blocks)]
        self._index.add(pool, LAYOUT.layout_id, keys)

    def set_ready(self, name: str, ready: bool, now_ns: int) -> None:
        if ready:
            self.driver.engine_ready(name, 10**6, now_ns)
        else:
            self.driver.engine_gone(name, now_ns)

    def report_load(self, name: str, num_waiting: int, now_ns: int) -> None:
        self.driver.engine_seen(name, num_waiting, now_ns)

    def set_link(self, up: bool, now_ns: int) -> list[int]:
        self._prfaas = replace(self._prfaas, links={PD_POOL: up}, telemetry={})
        return self.driver.pool_seen(PRFAAS_POOL, self._prfaas, now_ns)

    def report_link(self, seen: Seen, now_ns: int) -> None:
        telemetry = LinkTelemetry(
            age_ns=seen.age_ns,
            goodput_bits_per_s=seen.bits_per_s,
            rtt_ns=RTT_NS,
            queued_bytes=int(seen.is_queued),
            in_flight_bytes=0,
            retransmits=0,
            delivery_bits_per_s=0,
            window_segments=0,
            num_connections=1,
            open_arrived_bytes=seen.arrived_bytes,
        )
        self._prfaas = replace(self._prfaas, telemetry={PD_POOL: telemetry})
        self.driver.pool_seen(PRFAAS_POOL, self._prfaas, now_ns)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        return self.driver.tick(now_ns)

    def pause(self, now_ns: int) -> None:
        self.driver.refresh(now_ns)

    def held(self) -> tuple[int, int]:
        dispatcher = self.driver.dispatcher
        return dispatcher.num_open, dispatcher.promised_bytes


@dataclass
class SimulatorWorld:
    """The simulator's `Front`, fed as `Simulation`, `Transport` and `Telemetry` feed it."""

    rules: Rules
    front: Front = field(init=False)
    _requests: dict[int, Request] = field(default_factory=dict)
    _up: bool = False
    _seen: Seen | None = None

    def __post_init__(self) -> None:
        self.front = Front(_setup(self.rules))
        self.front.set_link(PRFAAS_POOL, up=False)

    def arrive(self, number: int, family: int, num_blocks: int, now_ns: int, again: bool) -> Action:
        blocks = block_ids(family, num_blocks)
        request = Request(number, now_ns, num_blocks * BLOCK_TOKENS + 1, 1, blocks)
        self._requests[number] = request
        hits = self.front.caches.hits(request)
        return self.front.route(request, hits, now_ns, again=again)

    def prefilled(self, number: int, now_ns: int) -> None:
        self.front.prefilled(self._requests[number], now_ns)

    def landed(self, number: int) -> None:
        self.front.landed(self._requests[number])

    def end(self, number: int, now_ns: int) -> None:
        self.front.ended(self._requests[number], now_ns)

    def store(self, pool: str, family: int, num_blocks: int) -> None:
        self.front.caches.pools[pool].store(block_ids(family, num_blocks))

    def set_ready(self, name: str, ready: bool, now_ns: int) -> None:
        self.front.set_ready(name, ready=ready, now_ns=now_ns)

    def report_load(self, name: str, num_waiting: int, now_ns: int) -> None:
        self.front.report_loads(now_ns, [(name, num_waiting)])

    def set_link(self, up: bool, now_ns: int) -> list[int]:
        self._up, self._seen = up, None
        if up:
            self._idle(now_ns)
        return self.front.set_link(PRFAAS_POOL, up=up)

    def report_link(self, seen: Seen, now_ns: int) -> None:
        self._seen = seen
        if not self._up:
            return
        use = 1.0 if seen.is_queued else 0.0
        at_ns = now_ns - seen.age_ns
        report = LinkReport(at_ns, float(seen.bits_per_s), seen.arrived_bytes, use, RTT_NS)
        self.front.report_link(PRFAAS_POOL, PD_POOL, report)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        return self.front.tick(now_ns)

    def pause(self, now_ns: int) -> None:
        if self._up and not self.front.dispatcher.promised_bytes:
            self._idle(now_ns)

    def _idle(self, now_ns: int) -> None:
        seen = self._seen
        rate, rtt_ns = (PLANNED_BITS_PER_S, 0) if seen is None else (seen.bits_per_s, RTT_NS)
        report = LinkReport(now_ns, float(rate), 0, 0.0, rtt_ns)
        self.front.report_link(PRFAAS_POOL, PD_POOL, report)

    def held(self) -> tuple[int, int]:
        return self.front.dispatcher.num_open, self.front.dispatcher.promised_bytes


def _hash(block: int) -> bytes:
    return block.to_bytes(32, "big")


def _deployment(rules: Rules) -> Deployment:
    routing: dict[str, Any] = {
        "offload_threshold": THRESHOLD,
        "policy": rules.policy.value,
        "plan": "given.toml",
        "short_term_loop": rules.moving_threshold,
    }
    if rules.ttft_max_s is not None:
        routing["ttft_max"] = f"{rules.ttft_max_s}s"
    return Deployment.model_validate(
        {
            "model": {"name": "tiny", "path": "nowhere"},
            "routing": routing,
            "security": {"identities": "nowhere"},
            "clusters": {
                name: {
                    "role": name,
                    "pools": {name: {}},
                    "engines": {engine: {"pool": name} for engine in engines},
                }
                for name, engines in ((PD_POOL, HOME), (PRFAAS_POOL, AWAY))
            },
        }
    )


def _setup(rules: Rules) -> Setup:
    """No instances that only decode: those that prefill decode as well, as the gateway's do."""
    return Setup(
        prfaas=(ClusterSetup(PRFAAS_POOL, len(AWAY), COSTS, LinkSetup(1.0), UNLIMITED),),
        num_prefill=len(HOME),
        num_decode=0,
        costs=COSTS,
        step_ns=lambda _batch, _context: 1,
        decode=DecodeLimits(1),
        routing=RoutingSetup(
            rules.policy,
            THRESHOLD,
            moving_threshold=rules.moving_threshold,
            admission=rules.ttft_max_s is not None,
        ),
        name=PD_POOL,
        cache=UNLIMITED,
        blocks=BlockSetup(BLOCK_TOKENS),
        slo=SloSetup(None if rules.ttft_max_s is None else rules.ttft_max_s * NS_PER_S),
    )
