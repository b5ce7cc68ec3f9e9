"""Steps and story of the machines of both ends of transfers.

A step takes an event (`events.py`) and the time, and returns actions (`actions.py`). A machine has
no clock and does no I/O. Its story tells the last steps, for people: what came, what state it led
to, and what was to be done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from prfaas.core.transfer.actions import PeerNews, Tell, TransferAction
from prfaas.core.transfer.events import TransferInput
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.records import methods_of

STEPS_MAX = 64
_About = tuple[type, str, bytes]
_What = tuple[_About, str, tuple[type | PeerNews, ...]]


@dataclass(slots=True)
class _Step:
    what: _What
    at_ns: int
    count: int = 1


class Story:
    """The last `STEPS_MAX` steps; repetitions, as for the blocks of a transfer, count as one."""

    __slots__ = ("_before", "_last", "_steps")

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=STEPS_MAX)
        self._before = self._last = _Step(((object, "", b""), "", ()), 0)

    def add(self, now_ns: int, about: _About, stage: str, kinds: Iterable[type | PeerNews]) -> None:
        """Add a step.

        Args:
            about: Kind of its event, peer and transfer. No event is kept: it may have a block.
            stage: Where it led to.
            kinds: Its actions, by type; a message to the peer by what it says.
        """
        what = about, stage, tuple(kinds)
        # Of two that alternate, as a block that comes and is stored, each is one.
        if self._before.what == what:
            self._before, self._last = self._last, self._before
        elif self._last.what != what:
            self._before, self._last = self._last, _Step(what, now_ns, 0)
            self._steps.append(self._last)
        self._last.at_ns = now_ns
        self._last.count += 1

    def lines(self, transfer_id: bytes = b"") -> list[str]:
        """Return the steps as text, the oldest first; only those of one transfer if it is named."""
        found = []
        for step in self._steps:
            (event, peer, about_id), stage, kinds = step.what
            if transfer_id in (b"", about_id):
                does = (
                    ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds) or "nothing"
                )
                found.append(
                    f"{step.at_ns} {event.__name__} x{step.count} of {peer or '-'} "
                    f"{about_id.hex()[:12] or '-'}: {stage or '-'}; {does}"
                )
        return found


class Machine(ABC):
    """One end of transfers: events in, actions out."""

    _handlers: ClassVar[dict[type, Callable[..., None]]]
    _now_ns = 0

    def __init_subclass__(cls, kinds: tuple[type[TransferInput], ...]) -> None:
        cls._handlers = methods_of(cls, kinds)

    def __init__(self) -> None:
        self._actions: list[TransferAction] = []
        """Those of the current step."""
        self.story = Story()

    def step(self, event: TransferInput, now_ns: int) -> list[TransferAction]:
        """Take an event.

        Args:
            now_ns: Time, not before that of the last step.

        Returns:
            What to do, in order; nothing for an event that is late.
        """
        self._now_ns, self._actions = now_ns, []
        stage = self._take(event)
        about = type(event), event.peer, event.transfer_id
        does = [one.news if type(one) is Tell else type(one) for one in self._actions]
        self.story.add(now_ns, about, stage, does)
        return self._actions

    def validate(self) -> None:
        """Check what has to hold between two steps.

        Raises:
            AssertionError: It does not; the message has the story.
        """
        for what, holds in self._invariants():
            if not holds:
                raise AssertionError("\n".join([what, *self.story.lines()]))

    @abstractmethod
    def _take(self, event: Any) -> str:
        """Handle an event; return the state of its transfer."""

    @abstractmethod
    def _invariants(self) -> Iterator[tuple[str, bool]]:
        """Name what has to hold, and return whether it does."""

    def _do(self, *actions: TransferAction) -> None:
        self._actions += actions

    def _tell_end(self, peer: str, transfer_id: bytes, kind: TransferEnd, reason: str = "") -> None:
        self._do(Tell(peer, transfer_id, PeerNews.ABORTED, reason, kind))
