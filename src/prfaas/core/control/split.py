"""PD instances that only prefill or only decode at a time, under names, with their load.

Every one can do both. The dispatcher knows it under two names, and the one of the role that it does
not have is not ready; an instance's role is what it is given to do, and nothing has to be told to
it. Where no instance is left in a role, those of the other role do both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prfaas.core.control.role_loop import (
    Jobs,
    Planned,
    Role,
    RoleChange,
    RoleLoop,
    SplitPlan,
    StageLoad,
    StageLoads,
)
from prfaas.core.control.roles import Roles
from prfaas.core.control.threshold_loop import TrafficMix

_DECODES = ":decode"
"""Names of instances have no colon."""

Plans = Callable[[int, float, TrafficMix | None], SplitPlan | None]
"""The planner's answer for a number of prefill instances, links of so many bits per second, and
requests as they are lately; None are those of the plan."""


class Routing(Protocol):
    """State of instances and links in the dispatcher."""

    spared_ns: int
    """Prefill that the PD cluster was spared so far, ns of an instance."""

    def load(self, name: str) -> Jobs:
        """Jobs of an instance that prefills."""

    def num_decoded_by(self, name: str) -> int:
        """Open requests that an instance was chosen to decode."""

    def local_bits_per_s(self, now_ns: int) -> float | None:
        """Rate of all links to the PD cluster; None is unknown."""


class Split:
    """The roles of the PD instances.

    Args:
        loop: Changes roles; None keeps them.
        decode_slots: Requests that an instance decodes at a time; 0 is unknown.
        plans: The planner's answers for splits; None without.
    """

    def __init__(
        self,
        names: Sequence[str],
        at_first: Sequence[Role],
        loop: RoleLoop | None,
        decode_slots: int = 0,
        plans: Plans | None = None,
    ) -> None:
        self._names: list[str] = list(names)
        self._plans = plans
        self._index = {name: index for index, name in enumerate(names)}
        self.roles = Roles(at_first, loop)
        self.loads = StageLoads(max(decode_slots, 1))
        for name in names:
            self.set_usable(name, usable=False)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def add(self, name: str, role: Role, now_ns: int) -> None:
        """An instance joins; it is not usable yet."""
        index = self._names.index("") if "" in self._names else len(self._names)
        self._names[index : index + 1] = [name]
        self._index[name] = index
        self.roles.place(index, role, now_ns)

    def remove(self, name: str) -> None:
        """An instance has left; its place is free for another one."""
        index = self._index.pop(name)
        self._names[index] = ""
        self.roles.leave(index)
        self.loads.forget(name)

    def name_of(self, index: int) -> str:
        """The instance with an index of `roles`."""
        return self._names[index]

    @property
    def names(self) -> tuple[str, ...]:
        """All instances."""
        return tuple(self._index)

    def set_usable(self, name: str, *, usable: bool) -> None:
        """An instance takes work of some kind, or none."""
        self.roles.set_usable(self._index[name], usable=usable)

    def role_of(self, name: str) -> Role:
        """Return the role of an instance, the old one until a change is done."""
        return self.roles.all[self._index[name]]

    def prefills(self, name: str) -> bool:
        """Return True if an instance has the role to prefill."""
        return self.role_of(name) is Role.PREFILL

    def is_changing(self, name: str) -> bool:
        """Return True if an instance drains before it takes another role."""
        change = self.roles.change
        return change is not None and change.index == self._index[name]

    def ready(self) -> Iterator[tuple[str, bool]]:
        """Readiness of every instance under both of its names."""
        able = [set(self.roles.with_role(role)) for role in (Role.PREFILL, Role.DECODE)]
        prefilling, decoding = (of or able[0] | able[1] for of in able)
        for name, index in self._index.items():
            yield name, index in prefilling
            yield decode_name(name), index in decoding

    def finished(self, at_ns: int, decode_ns: int, num_output_tokens: int) -> None:
        """A request was answered in full, so long after its first token."""
        self.loads.decoded(decode_ns)
        self.roles.mixes.ended(at_ns, num_output_tokens)

    # The long-term loop

    def load(self, routing: Routing, now_ns: int) -> tuple[StageLoad | None, StageLoad | None]:
        """Return the load of prefill and of decode; None is unknown."""
        prefilling, decoding = self._of_role(Role.PREFILL), self._of_role(Role.DECODE)
        prefill = self.loads.prefill(prefilling, routing.load, routing.spared_ns, now_ns)
        return prefill, self.loads.decode(decoding, now_ns)

    def update(
        self,
        routing: Routing,
        prefill: StageLoad | None,
        decode: StageLoad | None,
        now_ns: int,
    ) -> RoleChange | None:
        """One interval of the loop; a change of a role has then begun in `roles.change`."""
        planned = self._planned(routing, now_ns)
        return self.roles.update(now_ns, prefill, decode, planned, self.work_of(routing))

    def work_of(self, routing: Routing) -> Callable[[int], int]:
        """Requests that an instance has in its role: ours, and those that it reports."""

        def work(index: int) -> int:
            if not self.roles.is_usable(index):
                return 0
            name = self._names[index]
            if self.prefills(name):
                own = routing.load(name).num_jobs(name)
            else:
                own = routing.num_decoded_by(decode_name(name))
            return max(own, self.loads.num_reported(name))

        return work

    def _planned(self, routing: Routing, now_ns: int) -> Planned | None:
        """Plans of splits for what the links carry; None while that is not known."""
        plans, bits_per_s = self._plans, routing.local_bits_per_s(now_ns)
        if plans is None or not bits_per_s:
            return None
        mix = self.roles.mixes.look(now_ns)
        return lambda num_prefill: plans(num_prefill, bits_per_s, mix)

    def _of_role(self, role: Role) -> list[str]:
        """Instances of a role, one that drains included, those that are not usable left out."""
        return [
            name
            for name, index in self._index.items()
            if self.roles.all[index] is role and self.roles.is_usable(index)
        ]


def decode_name(name: str) -> str:
    """Name of an instance as one that decodes, where instances have roles."""
    return name + _DECODES


def instance_of(name: str) -> str:
    """The instance behind either of its names."""
    return name.removesuffix(_DECODES)
