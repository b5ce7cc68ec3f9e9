"""The long-term loop, live: what the engines and the books say, in the core's words."""

from __future__ import annotations

from prfaas.core.control.offloaded_work import Spared
from prfaas.core.control.role_loop import Planned, Role, RoleChange, StageLoad
from prfaas.core.control.roles import Change, Roles
from prfaas.gateway.routing.change_log import Journal, Loop, Number
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.profiles import Profiles
from prfaas.gateway.routing.role_assignment import EngineQueue, Split
from prfaas.gateway.telemetry.request_record import Record
from prfaas.units import NS_PER_S

STALE_NS = 10 * NS_PER_S
"""Age beyond which an engine's queue counts as unknown."""
_MEAN_WEIGHT = 0.02


class Reroling:
    """Changes roles of PD engines.

    Args:
        driver: What roles act on.
        split: Who has which.
        profiles: What the plan says of decode and of splits.
        journal: Hears of every change.
    """

    turns_each_beat = True

    def __init__(self, driver: Driver, split: Split, profiles: Profiles, journal: Journal) -> None:
        self._driver, self._split, self._journal = driver, split, journal
        self._slots, self._plans = max(profiles.decode_slots, 1), profiles.plans
        self._decode_ns, self._spared = 0.0, Spared()

    @property
    def roles(self) -> Roles:
        """Who prefills and who decodes."""
        return self._split.roles

    def finished(self, record: Record) -> None:
        """A request was answered in full."""
        if record.e2e_ns is None or record.ttft_ns is None:
            return
        weight = _MEAN_WEIGHT if self._decode_ns else 1.0
        self._decode_ns += weight * (record.e2e_ns - record.ttft_ns - self._decode_ns)
        self.roles.mixes.ended(record.started_at_ns + record.e2e_ns, record.num_output_tokens)

    def beat(self, now_ns: int) -> None:
        """Some time has passed: an engine that drains may be empty."""
        roles = self._split.roles
        if roles.has_drained(now_ns, self._work_of):
            change = roles.convert(now_ns)
            self._driver.apply_roles(now_ns)
            drained_s = (change.drained_at_ns - change.began_at_ns) / NS_PER_S
            why = "it has finished what it had in its old role"
            self._note(change, "changed", why, {"drained_s": drained_s})
        elif (kept := roles.gives_up(now_ns)) is not None:
            self._driver.apply_roles(now_ns)
            left = self._work_of(kept.index)
            self._note(kept, "kept", "it has not finished what it had", {"requests_left": left})

    def turn(self, now_ns: int) -> None:
        """One interval of the loop."""
        self.weigh(self._prefill(now_ns), self._decode(now_ns), now_ns)

    def weigh(self, prefill: StageLoad | None, decode: StageLoad | None, now_ns: int) -> None:
        """Have the loop decide from what was seen of both stages; None is unknown."""
        roles = self._split.roles
        plan = self._planned_at(now_ns)
        found = roles.update(now_ns, prefill, decode, plan, self._work_of)
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
            numbers["requests_left"] = self._work_of(roles.change.index)
            self._note(roles.change, "drains", why, numbers)

    def _replan(self, found: RoleChange, numbers: dict[str, Number]) -> None:
        if found.offload_threshold is None:
            return
        for link in self._driver.dispatcher.links:
            if link.policy.offload_threshold == found.offload_threshold:
                continue
            self._journal.note(
                Loop.ROLES,
                "replanned",
                f"link {link.source}:{link.destination}",
                old=link.policy.offload_threshold,
                new=found.offload_threshold,
                why="the best threshold of the plan for this split and what the links carry",
                numbers=numbers,
            )
        self._driver.dispatcher.replan(found.offload_threshold)

    def _note(self, change: Change, action: str, why: str, numbers: dict[str, Number]) -> None:
        old = Role.DECODE if change.to is Role.PREFILL else Role.PREFILL
        what = f"engine {self._split.names[change.index]}"
        self._journal.note(
            Loop.ROLES,
            action,
            what,
            old=old.value,
            new=(old if action == "kept" else change.to).value,
            why=why,
            numbers=numbers,
        )

    # What the loop is told

    def _prefill(self, now_ns: int) -> StageLoad | None:
        """Load of the engines that prefill; None when one's queue is not known."""
        dispatcher, busy, waiting_ns = self._driver.dispatcher, 0, 0
        for name in self._of_role(Role.PREFILL):
            queue = self._fresh(name, now_ns)
            if queue is None:
                return None
            book = dispatcher.load(name)
            # One look, not a look or what is known since: twice asked is busier than it is.
            said = queue.num_running
            busy += bool(book.num_jobs(name) if said is None else said + queue.num_waiting)
            waiting_ns += book.queued_ns(name)
        return StageLoad(busy + self._spared.look(dispatcher.spared_ns, now_ns), waiting_ns)

    def _decode(self, now_ns: int) -> StageLoad | None:
        running, waiting = 0, 0
        for name in self._of_role(Role.DECODE):
            queue = self._fresh(name, now_ns)
            if queue is None or queue.num_running is None:
                return None
            running, waiting = running + queue.num_running, waiting + queue.num_waiting
        return StageLoad(running / self._slots, round(waiting * self._decode_ns / self._slots))

    def _of_role(self, role: Role) -> list[str]:
        """Engines of a role, one that drains included, those that are not there left out."""
        names, roles = self._split.names, self._split.roles
        return [
            names[index]
            for index, its_role in enumerate(roles.all)
            if its_role is role and self._driver.takes(names[index])
        ]

    def _fresh(self, name: str, now_ns: int) -> EngineQueue | None:
        queue = self._split.queues.get(name)
        if queue is None or now_ns - queue.observed_at_ns > STALE_NS:
            return None
        return queue

    def _planned_at(self, now_ns: int) -> Planned | None:
        """Plans of splits for what the links carry; None while that is not known."""
        plans, bits_per_s = self._plans, self._driver.dispatcher.home_bits_per_s(now_ns)
        if plans is None or bits_per_s is None:
            return None
        mix = self.roles.mixes.look(now_ns)
        return lambda num_prefill: plans(num_prefill, bits_per_s, mix)

    def _work_of(self, index: int) -> int:
        """Requests that an engine has in its role: ours, and those that it says it has."""
        name = self._split.names[index]
        if not self._driver.takes(name):
            return 0
        dispatcher, queue = self._driver.dispatcher, self._split.queues.get(name)
        if self._split.prefills(name):
            own = dispatcher.load(name).num_jobs(name)
        else:
            own = len(dispatcher.requests.decoded_by(self._split.decodes_as(name)))
        return max(own, (queue.num_running or 0) + queue.num_waiting if queue else 0)
