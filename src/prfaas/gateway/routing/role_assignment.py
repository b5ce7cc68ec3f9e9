"""PD engines that only prefill or only decode at a time.

Every one can do both. The dispatcher knows it under two names, and the one of the role that it does
not have is not ready; an engine's role is what it is given to do, and nothing has to be told to it.
Where no engine is left in a role, those of the other role do both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prfaas.config.clusters import ClusterRole, EngineRole
from prfaas.config.deployment import Deployment
from prfaas.core.control.role_loop import Role, RoleLoop, RoleSettings
from prfaas.core.control.roles import Roles
from prfaas.core.dispatch.types import Member

_DECODES = ":decode"
"""Names of engines have no colon."""


@dataclass(frozen=True, slots=True)
class EngineQueue:
    """What an engine said of its queue.

    Attributes:
        observed_at_ns: When.
        num_running: Requests that run; None if it does not say.
        num_waiting: Requests that wait.
    """

    observed_at_ns: int
    num_running: int | None
    num_waiting: int


class Split:
    """The roles of a deployment's PD engines.

    Args:
        names: The engines.
        at_first: Their roles.
        loop: Changes roles; None keeps them.
    """

    def __init__(
        self, names: Sequence[str], at_first: Sequence[Role], loop: RoleLoop | None
    ) -> None:
        self.names = tuple(names)
        self._index = {name: index for index, name in enumerate(names)}
        self.roles = Roles(at_first, loop)
        self.queues: dict[str, EngineQueue] = {}
        for name in names:
            self.set_usable(name, usable=False)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def decoders(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """The same engines as those that decode."""
        return tuple(Member(member.name + _DECODES, member.pool) for member in members)

    def engine_of(self, name: str) -> str:
        """The engine behind either of its names."""
        return name.removesuffix(_DECODES)

    def decodes_as(self, name: str) -> str:
        """Name of an engine as one that decodes."""
        return name + _DECODES

    def set_usable(self, name: str, *, usable: bool) -> None:
        """An engine takes work of some kind, or none."""
        self.roles.set_usable(self._index[name], usable=usable)

    def seen(self, name: str, queue: EngineQueue) -> None:
        """An engine told its queue."""
        self.queues[name] = queue

    def prefills(self, name: str) -> bool:
        """Whether an engine has the role to prefill."""
        return self.roles.all[self._index[name]] is Role.PREFILL

    def is_changing(self, name: str) -> bool:
        """Whether an engine drains before it takes another role."""
        change = self.roles.change
        return change is not None and change.index == self._index[name]

    def ready(self) -> Iterator[tuple[str, bool]]:
        """For both names of every engine: whether it takes work under it."""
        able = [set(self.roles.with_role(role)) for role in (Role.PREFILL, Role.DECODE)]
        prefilling, decoding = (of or able[0] | able[1] for of in able)
        for index, name in enumerate(self.names):
            yield name, index in prefilling
            yield self.decodes_as(name), index in decoding


def make_split(deployment: Deployment) -> Split | None:
    """The split that a deployment file gives; None where engines do both."""
    engines = {
        name: engine.role
        for cluster in deployment.with_role(ClusterRole.PD)
        for name, engine in cluster.engines.items()
    }
    if EngineRole.BOTH in engines.values():
        return None
    routing = deployment.routing
    loop = None
    if routing.reroling:
        # An assignment changes at once: the engine keeps what it has loaded.
        settings = RoleSettings(conversion_ns=0).paced(routing.reroling_dwell)
        loop = RoleLoop(routing.offload_threshold, settings)
    return Split(list(engines), [Role(role.value) for role in engines.values()], loop)
