"""The state machine of a site's members: lists and reports in, actions out.

    listed ─► SEEN ◄──► READY                 gets work while READY
               │          │
               └► DRAINING ◄─ not listed, ends, or has another address or other settings
                      │
                      └► GONE, once nothing runs on it; then its successor joins

A member that has work is never dropped: it drains, however long its work takes. Its name and
address are free for a successor after that.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prfaas.core.invariants import hold
from prfaas.core.membership.members import (
    Listed,
    Member,
    MemberKind,
    RefusalCause,
    RefusedEntry,
    Site,
    State,
    accepted,
    odd_engine,
    without_identity,
)

GONE_SHOWN_MAX = 64
"""Members that have left and are still shown."""


@dataclass(frozen=True, slots=True)
class Join:
    """Connect to a member; it gets work once it is ready."""

    member: Member


@dataclass(frozen=True, slots=True)
class Withhold:
    """Give a member nothing new, or lift that."""

    name: str
    withheld: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """Disconnect from a member that has nothing left to do, and forget it."""

    member: Member


Action = Join | Withhold | Leave


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member as operators see it."""

    member: Member | None
    """The member; None if its entry was refused."""
    name: str
    state: State
    since_ns: int
    """Time when it came into this state."""
    refusal: RefusedEntry | None = None
    """Reason why it is refused; None if it is not."""


@dataclass(slots=True)
class _Joined:
    member: Member
    state: State
    since_ns: int
    is_listed: bool = True
    is_ending: bool = False
    is_ready: bool = True
    """As its source says."""
    is_well: bool = False
    """As it answers itself."""
    withheld: bool = False
    refusal: RefusedEntry | None = None

    @property
    def wanted(self) -> State:
        if not self.is_listed or self.is_ending:
            return State.DRAINING
        if self.refusal is not None:
            return State.REFUSED
        return State.READY if self.is_ready and self.is_well else State.SEEN


