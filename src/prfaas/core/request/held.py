"""The life of a request on engines that cannot wait for blocks in transit.

vLLM's tier is told of a transfer and waits for its blocks. SGLang looks a prompt up when it comes
and computes what it does not find. So a leg that needs blocks in transit is held: it starts once
they are there, or cannot come any more, or have taken as long as a tier would wait. The machine
makes the same decisions as for other engines: only the start of the leg is later.
"""

from __future__ import annotations

from prfaas.core.request.actions import (
    AnyAction,
    AwaitBlocks,
    ContinueOn,
    Fail,
    HoldBack,
    StartDecode,
    StartPrefill,
    StopPrefill,
)
from prfaas.core.request.blocks import Movement
from prfaas.core.request.events import (
    AnyEvent,
    Blocks,
    EngineBroke,
    Finished,
    FirstToken,
    PrefillDone,
    PrefillFailed,
)
from prfaas.core.request.fleet import SharedState
from prfaas.core.request.machine import RequestLife, Route
from prfaas.core.request.relay import RelayingLife
from prfaas.core.request.states import Stage
from prfaas.core.request.watch import Timeout

_Leg = StartPrefill | StartDecode | ContinueOn
OF_LEG = (PrefillDone, PrefillFailed, FirstToken, EngineBroke, Finished)
"""Events of a leg that runs."""
_ENDS_LEG = (StopPrefill, HoldBack, Fail)


class HeldLife(RequestLife):
    """A request whose legs start when their blocks are there."""

    __slots__ = ("_awaits", "_held")

    def __init__(self, route: Route, fleet: SharedState) -> None:
        super().__init__(route, fleet)
        self._held: _Leg | None = None
        """The leg that is held."""
        self._awaits: Movement | None = None
        """Blocks that it is held for."""

    def step(self, event: AnyEvent, now_ns: int) -> list[AnyAction]:
        """Take an event; see `RequestLife.step`."""
        if self._held is not None and isinstance(event, OF_LEG):
            return []  # Late: of a leg before.
        actions: list[AnyAction] = []
        for action in super().step(event, now_ns):
            if isinstance(action, _ENDS_LEG):
                self._held = self._awaits = None
            actions.append(self._hold(action, now_ns) if isinstance(action, _Leg) else action)
        held, awaits = self._held, self._awaits
        if held is not None and awaits is not None:
            if self.stage is Stage.ENDED:
                self._held = self._awaits = None
            elif not awaits.is_coming:
                self._held = self._awaits = None
                actions.append(held)
            if self._needs_alarm:
                self._set_alarm(actions)
        return actions

    @property
    def awaited(self) -> Blocks | None:
        """None: no leg that has started waits for blocks."""
        return None

    def _hold(self, leg: _Leg, now_ns: int) -> _Leg | AwaitBlocks:
        """Hold a leg if it needs blocks that are coming."""
        which = super().awaited
        blocks = None if which is None else self.blocks.open(which)
        self._held = self._awaits = None
        if which is None or blocks is None or not blocks.is_coming:
            return leg
        self._held, self._awaits = leg, blocks
        if which is Blocks.HAND_OFF:
            # A pull has its timeout; that of a hand-off is the wait of the engine that decodes.
            ends_at_ns = now_ns + self._fleet.limits.transfer_timeout_ns
            self.watches.append(Timeout(blocks, ends_at_ns))
            self._needs_alarm = True
        return AwaitBlocks(which)


def life_of(route: Route, fleet: SharedState) -> RequestLife:
    """Return the life of a request, by whether its engines wait for blocks, and may relay."""
    if route.holds:
        return HeldLife(route, fleet)
    return RelayingLife(route, fleet) if route.relay_max else RequestLife(route, fleet)
