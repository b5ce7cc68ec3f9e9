"""The machine over the gateway's books and over the simulator's: the same actions, for each event.

Histories hold every kind of event that the core has, failures included.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from prfaas.core.dispatch.types import Routed
from prfaas.core.request.actions import ACTIONS, Action
from prfaas.core.request.events import (
    EVENTS,
    AnyEvent,
    Begun,
    EngineBroke,
    Event,
    FirstToken,
    PrefillDone,
    PullNotAsked,
    TurnCame,
    Woke,
)
from prfaas.core.request.states import Stage
from prfaas.core.routing.decision import Path
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S
from tests.core.request.drawn_events import MAKERS, flip

from .gateway_world import GatewayWorld
from .lives import Lives
from .rules import AWAY, HOME, NUM_BLOCKS_MAX, Counted, Rules
from .simulator_world import SimulatorWorld

HISTORIES, SHARDS = 2000, 8
Draw = random.Random
Done = Counter[type[Action] | str]
"""How often each kind of action was taken, and which ways blocks took inside a cluster."""
RELAY = "relay"
INSIDE = "pull for a local prefill", "pull for a remote prefill", "hand-off"
WEIGHTS = {PrefillDone: 4, FirstToken: 4, EngineBroke: 3, Woke: 6, TurnCame: 4, PullNotAsked: 1}


def test_histories_hold_every_kind_of_event_that_the_core_has() -> None:
    assert set(MAKERS) == set(EVENTS)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_same_events_give_the_same_actions_over_both_drivers(shard: int) -> None:
    drawn: Counter[type[Event]] = Counter()
    done: Done = Counter()
    for seed in range(shard, HISTORIES, SHARDS):
        _history(random.Random(seed), drawn, done)
    assert set(drawn) == set(EVENTS)
    assert {what for what, count in done.items() if count} == {*ACTIONS, *INSIDE, RELAY}


def _history(draw: Draw, drawn: Counter[type[Event]], done: Done) -> None:
    split = draw.random() < 0.4
    policy = draw.choice([PolicyName.ADAPTIVE, PolicyName.ADAPTIVE, PolicyName.REMOTE])
    pulls, num_hosts = draw.random() < 0.7, draw.choice((1, 1, 2, 3))
    rules = Rules(policy, None, flip(draw), pulls=pulls, split=split, num_hosts=num_hosts)
    both = Lives(GatewayWorld(rules)), Lives(SimulatorWorld(rules))
    for lives in both:
        for ends in lives.world.links:
            lives.world.set_link(ends, True, 0)
    kinds = [kind for kind in EVENTS if kind is not Begun]
    weights = [WEIGHTS.get(kind, 2) for kind in kinds]
    for step in range(draw.randrange(10, 40)):
        after_ns = draw.choice((0, NS_PER_S // 10, NS_PER_S, 12 * NS_PER_S))
        for lives in both:
            lives.now_ns += after_ns
        numbers = both[0].numbers
        if not numbers or draw.random() < 0.25:
            _surroundings(draw, both)
            _come(draw, both, step, drawn, done)
            continue
        number, kind = draw.choice(numbers[-3:]), draw.choices(kinds, weights)[0]
        _both(both, number, MAKERS[kind](draw), drawn, done)
    for lives in both:
        lives.world.dispatcher.validate()


def _come(
    draw: Draw,
    both: tuple[Lives, Lives],
    number: int,
    drawn: Counter[type[Event]],
    done: Done,
) -> None:
    family, num_blocks = draw.randrange(4), 1 + draw.randrange(NUM_BLOCKS_MAX)
    if draw.random() < 0.4:
        # Short, and all but its last block lies in another pool: worth a pull.
        num_blocks = 2 + draw.randrange(6)
        _lies_remote(both, draw.choice(_pools(both)), family, num_blocks)
    live, simulated = (lives.arrive(number, family, num_blocks) for lives in both)
    assert live == simulated
    if isinstance(live, Routed):
        done.update(_inside(live))
    assert both[0].numbers == both[1].numbers
    if number in both[0].numbers:
        _both(both, number, Begun(), drawn, done)


def _inside(routed: Routed) -> Iterator[str]:
    """Ways that blocks of a route take between hosts of one cluster."""
    if routed.pulls_from_host:
        yield INSIDE[routed.decision.path is Path.REMOTE]
    if routed.changes_host:
        yield INSIDE[2]


def _both(
    both: tuple[Lives, Lives],
    number: int,
    event: AnyEvent,
    drawn: Counter[type[Event]],
    done: Done,
) -> None:
    live, simulated = (lives.step(number, event) for lives in both)
    assert live == simulated, event
    assert both[0].state() == both[1].state(), event
    drawn[type(event)] += 1
    done.update(type(action) for action in live)
    done[RELAY] += both[0].stage_of(number) is Stage.RELAYING


def _pools(both: tuple[Lives, Lives]) -> list[str]:
    """Pools from which a prefix may be pulled."""
    return list(dict.fromkeys(source for source, _ in both[0].world.links))


def _lies_remote(both: tuple[Lives, Lives], pool: str, family: int, num_blocks: int) -> None:
    for lives in both:
        world, now_ns = lives.world, lives.now_ns
        world.store(pool, family, num_blocks - 1)
        for ends in world.links:
            world.count_link(ends, Counted(10**9, 0, is_busy=True), now_ns)
            world.report_link(ends, now_ns)
        # With roles, the queues of engines that decode are nobody's business here.
        for name in AWAY if world.rules.split else (*HOME, *AWAY):
            world.report_load(name, 0, now_ns)


def _surroundings(draw: Draw, both: tuple[Lives, Lives]) -> None:
    """Change what routes depend on: caches, queues, links, and engines that are gone."""
    holder, family = draw.choice([*_pools(both), *HOME, *AWAY]), draw.randrange(4)
    num_blocks, waiting = 1 + draw.randrange(NUM_BLOCKS_MAX), draw.randrange(4)
    loaded, gone, is_up = draw.choice(AWAY), draw.choice(AWAY), draw.random() < 0.8
    ends, bits_per_s = draw.choice(both[0].world.links), 10**7 + draw.randrange(10**9)
    for lives in both:
        world, now_ns = lives.world, lives.now_ns
        world.store(holder, family, num_blocks)
        world.report_load(loaded, waiting, now_ns)
        world.set_ready(gone, is_up, now_ns)
        world.count_link(ends, Counted(bits_per_s, 0, is_busy=True), now_ns)
        world.report_link(ends, now_ns)