class Membership:
    """All members of a site.

    Args:
        site: What they have to agree with.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._listed: dict[str, Sequence[Listed]] = {}
        self._unread: dict[str, Sequence[RefusedEntry]] = {}
        self._joined: dict[str, _Joined] = {}
        self._waiting: dict[str, tuple[Listed, int]] = {}
        self._refused: dict[tuple[str, str], tuple[RefusedEntry, int]] = {}
        self._gone: OrderedDict[str, tuple[Member, int]] = OrderedDict()
        self._by_name: dict[str, dict[str, Listed]] = {}
        """Entries of each source by name."""
        self._contradicting: set[str] = set()
        """Members that have joined and are refused."""
        self._addresses: Counter[str] = Counter()
        """Of the members that have joined; parts that a gateway was started with may share one."""
        self._counts: Counter[MemberKind] = Counter()

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        joined = [each.member for each in self._joined.values()]
        hold(
            addresses_are_those_of_members=self._addresses
            == Counter(member.address for member in joined),
            kinds_are_those_of_members=self._counts == Counter(member.kind for member in joined),
            who_waits_has_a_namesake_that_leaves=not any(
                self._joined[name].is_listed for name in self._waiting.keys() & self._joined.keys()
            ),
            few_that_left_are_shown=len(self._gone) <= GONE_SHOWN_MAX,
        )

    # Events

    def begin(self, source: str, entries: Sequence[Listed], now_ns: int) -> None:
        """Take over the members that a gateway is started with, connected already."""
        self._listed[source] = entries
        self._by_name[source] = {each.member.name: each for each in entries}
        for each in entries:
            self._add(_Joined(each.member, State.SEEN, now_ns))

    def listed(
        self,
        source: str,
        entries: Sequence[Listed],
        now_ns: int,
        unread: Sequence[RefusedEntry] = (),
    ) -> list[Action]:
        """Handle the whole current list of a source.

        If nobody is refused or waits, a change of some engines costs no work for the others.

        Args:
            source: Its name; lists of other sources stay.
            unread: Entries that could not be read.
        """
        if source in self._site.identified:
            odd = {each.member: without_identity(each.member) for each in entries}
            entries = [each for each in entries if odd[each.member] is None]
            unread = [*unread, *filter(None, odd.values())]
        before = self._by_name.get(source, {})
        now = self._by_name[source] = {each.member.name: each for each in entries}
        was_plain = not (self._refused or self._waiting or self._contradicting)
        is_plain = was_plain and not unread and len(now) == len(entries)
        self._listed[source], self._unread[source] = entries, unread
        if is_plain and (actions := self._changes(source, before, now, now_ns)) is not None:
            return actions
        return self._reconcile(now_ns)

    def well(self, name: str, now_ns: int, *, is_well: bool) -> list[Action]:
        """A member answers, or does not; one that has left changes nothing."""
        joined = self._joined.get(name)
        if joined is None or joined.is_well == is_well:
            return []
        joined.is_well = is_well
        return self._settle(name, now_ns)

    def contradicts(self, refusal: RefusedEntry, now_ns: int) -> list[Action]:
        """A member has reported something else than the site has: it gets nothing."""
        joined = self._joined.get(refusal.name)
        if joined is None or joined.refusal == refusal:
            return []
        joined.refusal = refusal
        self._contradicting.add(refusal.name)
        return self._settle(refusal.name, now_ns)

    def agrees(self, name: str, now_ns: int, reason: RefusalCause) -> list[Action]:
        """A member does not contradict the site by `reason` any more."""
        joined = self._joined.get(name)
        if joined is None or joined.refusal is None or joined.refusal.reason is not reason:
            return []
        joined.refusal = None
        self._contradicting.discard(name)
        return self._settle(name, now_ns)

    def drained(self, is_idle: Callable[[Member], bool], now_ns: int) -> list[Action]:
        """Let members that drain leave if nothing runs on them, engines before pool nodes.

        Args:
            is_idle: Returns True if no leg and no transfer uses a member.
        """
        leaving = [each for each in self._joined.values() if not each.is_listed]
        if not leaving:
            return []
        actions: list[Action] = []
        for each in sorted(leaving, key=lambda each: each.member.kind is MemberKind.POOL):
            member = each.member
            if not self._is_needed(member) and is_idle(member):
                self._remove(member)
                self._bury(member, now_ns)
                actions.append(Leave(member))
        has_heirs = bool(self._waiting or self._refused)
        return actions + self._reconcile(now_ns) if actions and has_heirs else actions

    # What there is

    @property
    def is_draining(self) -> bool:
        """Return True if a member waits for the end of its work."""
        return any(not each.is_listed for each in self._joined.values())

    def members(self) -> list[Member]:
        """Members that have joined and not left."""
        return [each.member for each in self._joined.values()]

    def state_of(self, name: str) -> State | None:
        """State of a member that has joined; None for others."""
        joined = self._joined.get(name)
        return None if joined is None else joined.state

    def is_awaited(self, name: str) -> bool:
        """Return True if a member of this name joins once its predecessor has left."""
        return name in self._waiting

    def rows(self) -> list[MemberRow]:
        """Return all members, refused entries and those that left lately."""
        rows = [
            MemberRow(each.member, each.member.name, each.state, each.since_ns, each.refusal)
            for each in self._joined.values()
        ]
        rows += [
            MemberRow(each.member, name, State.SEEN, since_ns)
            for name, (each, since_ns) in self._waiting.items()
        ]
        rows += [
            MemberRow(None, refusal.name, State.REFUSED, since_ns, refusal)
            for refusal, since_ns in self._refused.values()
        ]
        rows += [
            MemberRow(member, name, State.GONE, since_ns)
            for name, (member, since_ns) in self._gone.items()
        ]
        return rows

    def refusals(self) -> dict[str, RefusedEntry]:
        """Return the refused entries and members by name."""
        found = {name: self._joined[name].refusal for name in self._contradicting}
        entries = {refusal.name: refusal for refusal, _ in self._refused.values()}
        return {name: each for name, each in found.items() if each is not None} | entries

    # Steps

    def _changes(
        self, source: str, before: dict[str, Listed], now: dict[str, Listed], now_ns: int
    ) -> list[Action] | None:
        """Apply a change of engines that concerns nobody else; None if it may."""
        gone = before.keys() - now.keys()
        changed = [
            each
            for name, each in now.items()
            if (old := before.get(name)) is not each and old != each
        ]
        others = [each for name, each in self._by_name.items() if name != source]
        for name in (*gone, *(each.member.name for each in changed)):
            joined = self._joined.get(name)
            is_known = joined is None or (
                joined.is_listed and joined.member.kind is MemberKind.ENGINE
            )
            if not is_known or any(name in each for each in others):
                return None
        for each in changed:
            joined = self._joined.get(each.member.name)
            if joined is None and not self._is_welcome(each.member):
                return None
            if joined is not None and joined.member != each.member:
                return None
        new = [each.member.address for each in changed if each.member.name not in self._joined]
        most = self._site.limits[MemberKind.ENGINE]
        if len(set(new)) != len(new) or self._counts[MemberKind.ENGINE] + len(new) > most:
            return None
        actions: list[Action] = []
        for name in sorted(gone):
            self._joined[name].is_listed = False
            actions += self._settle(name, now_ns)
        for each in sorted(changed, key=lambda each: each.member.name):
            joined = self._joined.get(each.member.name)
            if joined is None:
                actions += self._join(each, now_ns)
            else:
                joined.is_ready, joined.is_ending = each.is_ready, each.is_ending
                actions += self._settle(each.member.name, now_ns)
        return actions

    def _is_welcome(self, member: Member) -> bool:
        """Return True if a new engine contradicts nobody, and waits for nobody."""
        if member.kind is not MemberKind.ENGINE or member.address in self._addresses:
            return False
        if not self._stands(member.pool) or member.cluster not in self._site.clusters:
            return False
        pool = Listed(self._joined[member.pool].member)
        return odd_engine(member, {member.pool: pool}, self._site) is None

    def _add(self, joined: _Joined) -> None:
        self._joined[joined.member.name] = joined
        self._addresses[joined.member.address] += 1
        self._counts[joined.member.kind] += 1

    def _remove(self, member: Member) -> None:
        del self._joined[member.name]
        self._contradicting.discard(member.name)
        self._counts[member.kind] -= 1
        self._addresses[member.address] -= 1
        if not self._addresses[member.address]:
            del self._addresses[member.address]

    def _join(self, entry: Listed, now_ns: int) -> list[Action]:
        member = entry.member
        self._gone.pop(member.name, None)
        self._add(
            _Joined(member, State.SEEN, now_ns, is_ready=entry.is_ready, is_ending=entry.is_ending)
        )
        return [Join(member), *self._settle(member.name, now_ns)]

    def _reconcile(self, now_ns: int) -> list[Action]:
        incumbents = {name: each.member for name, each in self._joined.items() if each.is_listed}
        everything = [each for entries in self._listed.values() for each in entries]
        found, refused = accepted(everything, incumbents, self._site)
        refused += [each for unread in self._unread.values() for each in unread]
        self._note_refusals(refused, now_ns)
        actions: list[Action] = []
        for name, joined in self._joined.items():
            entry = found.get(name)
            joined.is_listed = entry is not None and entry.member == joined.member
            if entry is not None and joined.is_listed:
                joined.is_ready, joined.is_ending = entry.is_ready, entry.is_ending
            actions += self._settle(name, now_ns)
        return actions + self._let_in(found.values(), now_ns)

    def _let_in(self, found: Iterable[Listed], now_ns: int) -> list[Action]:
        """Newcomers join, unless one that drains has their name or address."""
        actions: list[Action] = []
        waiting, before = {}, self._waiting
        held = set(self._addresses)
        for entry in found:
            member, joined = entry.member, self._joined.get(entry.member.name)
            if joined is not None and joined.member == member:
                continue
            # An engine whose pool node has not joined waits for it.
            is_early = member.kind is MemberKind.ENGINE and not self._stands(member.pool)
            if joined is not None or member.address in held or is_early:
                waiting[member.name] = entry, before.get(member.name, (entry, now_ns))[1]
                continue
            held.add(member.address)
            actions += self._join(entry, now_ns)
        self._waiting = waiting
        return actions

    def _is_needed(self, member: Member) -> bool:
        """Return True if engines lose their pool node for good."""
        if member.kind is not MemberKind.POOL or member.name in self._waiting:
            return False
        return any(other.member.pool == member.name for other in self._joined.values())

    def _stands(self, pool: str) -> bool:
        joined = self._joined.get(pool)
        return joined is not None and joined.is_listed

    def _settle(self, name: str, now_ns: int) -> list[Action]:
        joined = self._joined[name]
        if joined.state is not joined.wanted:
            joined.state, joined.since_ns = joined.wanted, now_ns
        # Routing excludes other layouts by itself, and explains decisions by them.
        refused = (
            joined.refusal is not None and joined.refusal.reason is not RefusalCause.OTHER_LAYOUT
        )
        withheld = joined.state is State.DRAINING or refused or not joined.is_ready
        if withheld == joined.withheld:
            return []
        joined.withheld = withheld
        return [Withhold(name, withheld)]

    def _note_refusals(self, refused: Iterable[RefusedEntry], now_ns: int) -> None:
        before, self._refused = self._refused, {}
        for each in refused:
            key = each.name, each.words
            self._refused[key] = each, before.get(key, (each, now_ns))[1]

    def _bury(self, member: Member, now_ns: int) -> None:
        self._gone.pop(member.name, None)
        self._gone[member.name] = member, now_ns
        while len(self._gone) > GONE_SHOWN_MAX:
            self._gone.popitem(last=False)
