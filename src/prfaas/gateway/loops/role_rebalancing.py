"""The long-term loop of the gateway: passes the state of engines to the core."""

from __future__ import annotations

from prfaas.core.control.changes import Loop, Number
from prfaas.core.control.role_loop import Role, RoleChange, StageLoad
from prfaas.core.control.roles import Change, Roles
from prfaas.core.control.split import Split
from prfaas.core.request.facts import RequestEnded
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.units import NS_PER_S


class Reroling:
    """Changes roles of PD engines."""

    turns_each_beat = True

    def __init__(self, driver: Driver, split: Split, journal: Journal) -> None:
        self._driver, self._split, self._journal = driver, split, journal
        self._work = split.work_of(driver.dispatcher)

    @property
    def roles(self) -> Roles:
        """Roles of PD engines."""
        return self._split.roles

    def ended(self, request: RequestEnded) -> None:
        """A request ended; the decode times of those that were answered in full are weighed."""
        if request.is_finished and request.decode_ns is not None:
            self._split.finished(request.at_ns, request.decode_ns, request.num_output_tokens)

    def beat(self, now_ns: int) -> None:
        """Some time has passed: an engine that drains may be empty."""
        roles = self._split.roles
        if roles.has_drained(now_ns, self._work):
            change = roles.convert(now_ns)
            self._driver.apply_roles(now_ns)
            drained_s = (change.drained_at_ns - change.began_at_ns) / NS_PER_S
            why = "it has completed the requests of its old role"
            self._note(change, "changed", why, {"drained_s": drained_s})
        elif (kept := roles.gives_up(now_ns)) is not None:
            self._driver.apply_roles(now_ns)
            left = self._work(kept.index)
            self._note(kept, "kept", "it has not completed its requests", {"requests_left": left})

    def turn(self, now_ns: int) -> None:
        """One interval of the loop."""
        self.weigh(*self._split.load(self._driver.dispatcher, now_ns), now_ns)

    def weigh(self, prefill: StageLoad | None, decode: StageLoad | None, now_ns: int) -> None:
        """Have the loop decide from what was seen of both stages; None is unknown."""
        roles = self._split.roles
        found = self._split.update(self._driver.dispatcher, prefill, decode, now_ns)
        if found is None:
            return
        numbers: dict[str, Number] = {
            "prefill_engines": roles.count(Role.PREFILL),
            "decode_engines": roles.count(Role.DECODE),
        }
        for name, load in (("prefill", prefill), ("decode", decode)):
            if load is not None:
                numbers[f"{name}_busy"] = load.busy_instances
                numbers[f"{name}_waiting_s"] = load.waiting_ns / NS_PER_S
        self._replan(found, numbers)
        if roles.change is not None and found.to is not None:
            self._driver.apply_roles(now_ns)
            pressed = "prefill" if found.to is Role.PREFILL else "decode"
            why = f"{pressed} is more pressed than the other stage, and one engine more evens it"
            numbers["requests_left"] = self._work(roles.change.index)
            self._note(roles.change, "drains", why, numbers)

    def _replan(self, found: RoleChange, numbers: dict[str, Number]) -> None:
        if found.offload_threshold is None:
            return
        for moved in self._driver.dispatcher.replan(found.offload_threshold):
            self._journal.note(
                Loop.ROLES,
                "replanned",
                f"link {moved.source}:{moved.destination}",
                old=moved.before,
                new=moved.offload_threshold,
                why="the best threshold of the plan for this split and the rates of the links",
                numbers=numbers,
            )

    def _note(self, change: Change, action: str, why: str, numbers: dict[str, Number]) -> None:
        old = Role.DECODE if change.to is Role.PREFILL else Role.PREFILL
        what = f"engine {self._split.name_of(change.index)}"
        self._journal.note(
            Loop.ROLES,
            action,
            what,
            old=old.value,
            new=(old if action == "kept" else change.to).value,
            why=why,
            numbers=numbers,
        )
