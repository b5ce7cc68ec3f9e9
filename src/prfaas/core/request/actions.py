"""Actions: what a driver has to do for a request.

Those of one step are in order. Legs (`StartPrefill`, `StartDecode`, `ContinueOn`) run until their
driver reports an event of theirs, or until a later action stops them; all others are done at once.
"""

from __future__ import annotations

from typing import get_args

from prfaas.core.request.events import Blocks
from prfaas.records import Record


class Action(Record, frozen=True):
    """Base of all actions."""


class StartPull(Action, frozen=True):
    """Have the prefix fetched that the route counts on; the next leg waits for it."""


class StartPrefill(Action, frozen=True):
    """Prefill on `engine`, whose KV cache goes to the pool of the engine that decodes."""

    engine: str
    relay_tokens: int = 0
    """Most tokens that the leg makes of the answer after the first one."""


class AwaitBlocks(Action, frozen=True):
    """Begin no leg before the machine names one: it waits for these blocks.

    Of a hand-off, the engine that prefills has answered: report that to the pool it stores to.
    """

    blocks: Blocks


class WarmDecode(Action, frozen=True):
    """Have `engine` load the prompt and compute the tokens so far, of which it keeps the KV cache.

    Then report `DecodeWarmed`. It ends with the next leg, or with the request.
    """

    engine: str


class StopPrefill(Action, frozen=True):
    """End the prefill leg: no request waits for it, or for further tokens of it."""


class StartDecode(Action, frozen=True):
    """Decode on `engine`, which computes what is missing of the prompt's KV cache."""

    engine: str


class HoldBack(Action, frozen=True):
    """Find out whether `engine` died; if so, wait for the prompt's turn. Then report `TurnCame`."""

    engine: str


class ContinueOn(Action, frozen=True):
    """Decode on another engine, from the tokens so far, once `after_ns` are over."""

    engine: str
    after_ns: int = 0


class Abort(Action, frozen=True):
    """End the transfer at both pools; what has arrived stays. `why` is for people."""

    blocks: Blocks
    why: str


class Release(Action, frozen=True):
    """End the wait for these blocks; an open transfer continues."""

    blocks: Blocks


class FellBack(Action, frozen=True):
    """Record that the route was left, or did not pay off."""

    stage: str
    """"prefill", "transfer", "decode" or "pull"."""
    reason: str
    """One of a bounded set; labels a metric."""
    why: str

    @property
    def label(self) -> str:
        """Stage and reason, as clients and logs get them."""
        return f"{self.stage}/{self.reason}"


class Retry(Action, frozen=True):
    """Count a decode leg that is to run again, or may not because the budget is spent."""

    is_allowed: bool


class Fail(Action, frozen=True):
    """Report the last failure to the client: no other engine can go on."""


class WakeAt(Action, frozen=True):
    """Report `Woke` at this instant, ns, once, unless the request ends; replaces the last one."""

    at_ns: int


AnyAction = (
    StartPull
    | StartPrefill
    | AwaitBlocks
    | WarmDecode
    | StopPrefill
    | StartDecode
    | HoldBack
    | ContinueOn
    | Abort
    | Release
    | FellBack
    | Retry
    | Fail
    | WakeAt
)
OnEngine = StartPrefill | WarmDecode | StartDecode | HoldBack | ContinueOn
"""Actions that name an engine."""
ACTIONS: tuple[type[Action], ...] = get_args(AnyAction)
"""All kinds of actions."""
