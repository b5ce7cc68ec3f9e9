"""Prompts after which an engine died: run few at a time, and not on a third engine.

Whatever was in an engine when it died is suspect, and one of it may be the cause. Suspects go on
one at a time; each that gets its first token is cleared, and twice as many may run beside each
other. One that has run for long without harm, as an answer that is not streamed, stays suspect and
holds nobody up.

A suspect that a second engine dies with is refused: for long if it was alone in that engine, else
for a short time that grows with every further death, since another prompt may have been the cause.

Prompts are known by digests. The table is bounded; the oldest entries are forgotten first.

Breakers around engines and links: who fails is spared, and spares.

A breaker that opens has the driver give its target nothing new. The breaker of the only engine
that could decode changes nothing: a request that would find nobody may as well try it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.invariants import hold
from prfaas.core.resilience.circuit_breaker import Breaker, BreakerOutcome, BreakerState
from prfaas.units import NS_PER_S

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

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        closed = BreakerState.CLOSED
        hold(
            unsettled_are_those_that_are_not_closed=self.unsettled.keys()
            == {target for target, each in self.breakers.items() if each.state is not closed},
            every_stand_in_is_guarded=all(self.breakers.keys() >= group for group in self._needed),
        )
        for breaker in self.breakers.values():
            breaker.validate()

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


Death = tuple[str, int]
"""One death of an engine: its name, and how often it had been lost by then."""
PAUSE_NS = NS_PER_S // 2
"""Wait before a prompt is given to another engine after one died with it."""
SURVIVED_NS = 5 * NS_PER_S
"""Time after which a suspect that runs holds up no other one."""
DEATHS_MAX = 2
"""Engines that one prompt may be in when they die."""
SUSPECTS_MAX = 4096
WINDOW_MAX = 64
"""Suspects that run at a time, at most."""
KEPT_NS = 600 * NS_PER_S
"""Time after the last death for which a prompt stays suspect, or refused if it was alone."""
REFUSED_NS = 30 * NS_PER_S
"""Time for which a prompt is refused that was not alone when the second engine died."""
REFUSED_GROWTH = 4
"""By which that time grows with every further death, up to `KEPT_NS`."""


@dataclass(slots=True)
class _Suspect:
    num_deaths: int = 0
    last_death: Death | None = None
    num_reports: int = 0
    """Requests with this prompt that have reported the last death."""
    forgotten_at_ns: int = 0
    refused_until_ns: int = 0


class Quarantine:
    """Suspect prompts, and how many of them run."""

    def __init__(self) -> None:
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()
        self._running: set[bytes] = set()
        self._window = 1

    def __len__(self) -> int:
        return len(self._suspects)

    def is_suspect(self, digest: bytes, now_ns: int) -> bool:
        """Return True if an engine died lately with this prompt in it."""
        found = self._suspects.get(digest)
        if found is not None and found.forgotten_at_ns <= now_ns:
            del self._suspects[digest]
            return False
        return found is not None

    def refused_ns(self, digest: bytes, now_ns: int) -> int:
        """Time for which a prompt is not given to any engine, ns; 0 if it may be."""
        found = self._suspects.get(digest)
        return max(found.refused_until_ns - now_ns, 0) if found is not None else 0

    def killed(self, digest: bytes, death: Death, num_legs: int, now_ns: int) -> None:
        """An engine died with this prompt in it, before its first token.

        Requests with the same prompt report the same death; it counts once.

        Args:
            num_legs: Requests that the engine had when it died, this one included.
        """
        self._running.discard(digest)
        self._window = 1
        suspect = self._suspects.setdefault(digest, _Suspect())
        self._suspects.move_to_end(digest)
        if suspect.last_death != death:
            suspect.num_deaths, suspect.last_death = suspect.num_deaths + 1, death
            suspect.num_reports = 0
        suspect.num_reports += 1
        suspect.forgotten_at_ns = now_ns + KEPT_NS
        if suspect.num_deaths >= DEATHS_MAX:
            suspect.refused_until_ns = now_ns + _refused_ns(suspect, num_legs)
        while len(self._suspects) > SUSPECTS_MAX:
            self._suspects.popitem(last=False)

    def begin(self, digest: bytes) -> bool:
        """Start a suspect; False if it has to wait for others."""
        if digest in self._running or len(self._running) >= self._window:
            return False
        self._running.add(digest)
        return True

    def cleared(self, digest: bytes) -> None:
        """A suspect that ran has its first token."""
        self.survived(digest)
        self._suspects.pop(digest, None)

    def survived(self, digest: bytes) -> None:
        """A suspect has run for long without harm: others do not wait for it any more."""
        if digest in self._running:
            self._running.discard(digest)
            self._window = min(2 * self._window, WINDOW_MAX)

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        hold(
            suspects_have_a_limit=len(self._suspects) <= SUSPECTS_MAX,
            few_run_at_a_time=len(self._running) <= WINDOW_MAX >= self._window >= 1,
        )

    def left(self, digest: bytes) -> None:
        """A suspect ended without a first token, for another reason than an engine's death."""
        self._running.discard(digest)


def _refused_ns(suspect: _Suspect, num_legs: int) -> int:
    if num_legs <= suspect.num_reports:
        return KEPT_NS
    refused_ns = REFUSED_NS
    for _ in range(DEATHS_MAX, suspect.num_deaths):
        refused_ns = min(KEPT_NS, REFUSED_GROWTH * refused_ns)
    return refused_ns
