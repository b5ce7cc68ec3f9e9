"""Closed loops: a turn waits for the answer before it, and nothing of a session is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.cache.prefix_cache import PrefixCache
from prfaas.core.request.events import Outcome
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import check
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.request import Request
from prfaas.sim.workloads.make import with_followers
from prfaas.sim.workloads.sessions import PAUSE_S, Sessions
from prfaas.traces.sessions.block_chain import Regroup
from prfaas.traces.sessions.session_file import Session, Turn, read_sessions
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES, system

RECORDED = EXAMPLES / "traces" / "claude_code_sessions.jsonl.gz"
LONG = 10**6 * NS_PER_S


def chain(*prompts: int, think_s: float = 2.0) -> Session:
    turns = [
        Turn(p, 5, ((0, p // 64),) if p >= 64 else (), think_s, i - 1 if i else None)
        for i, p in enumerate(prompts)
    ]
    return Session(tuple(turns), 64)


def played(source: Sessions, seed: int = 1) -> tuple[Simulation, list[Request]]:
    roots = source.requests(seed)
    simulation = Simulation(system(), roots)
    simulation.run()
    check(simulation)
    return simulation, roots


def test_a_turn_comes_when_the_answer_and_the_pause_are_over() -> None:
    source = Sessions((chain(1000, 2000, 3000),), LONG, 512, num_users=1)
    first = source.requests(1)[0]
    second = first.followers[0].request
    # One session only: cut the users' endless row of them.
    second.followers[0].request.followers = ()
    Simulation(system(), [first]).run()
    assert second.arrived_at_ns == first.finished_at_ns + 2 * NS_PER_S
    assert second.followers[0].request.arrived_at_ns == second.finished_at_ns + 2 * NS_PER_S


@settings(max_examples=25)
@given(
    lengths=st.lists(
        st.lists(st.integers(1, 5000), min_size=1, max_size=6), min_size=1, max_size=5
    ),
    num_users=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_no_turn_overlaps_the_one_it_waits_for(
    lengths: list[list[int]], num_users: int, seed: int
) -> None:
    sessions = tuple(chain(*prompts) for prompts in lengths)
    source = Sessions(sessions, 600 * NS_PER_S, 512, num_users=num_users)
    simulation, roots = played(source, seed)
    for request in simulation.requests:
        for follower in request.followers:
            came = follower.request.outcome is Outcome.FINISHED
            in_time = request.finished_at_ns + follower.after_ns < follower.until_ns
            assert came == in_time
            if came:
                due_ns = request.finished_at_ns + follower.after_ns
                assert follower.request.arrived_at_ns == due_ns
    # Never more under way than there are users.
    instants = [(r.arrived_at_ns, 1) for r in simulation.requests]
    instants += [(r.finished_at_ns, -1) for r in simulation.requests]
    under_way = 0
    for _, change in sorted(instants):
        under_way += change
        assert under_way <= num_users
    assert len(roots) == num_users


def test_every_turn_of_the_recorded_sessions_keeps_its_lengths() -> None:
    sessions = read_sessions(RECORDED)
    assert len(sessions) == 692
    assert sum(len(s.turns) for s in sessions) == 45_542 + 676
    source = Sessions(sessions, LONG, 512, rate_per_s=5e-5)
    roots = source.requests(1)
    found = list(with_followers(roots))
    expected: Counter[tuple[int, int]] = Counter()
    for root in roots:
        session = next(s for s in sessions if _starts_like(s, root))
        expected.update((t.num_prompt_tokens, t.num_output_tokens) for t in session.turns)
    assert Counter((r.num_prompt_tokens, r.num_output_tokens) for r in found) == expected
    assert len({r.index for r in found}) == len(found)


def _starts_like(session: Session, root: Request) -> bool:
    if len(session.turns) != sum(1 for _ in with_followers([root])):
        return False
    first = session.turns[0]
    return (first.num_prompt_tokens, first.num_output_tokens) == (
        root.num_prompt_tokens,
        root.num_output_tokens,
    )


def test_a_sub_agent_runs_beside_its_session() -> None:
    sessions = read_sessions(RECORDED)
    with_sub = next(s for s in sessions if _forks(s))
    fork = next(i for i, n in Counter(t.after for t in with_sub.turns).items() if n > 1)
    assert fork is not None
    source = Sessions((with_sub,), LONG, 512, rate_per_s=1e-6)
    roots = [r for seed in range(20) for r in source.requests(seed)][:1]
    found = sorted(with_followers(roots), key=lambda r: r.index)
    assert len(found[fork].followers) > 1


def _forks(session: Session) -> bool:
    return max(Counter(t.after for t in session.turns).values()) > 1


def test_prefixes_survive_the_change_of_block_size() -> None:
    names = iter(range(100))
    regroup = Regroup(64, 256, names)
    first = regroup.blocks(((0, 9),), None)
    second = regroup.blocks(((0, 8), (50, 4)), ((0, 9),))
    other = regroup.blocks(((7, 4), (4, 4)), None)
    assert first == (0, 1, 2)
    assert second == (0, 1, 3)
    # The same blocks after another start are another prefix.
    assert other[1] not in first


def test_hits_within_sessions_are_those_of_the_source() -> None:
    """96.2 % of the tokens of all sessions are hits within their session, in blocks of 64."""
    hit = total = 0
    source = Sessions(read_sessions(RECORDED), LONG, 64, rate_per_s=1e-4)
    for root in source.requests(1):
        cache = PrefixCache()
        for request in sorted(with_followers([root]), key=lambda r: r.index):
            hit += min(cache.usable_hit(request.block_ids) * 64, request.num_prompt_tokens)
            total += request.num_prompt_tokens
            cache.store(request.block_ids)
    assert 100 * hit / total == pytest.approx(96.2, abs=2.0)


def test_users_bound_the_load_and_the_load_follows_the_answers() -> None:
    sessions = (chain(*[2000] * 50, think_s=1.0),)
    source = Sessions(sessions, 600 * NS_PER_S, 512, num_users=4)
    fast, _ = played(source)
    slow = Simulation(
        replace(system(), step_ns=lambda _batch, _context: 10 * NS_PER_S), source.requests(1)
    )
    slow.run()
    check(slow)
    assert len(slow.requests) < len(fast.requests) / 2


def test_a_user_pauses_between_two_sessions() -> None:
    source = Sessions((chain(100, think_s=0),), 400 * NS_PER_S, 512, num_users=1)
    simulation, _ = played(source)
    before, after = simulation.requests[:2]
    assert after.arrived_at_ns - before.finished_at_ns == PAUSE_S * NS_PER_S
    assert simulation.requests[-1].arrived_at_ns < 400 * NS_PER_S


def test_twice_the_load_is_twice_the_users_or_starts() -> None:
    users = Sessions((chain(100),), LONG, 512, num_users=3)
    starts = Sessions((chain(100),), 1000 * NS_PER_S, 512, rate_per_s=1.0)
    assert users.with_rate_scaled(2).num_users == 6
    assert len(starts.with_rate_scaled(2).requests(1)) == pytest.approx(2000, rel=0.1)


def test_sessions_end_with_the_duration() -> None:
    assert load_scenario(EXAMPLES / "claude-code.toml").end_ns == 3600 * NS_PER_S
