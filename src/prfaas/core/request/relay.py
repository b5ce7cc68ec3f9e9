"""Relay decode: the engine that prefilled makes further tokens while its blocks are in transit.

The leg that gives the first token is asked for more, whose number a forecast bounds. Once the
blocks are there, or cannot come, the engine that decodes loads them and computes the tokens so far,
beside the leg, whose end is when that is done: decode goes on from what it has in its own cache. A
leg that has made all of its tokens by then ends, and decode waits for its blocks.

Another request from an engine that has the prompt cached would cost a round trip and the bytes of
the prompt, between the first token and the second.
"""

from __future__ import annotations

from prfaas.core.request.actions import (
    AnyAction,
    FellBack,
    StartPrefill,
    StopPrefill,
    WarmDecode,
)
from prfaas.core.request.blocks import Movement
from prfaas.core.request.events import (
    AnyEvent,
    DecodeWarmed,
    FirstToken,
    PrefillDone,
    PrefillFailed,
)
from prfaas.core.request.fleet import SharedState
from prfaas.core.request.machine import RequestLife, Route
from prfaas.core.request.states import Stage
from prfaas.core.request.watch import AnswerWatch, Timeout
from prfaas.units import BITS_PER_BYTE, NS_PER_S

STEPS_MIN = 4
"""Decode steps within which blocks come soon: changing engines takes as long."""
MARGIN = 20
"""Tokens to ask for, by those that are expected: a leg that is stopped costs no more, and one that
ends too soon, for steps are faster or the link slower than was thought, makes its client wait."""


def relay_tokens(left_ns: int, step_ns: int, tokens_max: int) -> int:
    """Return how many tokens to ask for after the first one; 0 if that does not pay.

    Args:
        left_ns: Expected time until the blocks are there.
        step_ns: Time of a decode step.
        tokens_max: Most that the answer may have.
    """
    if left_ns < STEPS_MIN * step_ns:
        return 0
    return min(tokens_max, MARGIN * left_ns // step_ns)


class RelayingLife(RequestLife):
    """A request whose first tokens the engine that prefills may make."""

    __slots__ = ("_asked_at_ns", "_is_warming")

    def __init__(self, route: Route, fleet: SharedState) -> None:
        super().__init__(route, fleet)
        self._asked_at_ns: int | None = None
        """Time when the prefill leg was asked for tokens after the first; None if it was not."""
        self._is_warming = False
        """The engine that decodes takes the tokens so far."""

    def step(self, event: AnyEvent, now_ns: int) -> list[AnyAction]:
        """Take an event; see `RequestLife.step`."""
        before = self.stage
        if before is Stage.RELAYING:
            if isinstance(event, PrefillDone):
                return self._go_on(now_ns)
            if isinstance(event, DecodeWarmed):
                return [StopPrefill(), *self._go_on(now_ns)] if self._is_warming else []
            if isinstance(event, PrefillFailed):
                return self._relay_failed(event, now_ns)
        actions = super().step(event, now_ns)
        if self.stage is Stage.RELAYING:
            hand_off = self.blocks.hand_off
            if not self._is_warming and (hand_off is None or not hand_off.is_coming):
                actions += self._warm(now_ns)
        elif self.stage is Stage.PREFILLING:
            if isinstance(event, FirstToken) and self._asked_at_ns is not None:
                actions += self._begin_relay(now_ns, now_ns - self._asked_at_ns)
            else:
                self._ask(actions, now_ns)
        return actions

    def _ask(self, actions: list[AnyAction], now_ns: int) -> None:
        """Have a leg that is to start make more than one token, if that pays."""
        for number, action in enumerate(actions):
            if isinstance(action, StartPrefill):
                hand_off = self.blocks.hand_off
                pays = hand_off is not None and hand_off.crosses_link and not self.is_begun
                num_tokens = self._worth(hand_off, now_ns, 0) if hand_off and pays else 0
                self._asked_at_ns = now_ns if num_tokens else None
                if num_tokens:
                    actions[number] = StartPrefill(action.engine, num_tokens)

    def _worth(self, hand_off: Movement, now_ns: int, spent_ns: int) -> int:
        """Tokens to relay, by the time that the link needs for what it has to carry; 0 if that does
        not pay.

        Args:
            spent_ns: Time since the prefill began, in which blocks left as they were computed.
        """
        num_bytes = self._books.backlog_bytes(*hand_off.link, now_ns)
        bits_per_s = self._books.link_bits_per_s(*hand_off.link, now_ns)
        if num_bytes is None or bits_per_s is None:
            return 0
        ns_per_byte = BITS_PER_BYTE * NS_PER_S / max(bits_per_s, 1.0)
        left_ns = max(num_bytes * ns_per_byte, self.route.num_bytes * ns_per_byte - spent_ns)
        return relay_tokens(round(left_ns), self._fleet.limits.step_ns, self.route.relay_max)

    def _begin_relay(self, now_ns: int, spent_ns: int) -> list[AnyAction]:
        """Have the engine that prefilled go on until the blocks are there, if that pays now."""
        books, limits, hand_off = self._books, self._fleet.limits, self.blocks.hand_off
        books.prefilled(self.route.number, now_ns)
        waits = hand_off is not None and hand_off.is_coming
        pays = hand_off and waits and self._worth(hand_off, now_ns, spent_ns)
        if hand_off and pays and books.begin_relay(self.route.number, now_ns):
            self.stage = Stage.RELAYING
            # A route is not left as late while its client gets tokens.
            self.watches = [each for each in self.watches if each.blocks is not hand_off]
            self.watches.append(Timeout(hand_off, now_ns + limits.transfer_timeout_ns))
            actions: list[AnyAction] = []
            self._set_alarm(actions)
            return actions
        return [StopPrefill(), *self._start_decode(now_ns)]

    def _warm(self, now_ns: int) -> list[AnyAction]:
        """Have the engine that decodes take the tokens so far; the relay goes on meanwhile."""
        self.decode = self.decode or self._books.choose_decode(self.route.number) or ""
        if not self.decode:
            return [StopPrefill(), *self._go_on(now_ns)]
        self._is_warming = True
        ends_at_ns = now_ns + self._fleet.limits.transfer_timeout_ns
        self.watches.append(AnswerWatch(ends_at_ns, Stage.RELAYING))
        actions: list[AnyAction] = [WarmDecode(self.decode)]
        self._set_alarm(actions)
        return actions

    def _prefilled(self, event: AnyEvent, now_ns: int) -> list[AnyAction]:
        if self.stage is Stage.RELAYING:
            return self._go_on(now_ns)
        return super()._prefilled(event, now_ns)

    def _go_on(self, now_ns: int) -> list[AnyAction]:
        """Decode goes on from the tokens so far."""
        self._books.end_relay(self.route.number)
        return self._start_decode(now_ns)

    def _relay_failed(self, failure: PrefillFailed, now_ns: int) -> list[AnyAction]:
        """Decode goes on. The prompt was computed: what its pool has of the blocks still comes."""
        if failure.is_suspect:
            self._suspects.append(self.route.prefill)
        return [FellBack("prefill", failure.kind, failure.why), *self._go_on(now_ns)]
