"""PD instances that change between prefill and decode while the system runs.

    works ─► drains: takes nothing new, ends what it has ─► is converted ─► works in the other role

Every PD instance can do both and is known under two names; the one of the role that it does not
have is not ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from prfaas.core.role_loop import Role, RoleChange, RoleLoop, SplitPlan, StageLoad
from prfaas.sim.decode import DecodeInstance
from prfaas.sim.prefill import PrefillInstance
from prfaas.sim.request import UNSET
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.sim.simulation import Simulation

Instance = TypeVar("Instance", PrefillInstance, DecodeInstance)

LOOK_INTERVAL_NS = NS_PER_S
"""How often a draining instance is looked at."""
_MEAN_WEIGHT = 0.02


@dataclass(slots=True)
class Change:
    """An instance changes its role. Instants in ns.

    Attributes:
        index: Which PD instance.
        to: Its next role.
        began_at_ns: When it stopped taking work.
        drained_at_ns: When its last work had ended.
        ended_at_ns: When it could work again.
    """

    index: int
    to: Role
    began_at_ns: int
    drained_at_ns: int = UNSET
    ended_at_ns: int = UNSET

    def as_dict(self) -> dict[str, Any]:
        """For JSON; None for what has not happened."""
        instants = (self.began_at_ns, self.drained_at_ns, self.ended_at_ns)
        began, drained, ended = (None if at == UNSET else at / NS_PER_S for at in instants)
        return {
            "instance": self.index,
            "to": self.to.value,
            "began_at_s": began,
            "drained_at_s": drained,
            "ended_at_s": ended,
        }


class Roles:
    """Who prefills, who decodes, and the long-term loop.

    Args:
        simulation: Whose instances.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._sim, setup = simulation, simulation.setup
        self._roles = [Role.PREFILL] * setup.num_prefill + [Role.DECODE] * setup.num_decode
        self._since_ns = [0] * len(self._roles)
        self._time_ns = dict.fromkeys(Role, 0)
        self._setup = setup.roles
        self._loop: RoleLoop | None = None
        if setup.roles is not None:
            self._loop = RoleLoop(setup.routing.offload_threshold, setup.roles.settings)
        self._decode_ns = 0.0
        self._change: Change | None = None
        self.changes: list[Change] = []

    def start(self) -> None:
        """Instances begin in the roles of the setup."""
        if self._loop is None:
            return
        for index, role in enumerate(self._roles):
            self._set_ready(index, Role.DECODE if role is Role.PREFILL else Role.PREFILL, up=False)
        self._sim.clock.after(self._sim.setup.signals.loop_interval_ns, self._look)

    def decoded(self, took_ns: int) -> None:
        """A request was decoded in so much time."""
        weight = _MEAN_WEIGHT if self._decode_ns else 1.0
        self._decode_ns += weight * (took_ns - self._decode_ns)

    def count(self, role: Role) -> int:
        """Instances that have a role and take work in it."""
        changing = self._change.index if self._change else None
        return sum(r is role and i != changing for i, r in enumerate(self._roles))

    def time_ns(self, role: Role) -> int:
        """Time that instances had a role, draining included, summed over them."""
        now = self._sim.clock.now_ns
        open_ns = sum(
            now - since for r, since in zip(self._roles, self._since_ns, strict=True) if r is role
        )
        return max(self._time_ns[role] + open_ns, 1)

    @property
    def working(self) -> list[tuple[int, Role]]:
        """Every instance with the role that it has."""
        return list(enumerate(self._roles))

    def prefilling(self) -> list[PrefillInstance]:
        """PD instances that prefill and are up, those that drain left out."""
        of_role = self._of_role(Role.PREFILL, tuple(self._sim.locals.values()))
        return [instance for instance in of_role if instance.up]

    def decoding(self) -> list[DecodeInstance]:
        """PD instances that decode and are up, those that drain left out."""
        of_role = self._of_role(Role.DECODE, tuple(self._sim.decoders.values()))
        return [instance for instance in of_role if instance.up]

    def _of_role(self, role: Role, instances: tuple[Instance, ...]) -> list[Instance]:
        if self._loop is None:
            return list(instances)
        changing = self._change.index if self._change else None
        return [instances[i] for i, r in enumerate(self._roles) if r is role and i != changing]

    # The loop

    def _look(self, _argument: None) -> None:
        sim = self._sim
        if not sim.busy:
            return
        sim.clock.after(sim.setup.signals.delay_ns, self._decide, (self._prefill(), self._decode()))
        sim.clock.after(sim.setup.signals.loop_interval_ns, self._look)

    def _prefill(self) -> StageLoad:
        found = self._sim.locals.values()
        busy = sum(instance.is_busy for instance in found)
        return StageLoad(busy, sum(instance.queued_ns for instance in found))

    def _decode(self) -> StageLoad:
        found, slots = self._sim.decoders.values(), self._sim.setup.decode.batch_max
        running = sum(instance.num_running for instance in found)
        waiting = sum(instance.num_waiting for instance in found)
        return StageLoad(running / slots, round(waiting * self._decode_ns / slots))

    def _decide(self, seen: tuple[StageLoad, StageLoad]) -> None:
        assert self._loop is not None  # noqa: S101 (started with one)
        found = self._loop.update(
            self._sim.clock.now_ns,
            self.count(Role.PREFILL),
            self.count(Role.DECODE),
            *seen,
            self._planned if self._setup and self._setup.plans else None,
        )
        if found is not None:
            self._begin(found)

    def _planned(self, num_prefill: int) -> SplitPlan | None:
        plans = self._setup.plans if self._setup else None
        bits_per_s = self._sim.front.link_bits_per_s(self._sim.clock.now_ns)
        return None if plans is None or not bits_per_s else plans(num_prefill, bits_per_s)

    # A change

    def _begin(self, found: RoleChange) -> None:
        if found.offload_threshold is not None:
            self._sim.front.replan(found.offload_threshold)
        if found.to is None:
            return
        index = self._least_busy(Role.DECODE if found.to is Role.PREFILL else Role.PREFILL)
        self._set_ready(index, self._roles[index], up=False)
        self._change = Change(index, found.to, self._sim.clock.now_ns)
        self.changes.append(self._change)
        self._drain(None)

    def _least_busy(self, role: Role) -> int:
        """The instance of a role that drains first."""
        of_role = [i for i, r in enumerate(self._roles) if r is role]
        if role is Role.PREFILL:
            return min(of_role, key=lambda i: (self._prefill_of(i).backlog_ns(), i))
        return min(of_role, key=lambda i: (len(self._decoded_by(i)), i))

    def _drain(self, _argument: None) -> None:
        change = self._change
        assert change is not None and self._setup is not None  # noqa: S101, PT018 (it has begun)
        if self._has_work(change.index):
            self._sim.clock.after(LOOK_INTERVAL_NS, self._drain)
            return
        change.drained_at_ns = self._sim.clock.now_ns
        self._sim.clock.after(self._setup.settings.conversion_ns, self._converted)

    def _converted(self, _argument: None) -> None:
        change, now = self._change, self._sim.clock.now_ns
        assert change is not None and self._loop is not None  # noqa: S101, PT018 (it has begun)
        index = change.index
        self._time_ns[self._roles[index]] += now - self._since_ns[index]
        self._roles[index], self._since_ns[index] = change.to, now
        change.ended_at_ns, self._change = now, None
        self._set_ready(index, change.to, up=True)
        self._loop.changed(now)

    def _has_work(self, index: int) -> bool:
        if self._roles[index] is Role.PREFILL:
            return self._prefill_of(index).backlog_ns() > 0
        return bool(self._decoded_by(index))

    def _prefill_of(self, index: int) -> PrefillInstance:
        return self._sim.locals[self._sim.front.prefill_names[index]]

    def _decoded_by(self, index: int) -> list[int]:
        return self._sim.front.dispatcher.decoded_by(self._sim.front.decode_names[index])

    def _set_ready(self, index: int, role: Role, *, up: bool) -> None:
        front = self._sim.front
        names = front.prefill_names if role is Role.PREFILL else front.decode_names
        front.set_ready(names[index], ready=up, now_ns=self._sim.clock.now_ns)
