"""Prompts after which an engine died: run few at a time, and not on a third engine.

Whatever was in an engine when it died is suspect, and one of it may be the cause. Suspects go on
one at a time; each that gets its first token is cleared, and twice as many may run beside each
other. One that has run for long without harm, as an answer that is not streamed, stays suspect and
holds nobody up.

A suspect that a second engine dies with is refused: for long if it was alone in that engine, else
for a short time that grows with every further death, since another prompt may have been the cause.

Prompts are known by digests. The table is bounded; the oldest entries are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from prfaas.units import NS_PER_S

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
