"""Random events of every kind that the life of a request knows."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from prfaas.core.request.events import (
    AnyEvent,
    Begun,
    Blocks,
    DecodeFailure,
    DecodeWarmed,
    EngineBroke,
    Event,
    Finished,
    FirstToken,
    Outcome,
    PoolLost,
    PrefillDone,
    PrefillFailed,
    PrefillFailure,
    PullNotAsked,
    Stopped,
    TransferEnded,
    TurnCame,
    Woke,
)
from prfaas.core.transfer.transfer_state import TransferEnd

OUTCOMES = [outcome for outcome in Outcome if outcome.value not in ("running", "finished")]
"""Ends of a request without its answer."""
MAKERS: dict[type[Event], Callable[[Random], AnyEvent]] = {
    Begun: lambda _: Begun(),
    PrefillDone: lambda _: PrefillDone(),
    PrefillFailed: lambda draw: PrefillFailed(
        draw.choice([*PrefillFailure]), flip(draw), flip(draw)
    ),
    DecodeWarmed: lambda _: DecodeWarmed(),
    TransferEnded: lambda draw: TransferEnded(
        draw.choice([*Blocks]), draw.choice([*TransferEnd]), flip(draw)
    ),
    PullNotAsked: lambda _: PullNotAsked(),
    PoolLost: lambda draw: PoolLost(draw.choice([*Blocks])),
    TurnCame: lambda _: TurnCame(),
    EngineBroke: lambda draw: EngineBroke(
        draw.choice([*DecodeFailure]), flip(draw), flip(draw), draw.random() < 0.8
    ),
    FirstToken: lambda _: FirstToken(),
    Finished: lambda draw: Finished(draw.randrange(20_000), draw.randrange(20_000)),
    Stopped: lambda draw: Stopped(draw.choice(OUTCOMES)),
    Woke: lambda _: Woke(),
}


def flip(draw: Random) -> bool:
    """Heads or tails."""
    return draw.random() < 0.5
