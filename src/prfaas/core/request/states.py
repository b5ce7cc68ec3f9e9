"""The life of a request as a table: its stages, and what each event may lead to.

                    ┌── failed, timed out, stalled, late, lost ──┐   or PREFILLING elsewhere
    ROUTED ─► PREFILLING ─► RELAYING ──► DECODING ─► STREAMING ─► ENDED
       │            ├───── done ──────────▲  │ ▲          │
       └─ in place ─┼─────────────────────┘  │ └─ breaks ─┘
                    └─ may have died ► HELD ◄┘
                                         └── the prompt's turn ► DECODING, PREFILLING

How it works. A request is routed by the dispatcher, and from then on `machine.RequestLife` leads
it. A driver (the gateway's serving room, or the simulator) reports events (`events.py`) with the
time, and carries out the actions (`actions.py`) that a step returns. The machine holds no clock and
does no I/O. It keeps the books of the dispatcher, the breakers of links, and the two budgets
itself, so both drivers retry, hedge, and give up by the same rules.

    stage        meaning
    ROUTED       nothing is done yet
    PREFILLING   an engine prefills whose KV cache another one will decode from
    RELAYING     it has prefilled, and goes on decoding until another engine has the blocks
    HELD         an engine failed that had the prompt, and may have died of it
    DECODING     a decode leg runs, and has not answered yet
    STREAMING    tokens come
    ENDED        every book is closed; nothing follows

Beside its stage a request has blocks in transit: a hand-off from the engine that prefills, or a
prefix that is pulled, or both. They are *open* until they are aborted or released, once each. A
fault of the hand-off ends the prefill leg, since nothing would come of it; later, decode computes
what has not arrived. A fault of a pull is only recorded: its engine computes the prefix.

A prompt whose prefill is given up goes to the engine that decodes, which computes it beside its
decode steps, or to another one that prefills, whichever is sooner; the first has but a share of its
time for that (`core/resilience/budgets.py`). Then the request has a new route.

The token of a prefill leg may be the first of the answer. Then decode goes on from it, as it would
from the tokens of an engine that broke, and no further prefill gives one. If the blocks take long,
the engine that prefills makes more tokens until they are there, and the engine that decodes has
loaded them (`relay.py`). An answer that ends by then needs no decode leg.

vLLM is told of blocks in transit, and waits for them beside its other work. SGLang computes what it
does not find, so its legs are held until their blocks are there; the stages are the same
(`held.py`).

An engine that decodes may be chosen as late as it is needed; then there may be none, and the
request ends.

An event that is not in the table for a stage came too late, or twice. It changes nothing, and gives
no action: drivers need not check what is still of interest.
"""

from __future__ import annotations

from enum import StrEnum

from prfaas.core.request.events import (
    Begun,
    DecodeWarmed,
    EngineBroke,
    Event,
    Finished,
    FirstToken,
    PoolLost,
    PrefillDone,
    PrefillFailed,
    PullNotAsked,
    Stopped,
    TransferEnded,
    TurnCame,
    Woke,
)


class Stage(StrEnum):
    """Stage of a request."""

    ROUTED = "routed"
    PREFILLING = "prefilling"
    RELAYING = "relaying"
    HELD = "held"
    DECODING = "decoding"
    STREAMING = "streaming"
    ENDED = "ended"


_S = Stage
_STAYS: dict[tuple[Stage, type[Event]], set[Stage]] = {
    (stage, event): {stage}
    for stage in (_S.PREFILLING, _S.RELAYING, _S.HELD, _S.DECODING, _S.STREAMING)
    for event in (TransferEnded, PoolLost, PullNotAsked, Woke)
}
TRANSITIONS: dict[tuple[Stage, type[Event]], set[Stage]] = {
    **_STAYS,
    (_S.ROUTED, Begun): {_S.PREFILLING, _S.DECODING, _S.ENDED},
    (_S.PREFILLING, FirstToken): {_S.PREFILLING, _S.RELAYING, _S.DECODING, _S.ENDED},
    (_S.PREFILLING, Finished): {_S.ENDED},
    (_S.PREFILLING, PrefillDone): {_S.DECODING, _S.ENDED},
    (_S.PREFILLING, PrefillFailed): {_S.PREFILLING, _S.DECODING, _S.HELD, _S.ENDED},
    (_S.PREFILLING, TransferEnded): {_S.PREFILLING, _S.DECODING, _S.HELD, _S.ENDED},
    (_S.PREFILLING, PoolLost): {_S.PREFILLING, _S.DECODING, _S.ENDED},
    (_S.PREFILLING, Woke): {_S.PREFILLING, _S.DECODING, _S.ENDED},
    (_S.RELAYING, Finished): {_S.ENDED},
    (_S.RELAYING, PrefillDone): {_S.DECODING, _S.ENDED},
    (_S.RELAYING, PrefillFailed): {_S.DECODING, _S.ENDED},
    (_S.RELAYING, DecodeWarmed): {_S.RELAYING, _S.DECODING},
    (_S.RELAYING, TransferEnded): {_S.RELAYING, _S.ENDED},
    (_S.RELAYING, PoolLost): {_S.RELAYING, _S.ENDED},
    (_S.RELAYING, Woke): {_S.RELAYING, _S.DECODING, _S.ENDED},
    (_S.HELD, TurnCame): {_S.PREFILLING, _S.DECODING, _S.ENDED},
    (_S.DECODING, FirstToken): {_S.STREAMING},
    (_S.DECODING, EngineBroke): {_S.DECODING, _S.HELD, _S.ENDED},
    (_S.DECODING, Finished): {_S.ENDED},
    (_S.STREAMING, EngineBroke): {_S.DECODING, _S.ENDED},
    (_S.STREAMING, Finished): {_S.ENDED},
    **{(stage, Stopped): {_S.ENDED} for stage in _S if stage is not _S.ENDED},
}
"""Stages that an event may lead to from a stage."""
