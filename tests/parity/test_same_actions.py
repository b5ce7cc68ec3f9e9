"""The same events through the gateway's driver and the simulator's give the same actions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import event as noted
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.control.role_loop import Role, StageLoad
from prfaas.core.dispatch.types import RefusedRequest, Routed
from prfaas.core.routing.decision import Path
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S

from .gateway_world import GatewayWorld
from .rules import (
    AWAY,
    BLOCK_TOKENS,
    CLUSTERS,
    HOME,
    NUM_BLOCKS_MAX,
    PD_POOL,
    PLANNED_BITS_PER_S,
    Action,
    Counted,
    Rules,
    World,
    held,
    signals,
)
from .simulator_world import SimulatorWorld

EVERYBODY = HOME + AWAY
ROLE_KINDS = ("decode", "weigh", "look", "queue", "queue", "turn")
KINDS = (
    *("arrive",) * 6,
    *("prefilled", "landed", "ready", "first", "end") * 2,
    *("store", "load", "tick", "again", "engine", "link"),
    *("count", "count", "report"),
    *("store", "forget"),
    *ROLE_KINDS,
)

POLICIES = [policy for policy in PolicyName if policy is not PolicyName.COST]
"""Policies whose settings a deployment without prices has."""


@dataclass(frozen=True)
class Event:
    """Something happens `after_ns` the last event; the numbers mean what `kind` makes of them."""

    kind: str
    after_ns: int
    a: int
    b: int
    yes: bool


EVENTS = st.builds(
    Event,
    kind=st.sampled_from(KINDS),
    after_ns=st.integers(0, NS_PER_S) | st.integers(0, 5 * NS_PER_S),
    a=st.integers(0, 2**16),
    b=st.integers(0, 2**31),
    yes=st.booleans(),
)
RULES = st.builds(
    Rules,
    policy=st.sampled_from(POLICIES),
    ttft_max_s=st.none() | st.integers(1, 20),
    moving_threshold=st.booleans(),
    pulls=st.booleans(),
    abundant=st.booleans(),
    priced=st.booleans(),
    split=st.booleans(),
    regions=st.booleans(),
    num_hosts=st.integers(1, 3),
)


class Run:
    """One driver and the requests that are open in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now_ns = 0
        self.num_arrived = 0
        self.open: dict[int, tuple[int, int]] = {}
        self.stored: dict[tuple[str, int], int] = {}
        """Blocks of a family that a pool, or an engine's own memory, holds."""
        self.own: Counter[str] = Counter()
        """Actions in which an instance's own memory holds more than its pool."""
        self.engines = AWAY if world.rules.split else EVERYBODY
        """Those that may fail: PD instances with roles do not in the simulator."""
        self.links = list(world.links)
        self.holders = (*dict.fromkeys(world.rules.pools.values()), *EVERYBODY)
        for ends in self.links:
            world.set_link(ends, True, 0)

    def apply(self, event: Event) -> object:
        """Let an event happen; what the driver did."""
        self.now_ns += event.after_ns
        if event.kind in ROLE_KINDS:
            return self._apply_role(event) if self.world.rules.split else None
        world, now, number = self.world, self.now_ns, self._number(event)
        match event.kind:
            case "arrive":
                self.num_arrived += 1
                self.open[self.num_arrived] = event.a % 4, 1 + event.b % NUM_BLOCKS_MAX
                return self._arrive(self.num_arrived, again=False)
            case "again" if self.open:
                return self._arrive(number, again=True)
            case "prefilled" | "landed" | "ready" | "first" | "end" if self.open:
                self._go_on(event.kind, number, event.b if event.b % 2 else 0)
            case "store":
                self._store(self.holders[event.a % len(self.holders)], event)
            case "forget":
                self._forget(EVERYBODY[event.a % len(EVERYBODY)])
            case "load":
                names = self.engines
                world.report_load(names[event.a % len(names)], event.b % 6, now)
            case "engine":
                names = self.engines
                world.set_ready(names[event.a % len(names)], event.yes and event.b % 3 > 0, now)
            case "link":
                # More often up than down, or little would be sent over it.
                return sorted(world.set_link(self._link(event), event.yes or event.a % 2 == 0, now))
            case "count":
                # More often busy than not, or no link would ever be filled.
                seen = Counted(10**7 + event.b, event.a * 1000, event.yes or event.a % 2 == 0)
                world.count_link(self._link(event), seen, now)
            case "report":
                world.report_link(self._link(event), now)
            case "tick":
                return world.tick(now)
        return None

    def _link(self, event: Event) -> tuple[str, str]:
        return self.links[event.b % len(self.links)]

    def _store(self, holder: str, event: Event) -> None:
        family, num_blocks = event.a // 16 % 4, 1 + event.b % NUM_BLOCKS_MAX
        self.world.store(holder, family, num_blocks)
        key = holder, family
        self.stored[key] = max(self.stored.get(key, 0), num_blocks)

    def _forget(self, engine: str) -> None:
        self.world.forget(engine)
        self.stored = {key: num for key, num in self.stored.items() if key[0] != engine}

    def _count_own(self, found: Routed, family: int, num_blocks: int) -> None:
        """Count what the memory of an instance holds beyond its pool."""
        if found.facts.pd_hit_tokens > found.present_tokens:
            self.own["home"] += 1
        if found.decision.path is Path.REMOTE and not found.pulled_from:
            in_pool = min(self.stored.get((found.source, family), 0), num_blocks) * BLOCK_TOKENS
            self.own["away"] += found.hit_tokens > in_pool

    def _go_on(self, kind: str, number: int, num_bytes: int) -> None:
        if kind == "prefilled":
            self.world.prefilled(number, self.now_ns)
        elif kind == "landed":
            self.world.landed(number, self.now_ns, num_bytes)
        elif kind == "ready":
            self.world.ready(number, self.now_ns)
        elif kind == "first":
            self.world.first_token(number, self.now_ns)
        else:
            self.world.end(number, self.now_ns)
            del self.open[number]

    def _apply_role(self, event: Event) -> object:
        """Apply an event of a site whose PD instances have roles."""
        world, now = self.world, self.now_ns
        if event.kind == "decode":
            return world.choose_decode(self._number(event)) if self.open else None
        if event.kind == "look":
            return world.look(now)
        if event.kind == "turn":
            return world.turn(now)
        if event.kind == "queue":
            name = HOME[event.a % len(HOME)]
            world.report_queue(name, event.b % 3, event.b % 5 if event.yes else 0, now)
            return None
        loads = StageLoad(1 + event.a % 3, event.b * 200), StageLoad(0, 0)
        return world.weigh(*(loads if event.yes else loads[::-1]), now)

    def _number(self, event: Event) -> int:
        return sorted(self.open)[event.a % len(self.open)] if self.open else -1

    def _arrive(self, number: int, *, again: bool) -> Action:
        found = self.world.arrive(number, *self.open[number], self.now_ns, again)
        if isinstance(found, RefusedRequest):
            del self.open[number]
        else:
            self._count_own(found, *self.open[number])
        return found


