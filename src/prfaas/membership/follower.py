"""Follows the sources of members and keeps the connections to them up to date."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from prfaas.core.membership.machine import Action, Join, Leave, Membership, Withhold
from prfaas.core.membership.members import (
    Listed,
    Member,
    MemberKind,
    RefusalCause,
    RefusedEntry,
    State,
)
from prfaas.logs import log_event
from prfaas.membership.entries import fault_of
from prfaas.membership.port import MemberConnections, Source
from prfaas.tasks import cancel_all

DRAIN_LOOK_S = 0.2
"""Time between two looks at members that drain."""
FAULTS_LOOK_S = 1.0
FAILED = "it has failed in an unforeseen way"
_log = logging.getLogger(__name__)


class MembershipFollower:
    """Runs the membership of a site.

    Args:
        connections: Join and leave as it decides.
        matters: Returns False for members that are left out; None leaves nobody out.
        failed_pause_s: Wait before a source that failed is followed again, seconds.
    """

    def __init__(
        self,
        machine: Membership,
        connections: MemberConnections,
        sources: Sequence[Source],
        matters: Callable[[Member], bool] | None = None,
        failed_pause_s: float = 5.0,
    ) -> None:
        self.machine, self.sources = machine, list(sources)
        self._connections, self._matters = connections, matters
        self._tasks: list[asyncio.Task[None]] = []
        self._acted = asyncio.Event()
        """Set by whatever may have let a member begin to drain."""
        self._failed_pause_s = failed_pause_s
        self._refused: set[tuple[str, str]] = set()
        self._faults: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self._good: dict[str, dict[int, Listed]] = {}
        """Entries of each source that can be connected to, by `id`."""

    def start(self) -> None:
        """Begin."""
        for source in self.sources:
            self._tasks.append(asyncio.create_task(self._follow(source)))
        self._tasks.append(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        """Stop."""
        await cancel_all(self._tasks)

    def listed(
        self, source: str, entries: Sequence[Listed], unread: Sequence[RefusedEntry] = ()
    ) -> None:
        """Apply the list of a source."""
        if self._matters is not None:
            entries = [each for each in entries if self._matters(each.member)]
        # An entry that is the same object as before has been checked; a member that is connected
        # as it is listed can be, wherever its address was taken from.
        good, before = [], self._good.get(source, {})
        present = {each.name: each for each in self.machine.members()}
        odd: list[RefusedEntry] = []
        for each in entries:
            is_known = before.get(id(each)) is each or present.get(each.member.name) == each.member
            if is_known or not (why := fault_of(each.member)):
                good.append(each)
            else:
                odd.append(RefusedEntry(each.member.name, RefusalCause.INVALID, why))
        self._good[source] = {id(each): each for each in good}
        self._run(self.machine.listed(source, good, time.monotonic_ns(), [*unread, *odd]))
        self._note_refusals()

    def well(self, name: str, *, is_well: bool) -> None:
        """A member answers, or does not."""
        self._run(self.machine.well(name, time.monotonic_ns(), is_well=is_well))

    def judge(self, name: str, reason: RefusalCause, words: str) -> None:
        """A member reports what contradicts the site; with "" for words it does not any more."""
        now_ns = time.monotonic_ns()
        if words:
            self._run(self.machine.contradicts(RefusedEntry(name, reason, words), now_ns))
        else:
            self._run(self.machine.agrees(name, now_ns, reason))
        self._note_refusals()

    def is_leaving(self, name: str) -> bool:
        """Return True if a member drains, so that it need not answer."""
        return self.machine.state_of(name) is State.DRAINING

    def refusals(self) -> dict[str, RefusedEntry]:
        """Refused members by name."""
        return self.machine.refusals()

    def faults(self) -> dict[str, str]:
        """Faults of sources by name."""
        return {source.name: source.fault for source in self.sources if source.fault}

    def waiting(self) -> dict[str, str]:
        """Settings that wait for a restart, by source."""
        return {source.name: source.waits for source in self.sources if source.waits}

    async def _follow(self, source: Source) -> None:
        """Follow a source until cancelled. What it fails at in an unforeseen way is a fault of it,
        and tried again: the last list stays meanwhile."""
        while True:
            try:
                await source.follow(partial(self.listed, source.name))
            except Exception as error:
                if not source.fault.startswith(FAILED):
                    _log.exception("the source of members %s has failed", source.name)
                source.fault = f"{FAILED}; it is tried again: {error!r}"
            await asyncio.sleep(self._failed_pause_s)

    async def _watch(self) -> None:
        while True:
            if self.machine.is_draining:
                await asyncio.sleep(DRAIN_LOOK_S)
                self.drain()
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FAULTS_LOOK_S):
                        await self._acted.wait()
            self._acted.clear()
            self._note_faults()

    def drain(self) -> None:
        """Let members that have drained leave."""
        self._run(self.machine.drained(self._connections.is_idle, time.monotonic_ns()))

    def _run(self, actions: list[Action]) -> None:
        if actions:
            self._acted.set()
        for action in actions:
            match action:
                case Join(member):
                    if self._connections.join(member):
                        self._note("joined", member.kind, member.name, f"at {member.address}")
                case Withhold(name, withheld):
                    self._connections.withhold(name, withheld=withheld)
                case Leave(member):
                    self._connections.leave(member)
                    self._note("left", member.kind, member.name, "not listed, and its work ended")

    def _note(self, action: str, kind: MemberKind, name: str, why: str) -> None:
        self._connections.note(action, f"{kind.value} {name}", why)

    def _note_refusals(self) -> None:
        now = {(name, each.words) for name, each in self.refusals().items()}
        for name, words in sorted(now - self._refused):
            self._connections.note("refused", f"member {name}", words)
        self._refused = now

    def _note_faults(self) -> None:
        now = self.faults()
        for name, fault in now.items():
            if self._faults.get(name) != fault:
                log_event(_log, logging.WARNING, "membership_fault", source=name, why=fault)
        for name in self._faults.keys() - now.keys():
            log_event(_log, logging.INFO, "membership_fault_over", source=name)
        self._faults = now
        for name, keys in (waiting := self.waiting()).items():
            if self._waiting.get(name) != keys:
                log_event(_log, logging.WARNING, "settings_wait", source=name, keys=keys)
        self._waiting = waiting
