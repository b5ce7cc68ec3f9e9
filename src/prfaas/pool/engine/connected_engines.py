"""The engines that are connected to a pool node, by name."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterator, Mapping

from prfaas.logs import log_event
from prfaas.pool.engine.engine_server import EngineSession

log = logging.getLogger(__name__)


class ConnectedEngines(Mapping[str, EngineSession]):
    """The present connection of each engine.

    A pool node that stalled finds several hellos of one engine: those of connections that the
    engine has given up, and that of the present one. They are read by several threads, so they
    arrive here in any order; the connection that was accepted last is the present one, and the end
    of another one changes nothing.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, list[EngineSession]] = {}
        """Open connections by name, in the order in which they were accepted."""

    def __getitem__(self, name: str) -> EngineSession:
        """Return the present connection of an engine."""
        return self._sessions[name][-1]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._sessions)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._sessions)

    def add(self, session: EngineSession) -> None:
        """Register a connection. Two engines of one name are both served, and reported."""
        others = self._sessions.setdefault(session.name, [])
        if others and session.number > others[-1].number and not others[-1].has_left:
            log_event(log, logging.WARNING, "engine_name_taken", engine=session.name)
        insort(others, session, key=lambda each: each.number)

    def remove(self, session: EngineSession) -> bool:
        """Remove a connection; return True if its engine has another one now, or none."""
        sessions = self._sessions.get(session.name, [])
        if session not in sessions:
            return False
        was_present = sessions[-1] is session
        sessions.remove(session)
        if not sessions:
            del self._sessions[session.name]
        return was_present