@settings(max_examples=300, deadline=None)
@given(rules=RULES, events=st.lists(EVENTS, max_size=60))
def test_both_drivers_act_alike(rules: Rules, events: list[Event]) -> None:
    live, simulated = Run(GatewayWorld(rules)), Run(SimulatorWorld(rules))
    for each in events:
        action = live.apply(each)
        assert action == simulated.apply(each)
        _same_state(live, simulated)
        noted(_name(action))


def _same_state(live: Run, simulated: Run) -> None:
    """Books and the known state of links have to be the same as well."""
    assert live.links == simulated.links
    assert held(live.world) == held(simulated.world)
    assert signals(live.world, live.now_ns) == signals(simulated.world, simulated.now_ns)
    factors = [each.world.dispatcher.carried.factor for each in (live, simulated)]
    assert factors[0] == factors[1]


def _kinds_of_signals(run: Run) -> Iterator[str]:
    """Rate and utilisation of the links, as far as they are known."""
    for state, _ in signals(run.world, run.now_ns):
        if state is None:
            yield "unknown"
            continue
        yield "plan" if state.bits_per_s == PLANNED_BITS_PER_S else "measured"
        yield {0.0: "idle", 1.0: "full"}.get(state.utilisation, "partly")


def _name(action: object) -> str:
    match action:
        case [Role(), *_]:
            return "draining" if len(action) < len(HOME) else "roles"
        case int():
            return "decode"
        case Routed():
            return _way(action)
        case RefusedRequest():
            return action.reason.value
        case [_, *_]:
            return "several"
        case _:
            return "nothing"


def _way(routed: Routed) -> str:
    if routed.pulls_from_host:
        return f"pulled from a host, {routed.decision.path.value}"
    if routed.changes_host:
        return "handed to a host"
    return "pulled" if routed.pulls else routed.decision.reason.value


