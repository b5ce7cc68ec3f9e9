"""Breakers around engines and links: who fails is spared, and spares.

A breaker that opens has the driver give its target nothing new. The breaker of the only engine
that could decode changes nothing: a request that would find nobody may as well try it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from prfaas.core.resilience.circuit_breaker import Breaker, BreakerOutcome, BreakerState

Target = str | tuple[str, str]
"""An engine, or a link: the pools at its ends."""


_GOOD, _CLOSED = BreakerOutcome.GOOD, BreakerState.CLOSED


class Gate(Protocol):
    """Driver of the dispatcher, as breakers see it."""

    def set_broken(self, target: Target, now_ns: int, *, broken: bool) -> None:
        """Give a target nothing new, or again."""

    def takes(self, name: str) -> bool:
        """Return True if an engine gets new requests."""


class Guards:
    """All breakers of a deployment.

    Args:
        changed: Called with a target and the states of its breaker before and after a change.
        needed: Groups of engines that can stand in for each other; one of each is never barred.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        gate: Gate,
        changed: Callable[[Target, BreakerState, BreakerState], None],
        needed: Sequence[Collection[str]] = (),
    ) -> None:
        self._gate, self._changed = gate, changed
        self._needed: list[set[str]] = [set(group) for group in needed]
        self.breakers = {target: Breaker() for target in targets}
        self.unsettled: dict[Target, None] = {}
        """Targets whose breakers are not closed; nothing has to be told of a beginning without."""

    def add(self, target: Target, group: int | None = None) -> None:
        """Guard another target, which stands in for those of a group of `needed`."""
        self.breakers[target] = Breaker()
        if group is not None and isinstance(target, str):
            self._needed[group].add(target)

    def remove(self, target: Target) -> None:
        """Guard a target no more; nothing runs on it."""
        self.breakers.pop(target, None)
        self.unsettled.pop(target, None)
        if isinstance(target, str):
            for group in self._needed:
                group.discard(target)

    def began(self, target: Target, now_ns: int) -> None:
        """A request is sent to an engine, or its blocks over a link."""
        breaker = self.breakers[target]
        if breaker.state is not BreakerState.CLOSED:
            breaker.began(now_ns)
            self._apply(target, now_ns)

    def ended(self, target: Target, told: BreakerOutcome, now_ns: int) -> None:
        """Result of a request for the breaker of its target; one that has left has none."""
        breaker = self.breakers.get(target)
        if breaker is None:
            return
        before = breaker.state
        if told is _GOOD:
            breaker.succeeded(now_ns)
            if before is _CLOSED:
                return
        elif told is BreakerOutcome.FAILED:
            breaker.failed(now_ns)
        else:
            breaker.gave_up()
        if before is not _CLOSED or breaker.state is not before:
            self._note(target, before)
            self._apply(target, now_ns)

    def refresh(self, now_ns: int) -> None:
        """Time has passed, or somebody is gone: half open what has been open long enough."""
        for target in [*self.unsettled] if self.unsettled else ():
            self._apply(target, now_ns)

    def _apply(self, target: Target, now_ns: int) -> None:
        breaker = self.breakers[target]
        before = breaker.state
        allowed = breaker.allows(now_ns)
        self._note(target, before)
        barred = not allowed and not self._is_last(target)
        self._gate.set_broken(target, now_ns, broken=barred)

    def _is_last(self, target: Target) -> bool:
        """Return True if no other engine could do what this one does."""
        return any(
            target in group and not any(self._gate.takes(name) for name in group if name != target)
            for group in self._needed
        )

    def _note(self, target: Target, before: BreakerState) -> None:
        state = self.breakers[target].state
        if state is BreakerState.CLOSED:
            self.unsettled.pop(target, None)
        else:
            self.unsettled[target] = None
        if state is not before:
            self._changed(target, before, state)


def label_of(target: Target) -> str:
    """Name of a target in metrics and decisions."""
    return f"engine {target}" if isinstance(target, str) else f"link {target[0]}:{target[1]}"
