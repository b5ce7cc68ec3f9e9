"""Sessions of agents as a closed loop: a turn comes a while after the answer before it.

A slow system therefore gets fewer requests, as in life. Sessions start at random instants, or a
fixed number of users runs one after another. Every start is a session of its own, with its own
blocks, but for those that sessions of the file share: a recorded session that is used twice shares
no other ones with itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from prfaas.errors import ConfigError
from prfaas.sim.system.request import FollowUp, Request
from prfaas.sim.workloads.requests import draw_arrivals
from prfaas.traces.checks import NUM_REQUESTS_MAX
from prfaas.traces.sessions.block_chain import Regroup, SharedNames
from prfaas.traces.sessions.session_file import Session, Turn
from prfaas.units import NS_PER_S

NUM_BLOCK_IDS_MAX = 200_000_000
PAUSE_S = 60
"""Between two sessions of one user; the first ones start within as much."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions that start at a rate, or that a number of users runs; exactly one is given."""

    sessions: tuple[Session, ...]
    """Recorded ones, drawn without replacement until all were used."""
    duration_ns: int
    """No turn comes later."""
    block_tokens: int
    """Tokens of a block of the caches."""
    rate_per_s: float | None = None
    """Starts of sessions, a Poisson process."""
    num_users: int | None = None
    """Users, each with one session at a time."""
    think_max_s: float = float("inf")
    """Longer pauses between turns are cut to this."""

    def requests(self, seed: int) -> list[Request]:
        """First turns of the sessions that start by themselves; the others follow them; ConfigError
        if they would be too many."""
        rng = np.random.default_rng(seed)
        draw = _Draw(self, rng)
        starts_ns = self._starts_ns(rng)
        if self.num_users is None:
            return [draw.session(at_ns)[0] for at_ns in starts_ns]
        return [self._user(draw, at_ns) for at_ns in starts_ns]

    def with_rate_scaled(self, factor: float) -> Sessions:
        """The same with `factor` times as many sessions."""
        if self.num_users is not None:
            return replace(self, num_users=max(round(self.num_users * factor), 1))
        assert self.rate_per_s is not None  # noqa: S101 (exactly one is given)
        return replace(self, rate_per_s=self.rate_per_s * factor)

    @property
    def num_prompt_tokens_max(self) -> int:
        """The longest prompt, tokens."""
        return max(t.num_prompt_tokens for session in self.sessions for t in session.turns)

    def _starts_ns(self, rng: np.random.Generator) -> list[int]:
        duration_s = self.duration_ns / NS_PER_S
        if self.num_users is None:
            assert self.rate_per_s is not None  # noqa: S101 (exactly one is given)
            starts = draw_arrivals(rng, self.rate_per_s, duration_s)
        else:
            starts = np.sort(rng.random(self.num_users) * min(PAUSE_S, duration_s))
        return [int(at) for at in np.rint(starts * NS_PER_S)]

    def _user(self, draw: _Draw, at_ns: int) -> Request:
        """One session after another, until the pauses alone fill the time."""
        root, last, busy_ns = draw.session(at_ns)
        ends_at_ns = at_ns + busy_ns
        while ends_at_ns + PAUSE_S * NS_PER_S < self.duration_ns:
            first, next_last, busy_ns = draw.session(0)
            draw.follow(last, first, PAUSE_S * NS_PER_S)
            last, ends_at_ns = next_last, ends_at_ns + PAUSE_S * NS_PER_S + busy_ns
        return root


class _Draw:
    """Draws sessions and turns them into requests that follow each other."""

    def __init__(self, source: Sessions, rng: np.random.Generator) -> None:
        self._source = source
        self._order = self._endless(rng)
        self._indices, self._blocks, self._num_ids = count(), count(), 0
        self._shared_names: SharedNames = {}

    def session(self, at_ns: int) -> tuple[Request, Request, int]:
        """First and last request of a session that starts at `at_ns`, and its pauses, ns."""
        session = next(self._order)
        regroup = Regroup(
            session.block_tokens,
            self._source.block_tokens,
            self._blocks,
            session.shared,
            self._shared_names,
        )
        made: list[Request] = []
        for turn in session.turns:
            before = None if turn.after is None else session.turns[turn.after]
            made.append(self._request(turn, before, regroup))
            if turn.after is not None:
                self.follow(made[turn.after], made[-1], self._pause_ns(turn))
        made[0].arrived_at_ns = at_ns
        return made[0], made[-1], self._pauses_ns(session)

    def follow(self, before: Request, after: Request, pause_ns: int) -> None:
        """Schedule a request after the end of another."""
        follower = FollowUp(after, pause_ns, self._source.duration_ns)
        before.followers = (*before.followers, follower)

    def _pause_ns(self, turn: Turn) -> int:
        return round(min(turn.think_s, self._source.think_max_s) * NS_PER_S)

    def _pauses_ns(self, session: Session) -> int:
        """Pauses on the way to the last turn."""
        total, turn = 0, session.turns[-1]
        while turn.after is not None:
            total, turn = total + self._pause_ns(turn), session.turns[turn.after]
        return total

    def _request(self, turn: Turn, before: Turn | None, regroup: Regroup) -> Request:
        index = next(self._indices)
        blocks = regroup.blocks(turn.runs, None if before is None else before.runs)
        self._num_ids += len(blocks)
        if index == NUM_REQUESTS_MAX or self._num_ids > NUM_BLOCK_IDS_MAX:
            raise ConfigError(
                f"workload: sessions of {index:,} requests with {self._num_ids:,} block ids; at "
                f"most {NUM_REQUESTS_MAX:,} and {NUM_BLOCK_IDS_MAX:,} are simulated; start fewer "
                "sessions, or shorten the duration"
            )
        return Request(index, 0, turn.num_prompt_tokens, turn.num_output_tokens, blocks)

    def _endless(self, rng: np.random.Generator) -> Iterator[Session]:
        sessions = self._source.sessions
        while True:
            for i in rng.permutation(len(sessions)):
                yield sessions[i]
