"""Sessions as requests at the instants at which they were recorded: an open loop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from prfaas.traces.requests import RecordedRequest
from prfaas.traces.sessions.regroup import Regroup, SharedNames
from prfaas.traces.sessions.session_file import Session
from prfaas.units import NS_PER_S

NUM_BLOCKS = 4_000_000
"""Limit of blocks above which blocks of sessions are merged: the replay takes a second per million.
"""


def block_tokens_of(sessions: Sequence[Session], coarse_tokens: int) -> int:
    """Tokens of a block to flatten sessions with.

    Args:
        coarse_tokens: For sessions with many blocks, if it is a multiple of theirs.
    """
    own = max(session.block_tokens for session in sessions)
    num_tokens = sum(turn.num_prompt_tokens for session in sessions for turn in session.turns)
    divides = all(coarse_tokens % session.block_tokens == 0 for session in sessions)
    same = all(own % session.block_tokens == 0 for session in sessions)
    return coarse_tokens if divides and (num_tokens > own * NUM_BLOCKS or not same) else own


def flattened(sessions: Sequence[Session], block_tokens: int) -> tuple[RecordedRequest, ...]:
    """All turns, in order of arrival.

    A session without a start begins when the one before it has ended, since nothing is known of
    what ran beside it.

    Args:
        sessions: In the order of their file.
        block_tokens: Tokens of a block of the requests, a multiple of those of the sessions.

    Raises:
        ConfigError: The value is invalid.
    """
    names, shared_names = count(), SharedNames()
    rows: list[RecordedRequest] = []
    ended_s = 0.0
    for session in sessions:
        start_s = ended_s if session.start_s is None else session.start_s
        regroup = Regroup(session.block_tokens, block_tokens, names, session.shared, shared_names)
        for turn in session.turns:
            before = None if turn.after is None else session.turns[turn.after]
            blocks = regroup.blocks(turn.runs, None if before is None else before.runs)
            at_ns = round((start_s + turn.at_s) * NS_PER_S)
            rows.append(
                RecordedRequest(at_ns, turn.num_prompt_tokens, turn.num_output_tokens, blocks)
            )
        ended_s = start_s + max(turn.at_s for turn in session.turns)
    rows.sort(key=lambda row: row.at_ns)
    return tuple(rows)