@pytest.mark.parametrize("policy", POLICIES)
def test_long_histories_reach_every_kind_of_action(policy: PolicyName) -> None:
    """The property above says nothing of what its histories never bring about."""
    seen: Counter[str] = Counter()
    own: Counter[str] = Counter()
    known: Counter[str] = Counter()
    for seed in range(20):
        draw = random.Random(seed)
        split = seed % 3 == 2
        ttft_max_s, pulls = 4 if seed % 2 else None, seed % 4 > 1
        rules = Rules(
            policy,
            ttft_max_s,
            moving_threshold=True,
            pulls=pulls,
            abundant=seed % 5 > 2,
            priced=seed % 7 > 3,
            split=split,
            regions=seed % 6 > 3,
        )
        live, simulated = Run(GatewayWorld(rules)), Run(SimulatorWorld(rules))
        # First tokens at any time refute all predictions, and then nothing is refused.
        kinds = KINDS if seed % 4 == 3 else [kind for kind in KINDS if kind != "ready"]
        kinds = [kind for kind in kinds if split or kind not in ROLE_KINDS]
        for _ in range(500):
            kind, gap_ns = draw.choice(kinds), draw.randrange(NS_PER_S)
            each = Event(
                kind, gap_ns, draw.randrange(2**16), draw.randrange(2**31), draw.random() < 0.8
            )
            action = live.apply(each)
            assert action == simulated.apply(each)
            _same_state(live, simulated)
            seen[_name(action)] += 1
            known.update(_kinds_of_signals(live))
        assert live.own == simulated.own
        own += live.own
    expected = {
        PolicyName.LOCAL: {"always_local"},
        PolicyName.REMOTE: {"always_remote", "link_down"},
        PolicyName.PAPER: {"above_threshold", "below_threshold", "link_down"},
        PolicyName.OBSERVED: {"above_threshold", "below_threshold", "link_down"},
        PolicyName.ADAPTIVE: {
            *("above_threshold", "below_threshold", "faster_remote", "link_down"),
        },
    }[policy]
    if policy is PolicyName.PAPER:  # by its rule for abundant bandwidth
        expected |= {"pulled"}
    expected |= {"no_instance", "decode", "roles", "draining"}
    if policy is not PolicyName.OBSERVED:  # it takes no plan, and refuses nobody
        expected |= {"predicted_late"}
    assert expected <= seen.keys(), seen
    assert seen["several"] or policy is PolicyName.LOCAL
    assert {"plan", "measured", "idle", "full", "partly"} <= known.keys()
    # These promise no bytes to links: the one sends nothing, the other has no plan to count by.
    assert known["unknown"] or policy in (PolicyName.LOCAL, PolicyName.OBSERVED)
    assert own["home"] > 20
    assert own["away"] > 20 or policy is PolicyName.LOCAL


