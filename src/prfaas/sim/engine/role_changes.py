"""PD instances that change between prefill and decode while the system runs.

Roles, their loop and both names of an instance are the core's (`core/control/split.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from prfaas.core.control.role_loop import InstanceQueue, Role, RoleLoop, StageLoad
from prfaas.core.control.roles import UNSET, Change
from prfaas.core.control.split import Split
from prfaas.sim.resources.decode_instance import DecodeInstance
from prfaas.sim.resources.prefill_instance import PrefillInstance
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.sim.engine.request_run import RunParts

Instance = TypeVar("Instance", PrefillInstance, DecodeInstance)

LOOK_INTERVAL_NS = NS_PER_S
"""Interval of checks of a draining instance."""


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


class RoleChanges:
    """Roles of instances, and the long-term loop."""

    def __init__(self, simulation: RunParts) -> None:
        self._sim, setup, front = simulation, simulation.setup, simulation.front
        self._setup, loop, plans = setup.roles, None, None
        if setup.roles is not None:
            loop = RoleLoop(setup.routing.offload_threshold, setup.roles.settings)
            plans = setup.roles.plans
        names = front.prefill_names + (() if setup.roles else front.decode_names)
        at_first = [Role.PREFILL] * setup.num_prefill + [Role.DECODE] * setup.num_decode
        self._split = Split(names, at_first, loop, setup.decode.batch_max, plans)
        self._roles = self._split.roles
        for name in names:
            self._split.set_usable(name, usable=True)
        self.changes: list[Change] = []

    def start(self) -> None:
        """Instances begin in the roles of the setup."""
        if self._setup is None:
            return
        self._apply()
        self._sim.clock.after(0, self._observe)
        self._sim.clock.after(self._sim.setup.signals.loop_interval_ns, self._turn)

    def came(self, request: Request, num_new: int) -> None:
        """A request has come, of so many incremental tokens for the PD cluster; where instances
        have roles."""
        self._roles.mixes.came(self._sim.clock.now_ns, num_new, request.num_prompt_tokens)

    def finished(self, request: Request) -> None:
        """A request has all its tokens; where instances have roles."""
        now_ns = self._sim.clock.now_ns
        self._split.finished(now_ns, now_ns - request.first_token_at_ns, request.num_output_tokens)

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
        found = [*self._sim.locals.values()]
        return [each for each in self._with_role(Role.PREFILL, found) if each.up]

    def decoding(self) -> list[DecodeInstance]:
        """PD instances that decode and are up, those that drain left out."""
        found = [*self._sim.decoders.values()]
        return [each for each in self._with_role(Role.DECODE, found) if each.up]

    def _with_role(self, role: Role, instances: list[Instance]) -> list[Instance]:
        if self._setup is None:
            return instances
        return [instances[i] for i in self._roles.with_role(role)]

    # The loop

    def _observe(self, _argument: None) -> None:
        """Every instance reports what it has, in either role."""
        sim, signals = self._sim, self._sim.setup.signals
        if not sim.busy:
            return
        found = []
        for prefill, decode in zip(sim.locals.values(), sim.decoders.values(), strict=True):
            running = prefill.is_busy + decode.num_running
            waiting = prefill.num_waiting + decode.num_waiting
            found.append((prefill.name, InstanceQueue(sim.clock.now_ns, running, waiting)))
        sim.clock.after(signals.delay_ns, self._hear, found)
        sim.clock.after(signals.interval_ns, self._observe)

    def _hear(self, found: list[tuple[str, InstanceQueue]]) -> None:
        for name, queue in found:
            self._split.loads.report(name, queue)

    def _turn(self, _argument: None) -> None:
        sim, now_ns = self._sim, self._sim.clock.now_ns
        if not sim.busy:
            return
        self.weigh(*self._split.load(sim.front.dispatcher, now_ns))
        sim.clock.after(sim.setup.signals.loop_interval_ns, self._turn)

    def weigh(self, prefill: StageLoad | None, decode: StageLoad | None) -> None:
        """Have the loop decide from the load of both stages; None is unknown."""
        dispatcher, now_ns = self._sim.front.dispatcher, self._sim.clock.now_ns
        found = self._split.update(dispatcher, prefill, decode, now_ns)
        if found is None:
            return
        if found.offload_threshold is not None:
            dispatcher.replan(found.offload_threshold)
        if found.to is not None and self._roles.change is not None:
            self._apply()
            self.changes.append(self._roles.change)
            self._drain(None)

    # A change

    def _drain(self, _argument: None) -> None:
        assert self._setup is not None  # noqa: S101 (a change has begun)
        now_ns = self._sim.clock.now_ns
        if self._roles.has_drained(now_ns, self._split.work_of(self._sim.front.dispatcher)):
            self._sim.clock.after(self._setup.settings.conversion_ns, self._converted)
        elif self._roles.gives_up(now_ns) is not None:
            self._apply()
        else:
            self._sim.clock.after(LOOK_INTERVAL_NS, self._drain)

    def _converted(self, _argument: None) -> None:
        self._roles.convert(self._sim.clock.now_ns)
        self._apply()

    def _apply(self) -> None:
        """Instances take what their role allows."""
        front, now_ns = self._sim.front, self._sim.clock.now_ns
        for name, ready in self._split.ready():
            front.set_ready(name, ready=ready, now_ns=now_ns)
