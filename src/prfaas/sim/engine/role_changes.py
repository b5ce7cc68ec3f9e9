"""PD instances that change between prefill and decode while the system runs.

Every PD instance can do both and is known under two names; the one of the role that it does not
have is not ready. Who has which role is kept by the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from prfaas.core.control.offloaded_work import Spared
from prfaas.core.control.role_loop import Role, RoleChange, RoleLoop, SplitPlan, StageLoad
from prfaas.core.control.roles import UNSET, Change
from prfaas.core.control.roles import Roles as CoreRoles
from prfaas.sim.engine.decode_instance import DecodeInstance
from prfaas.sim.engine.prefill_instance import PrefillInstance
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.sim.engine.run_parts import RunParts

Instance = TypeVar("Instance", PrefillInstance, DecodeInstance)

LOOK_INTERVAL_NS = NS_PER_S
"""How often a draining instance is looked at."""
_MEAN_WEIGHT = 0.02


def as_dict(change: Change) -> dict[str, Any]:
    """A change for JSON; None for what has not happened."""
    instants = (change.began_at_ns, change.drained_at_ns, change.ended_at_ns)
    began, drained, ended = (None if at == UNSET else at / NS_PER_S for at in instants)
    return {
        "instance": change.index,
        "to": change.to.value,
        "began_at_s": began,
        "drained_at_s": drained,
        "ended_at_s": ended,
    }


class Roles:
    """Who prefills, who decodes, and the long-term loop.

    Args:
        simulation: Whose instances.
    """

    def __init__(self, simulation: RunParts) -> None:
        self._sim, setup = simulation, simulation.setup
        self._setup = setup.roles
        loop = None
        if setup.roles is not None:
            loop = RoleLoop(setup.routing.offload_threshold, setup.roles.settings)
        at_first = [Role.PREFILL] * setup.num_prefill + [Role.DECODE] * setup.num_decode
        self._roles = CoreRoles(at_first, loop)
        self._decode_ns = 0.0
        self._spared = Spared()
        self.changes: list[Change] = []

    def start(self) -> None:
        """Instances begin in the roles of the setup."""
        if self._setup is None:
            return
        for index, role in self.working:
            self._set_ready(index, Role.DECODE if role is Role.PREFILL else Role.PREFILL, up=False)
        self._sim.clock.after(self._sim.setup.signals.loop_interval_ns, self._look)

    def came(self, request: Request, num_new: int) -> None:
        """A request has come, of so many incremental tokens for the PD cluster."""
        self._roles.mixes.came(self._sim.clock.now_ns, num_new, request.num_prompt_tokens)

    def finished(self, request: Request) -> None:
        """A request has all its tokens."""
        now_ns = self._sim.clock.now_ns
        weight = _MEAN_WEIGHT if self._decode_ns else 1.0
        self._decode_ns += weight * (now_ns - request.first_token_at_ns - self._decode_ns)
        self._roles.mixes.ended(now_ns, request.num_output_tokens)

    def count(self, role: Role) -> int:
        """Instances that have a role and take work in it."""
        return self._roles.count(role)

    def time_ns(self, role: Role) -> int:
        """Time that instances had a role, draining included, summed over them."""
        return self._roles.time_ns(role, self._sim.clock.now_ns)

    @property
    def working(self) -> list[tuple[int, Role]]:
        """Every instance with the role that it has."""
        return list(enumerate(self._roles.all))

    def prefilling(self) -> list[PrefillInstance]:
        """PD instances that prefill and are up, those that drain left out."""
        of_role = self._of_role(Role.PREFILL, tuple(self._sim.locals.values()))
        return [instance for instance in of_role if instance.up]

    def decoding(self) -> list[DecodeInstance]:
        """PD instances that decode and are up, those that drain left out."""
        of_role = self._of_role(Role.DECODE, tuple(self._sim.decoders.values()))
        return [instance for instance in of_role if instance.up]

    def _of_role(self, role: Role, instances: tuple[Instance, ...]) -> list[Instance]:
        if self._setup is None:
            return list(instances)
        return [instances[i] for i in self._roles.with_role(role)]

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
        spared_ns = self._sim.front.dispatcher.spared_ns
        spared = self._spared.look(spared_ns, self._sim.clock.now_ns)
        return StageLoad(busy + spared, sum(instance.queued_ns for instance in found))

    def _decode(self) -> StageLoad:
        found, slots = self._sim.decoders.values(), self._sim.setup.decode.batch_max
        running = sum(instance.num_running for instance in found)
        waiting = sum(instance.num_waiting for instance in found)
        return StageLoad(running / slots, round(waiting * self._decode_ns / slots))

    def _decide(self, seen: tuple[StageLoad, StageLoad]) -> None:
        found = self._roles.update(
            self._sim.clock.now_ns,
            *seen,
            self._planned if self._setup and self._setup.plans else None,
            self._work_of,
        )
        if found is not None:
            self._begin(found)

    def _planned(self, num_prefill: int) -> SplitPlan | None:
        plans = self._setup.plans if self._setup else None
        now_ns = self._sim.clock.now_ns
        bits_per_s = self._sim.front.dispatcher.home_bits_per_s(now_ns)
        if plans is None or not bits_per_s:
            return None
        return plans(num_prefill, bits_per_s, self._roles.mixes.look(now_ns))

    # A change

    def _begin(self, found: RoleChange) -> None:
        if found.offload_threshold is not None:
            self._sim.front.replan(found.offload_threshold)
        change = self._roles.change
        if found.to is None or change is None:
            return
        self._set_ready(change.index, self._roles.all[change.index], up=False)
        self.changes.append(change)
        self._drain(None)

    def _drain(self, _argument: None) -> None:
        assert self._setup is not None  # noqa: S101 (a change has begun)
        if self._roles.has_drained(self._sim.clock.now_ns, self._work_of):
            self._sim.clock.after(self._setup.settings.conversion_ns, self._converted)
        elif (change := self._roles.gives_up(self._sim.clock.now_ns)) is not None:
            self._set_ready(change.index, self._roles.all[change.index], up=True)
        else:
            self._sim.clock.after(LOOK_INTERVAL_NS, self._drain)

    def _converted(self, _argument: None) -> None:
        change = self._roles.convert(self._sim.clock.now_ns)
        self._set_ready(change.index, change.to, up=True)

    def _work_of(self, index: int) -> int:
        if self._roles.all[index] is Role.PREFILL:
            return self._sim.locals[self._sim.front.prefill_names[index]].backlog_ns()
        front = self._sim.front
        return len(front.dispatcher.requests.decoded_by(front.decode_names[index]))

    def _set_ready(self, index: int, role: Role, *, up: bool) -> None:
        front = self._sim.front
        names = front.prefill_names if role is Role.PREFILL else front.decode_names
        front.set_ready(names[index], ready=up, now_ns=self._sim.clock.now_ns)