@pytest.mark.parametrize("num_hosts", [2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_long_histories_of_several_hosts_move_blocks_inside_clusters(
    num_hosts: int, split: bool
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        draw, policy = random.Random(seed), PolicyName.ADAPTIVE if seed % 4 else PolicyName.REMOTE
        rules = Rules(policy, None, True, pulls=seed % 2 > 0, split=split, num_hosts=num_hosts)
        live, simulated = Run(GatewayWorld(rules)), Run(SimulatorWorld(rules))
        kinds = [kind for kind in KINDS if split or kind not in ROLE_KINDS]
        kinds += ["store", "load", "arrive", "end"] * 8
        for _ in range(400):
            gap_ns, a, b = draw.randrange(NS_PER_S), draw.randrange(2**16), draw.randrange(2**31)
            each = Event(draw.choice(kinds), gap_ns, a, b, draw.random() < 0.8)
            action = live.apply(each)
            assert action == simulated.apply(each)
            _same_state(live, simulated)
            seen[_name(action)] += 1
    assert seen["pulled from a host, local"] > 3, seen
    assert seen["pulled from a host, remote"] > 3, seen
    assert seen["handed to a host"] > 3 or not split, seen


@pytest.mark.parametrize(("priced", "source"), [(False, "far"), (True, "prfaas")])
def test_both_send_prompts_over_the_cheaper_of_two_equal_links(priced: bool, source: str) -> None:
    rules = Rules(PolicyName.ADAPTIVE, None, moving_threshold=False, priced=priced)
    for world in (GatewayWorld(rules), SimulatorWorld(rules)):
        for ends in world.links:
            world.set_link(ends, True, 0)
        action = world.arrive(1, 0, NUM_BLOCKS_MAX, 0, False)
        assert isinstance(action, Routed)
        assert action.source == source


def test_a_prefix_that_is_stored_while_requests_wait_shortens_both_queues() -> None:
    rules = Rules(PolicyName.LOCAL, None, moving_threshold=False)
    predicted: list[list[int | None]] = []
    for world in (GatewayWorld(rules), SimulatorWorld(rules)):
        for number in range(3 * len(HOME)):
            world.arrive(number, 0, NUM_BLOCKS_MAX, 0, False)
        before = _predicted(world.arrive(100, 1, 1, 0, False))
        world.store(PD_POOL, 0, NUM_BLOCKS_MAX - 1)
        for name in HOME:
            world.report_load(name, 3, 0)
        predicted.append([before, _predicted(world.arrive(101, 1, 1, 0, False))])
    assert predicted[0] == predicted[1]
    before_ns, after_ns = predicted[0]
    assert before_ns is not None
    assert after_ns is not None
    # The first prompt of every instance runs; the two behind it have one block left of forty.
    assert after_ns < before_ns * 0.4


def _predicted(action: Action) -> int | None:
    assert isinstance(action, Routed)
    return action.decision.predicted_ns


def test_lasting_pressure_moves_both_thresholds_alike() -> None:
    rules = Rules(PolicyName.ADAPTIVE, None, moving_threshold=True)
    live, simulated = Run(GatewayWorld(rules)), Run(SimulatorWorld(rules))
    moved: list[object] = []
    reasons: set[str] = set()
    for step in range(60):
        # Others fill the PrfaaS cluster, and the home cluster idles.
        arrivals = [Event("arrive", 0, step, NUM_BLOCKS_MAX - 1, True)]
        idle = [Event("load", 0, name, 0, True) for name in range(len(HOME))]
        loads = [Event("load", 0, len(HOME) + name, 5, True) for name in range(len(AWAY))]
        seen = [
            Event(kind, 0, 0, 10**9 + cluster, False)
            for cluster in range(len(CLUSTERS))
            for kind in ("count", "report")
        ]
        for each in (*arrivals, *loads, *idle, *seen, Event("tick", NS_PER_S, step, 0, True)):
            action = live.apply(each)
            assert action == simulated.apply(each)
            reasons.add(_name(action))
            moved += [action] if isinstance(action, list) and action else []
    assert moved
    assert "faster_local" in reasons


@pytest.mark.parametrize("split", [False, True])
def test_prefixes_that_lie_away_are_pulled_alike(split: bool) -> None:
    rules = Rules(PolicyName.ADAPTIVE, None, moving_threshold=False, pulls=True, split=split)
    live, simulated = Run(GatewayWorld(rules)), Run(SimulatorWorld(rules))
    draw, reasons, promised = random.Random(1), Counter[str](), set[int]()
    for step in range(40):
        # Below the threshold, and all but the last block lies in one of the PrfaaS clusters.
        family, length = draw.randrange(4), draw.randrange(2, 7)
        names = range(16 * family, 16 * family + 16)
        where = next(a for a in names if live.holders[a % len(live.holders)] in CLUSTERS)
        held = Event("store", 0, where, length - 2, True)
        loads = [Event("load", 0, name, 0, True) for name in range(len(HOME) + len(AWAY))]
        seen = [
            Event(kind, 0, 0, 10**9 + cluster, False)
            for cluster in range(len(CLUSTERS))
            for kind in ("count", "report")
        ]
        arrival = Event("arrive", 0, family, length - 1, True)
        cut = [Event("link", 0, 1, step, False), Event("link", 0, 0, step, True)] * (step % 7 == 0)
        over = [Event(kind, 0, step, 0, True) for kind in ("landed", "end") if step % 3]
        for each in (*loads, *seen, held, arrival, *cut, *over, Event("tick", 10**8, 0, 0, True)):
            action = live.apply(each)
            assert action == simulated.apply(each)
            _same_state(live, simulated)
            reasons[_name(action)] += 1
            if isinstance(action, Routed) and action.pulls:
                assert action.source in CLUSTERS
                assert action.hit_tokens - action.facts.pd_hit_tokens == action.decision.pull_tokens
                promised.add(action.shipped_bytes)
    assert reasons["pulled"] > 3, reasons
    assert min(promised) > 0


def test_both_keep_the_prompts_of_a_tenant_in_its_regions() -> None:
    rules = Rules(PolicyName.REMOTE, None, moving_threshold=False, regions=True)
    seen = []
    for world in (GatewayWorld(rules), SimulatorWorld(rules)):
        found: dict[int, list[str]] = {}
        for up in (("far", "prfaas"), ("far",)):
            for ends in world.links:
                world.set_link(ends, ends[0] in up, 0)
            for number, family in enumerate(range(4), 10 * len(up)):
                action = world.arrive(number, family, NUM_BLOCKS_MAX, 0, False)
                assert isinstance(action, Routed)
                found.setdefault(family, []).append(action.source)
        seen.append(found)
    assert seen[0] == seen[1]
    for family, sources in seen[0].items():
        may_leave = family in (1, 3)
        assert ("far" in sources) == may_leave, seen
        assert "prfaas" in sources or may_leave
