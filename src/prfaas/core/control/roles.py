"""Roles of PD instances, and their changes.

    works ─► drains: takes nothing new, ends what it has ─► is converted ─► works in the other role
      ▲         │
      └─────────┘ has not ended it in time: continues as before, and another one is tried next

The long-term loop says when; this says which instance, and what it may take meanwhile. The gateway
and the simulator keep their roles in it. Instances go by their index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.core.control.role_loop import Planned, Role, RoleChange, RoleLoop, StageLoad
from prfaas.core.control.threshold_loop import Mixes

UNSET = -1
WorkOf = Callable[[int], int]
"""Remaining work of an instance in its role: 0 is none, and the least is drained first."""


@dataclass(slots=True)
class Change:
    """An instance changes its role. Instants in ns, UNSET for what has not happened."""

    index: int
    to: Role
    began_at_ns: int
    """Time when it stopped taking work."""
    drained_at_ns: int = UNSET
    """Time when its last work had ended; UNSET also of a change that was aborted."""
    ended_at_ns: int = UNSET
    """Time when it could work again."""


class Roles:
    """The role of every PD instance.

    Args:
        loop: Decides role changes; None changes nothing.
    """

    def __init__(self, roles: Sequence[Role], loop: RoleLoop | None = None) -> None:
        self._roles = list(roles)
        self._usable = [True] * len(self._roles)
        self._since_ns = [0] * len(self._roles)
        self._time_ns = dict.fromkeys(Role, 0)
        self._loop = loop
        self.mixes = Mixes(loop.settings.dwell_ns if loop else 0)
        """Recent traffic."""
        self.change: Change | None = None
        """The change under way."""
        self._last_given_up: int | None = None

    @property
    def all(self) -> Sequence[Role]:
        """The role that each instance has; one that drains has its old one."""
        return self._roles

    def place(self, index: int, role: Role, now_ns: int) -> None:
        """An instance joins with a role, at the end or in the place of one that has left."""
        if index == len(self._roles):
            self._roles.append(role)
            self._usable.append(False)
            self._since_ns.append(now_ns)
        self._roles[index], self._usable[index], self._since_ns[index] = role, False, now_ns

    def leave(self, index: int) -> None:
        """An instance has left; a change of its role is over."""
        self._usable[index] = False
        if self.change is not None and self.change.index == index:
            self.change = None

    def set_usable(self, index: int, *, usable: bool) -> None:
        """An instance is there, or is not: the loop counts only those that are."""
        self._usable[index] = usable

    def is_usable(self, index: int) -> bool:
        """Return True if an instance is there."""
        return self._usable[index]

    def takes(self, index: int, role: Role) -> bool:
        """Return True if an instance takes work in a role."""
        return self._roles[index] is role and not self._is_changing(index)

    def with_role(self, role: Role) -> list[int]:
        """Instances that are there and take work in a role."""
        return [i for i in range(len(self._roles)) if self._usable[i] and self.takes(i, role)]

    def count(self, role: Role) -> int:
        """Instances that are there and take work in a role."""
        return len(self.with_role(role))

    def time_ns(self, role: Role, now_ns: int) -> int:
        """Time that instances had a role, draining included, summed over them; at least 1."""
        open_ns = sum(
            now_ns - since
            for r, since in zip(self._roles, self._since_ns, strict=True)
            if r is role
        )
        return max(self._time_ns[role] + open_ns, 1)

    def update(
        self,
        now_ns: int,
        prefill: StageLoad | None,
        decode: StageLoad | None,
        planned: Planned | None,
        work_of: WorkOf,
    ) -> RoleChange | None:
        """One interval of the long-term loop; a change of a role has then begun in `change`.

        Args:
            prefill: What was seen of the instances that prefill; None is unknown or too old.
            planned: Plans of splits; None without profiles.
            work_of: What instances have left to do.
        """
        num_prefill, num_decode = self.count(Role.PREFILL), self.count(Role.DECODE)
        if self._loop is None or not num_prefill or not num_decode:
            return None
        found = self._loop.update(now_ns, num_prefill, num_decode, prefill, decode, planned)
        if found is not None and found.to is not None:
            of_role = self.with_role(Role.DECODE if found.to is Role.PREFILL else Role.PREFILL)
            index = min(of_role, key=lambda i: (i == self._last_given_up, work_of(i), i))
            self.change = Change(index, found.to, now_ns)
        return found

    def has_drained(self, now_ns: int, work_of: WorkOf) -> bool:
        """Return True if the instance that changes has nothing left to do."""
        change = self.change
        if change is None or work_of(change.index):
            return False
        if change.drained_at_ns == UNSET:
            change.drained_at_ns = now_ns
        return True

    def convert(self, now_ns: int) -> Change:
        """The change is over: the instance works in its new role; returns what was changed."""
        change = self.change
        assert change is not None and self._loop is not None  # noqa: S101, PT018 (it has begun)
        index = change.index
        self._time_ns[self._roles[index]] += now_ns - self._since_ns[index]
        self._roles[index], self._since_ns[index] = change.to, now_ns
        change.ended_at_ns, self.change = now_ns, None
        self._last_given_up = None
        self._loop.changed(now_ns)
        return change

    def gives_up(self, now_ns: int) -> Change | None:
        """A drain that takes too long is aborted: the instance continues in the role that it has;
        returns what was aborted, if anything was."""
        change, loop = self.change, self._loop
        if change is None or loop is None or change.drained_at_ns != UNSET:
            return None
        if now_ns - change.began_at_ns < loop.settings.drain_max_ns:
            return None
        change.ended_at_ns, self.change = now_ns, None
        self._last_given_up = change.index
        loop.changed(now_ns)
        return change

    def _is_changing(self, index: int) -> bool:
        return self.change is not None and self.change.index == index
