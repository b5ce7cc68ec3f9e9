"""Loops that a deployment file asks for: roles of engines, and copies of hot prefixes by pulls.

The core counts misses and chooses, as it does in the simulator. A copy serves whoever asks next: it
counts against the budget of the link, and against no tenant's share of it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial

from prfaas.config.deployment import Deployment
from prfaas.config.routing import RoutingTable
from prfaas.core.control.changes import Loop, Number
from prfaas.core.control.replication import CopiedPrompt, Copy, CopySettings, Replication
from prfaas.core.control.role_loop import Role, RoleChange, StageLoad
from prfaas.core.control.roles import Change, Roles
from prfaas.core.control.split import Split
from prfaas.core.dispatch.links import LinkBook
from prfaas.core.dispatch.route_finder import Considered
from prfaas.core.dispatch.types import Arrival, Routed
from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import GroupKind, Layout
from prfaas.core.kv.shipping import shipped_bytes
from prfaas.core.request.facts import RequestEnded
from prfaas.core.transfer.tickets import Prefix
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import ConfigError
from prfaas.gateway.loops.ticker import BEAT_S, LOOP_EVERY, PeriodicLoop
from prfaas.gateway.pools.transfer_orders import Fetcher
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.dispatcher_setup import Profiles
from prfaas.gateway.routing.transfer_tracker import TransferArrived, Transfers
from prfaas.units import NS_PER_S
from prfaas.wire.frames import TRANSFER_ID_BYTES


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


CANDIDATES_MAX = 256
"""Prefixes that are counted for each link; each keeps the hashes of a prompt."""
OPEN_MAX = 256
"""Copies under way at a time, all links together."""


@dataclass(slots=True)
class _Open:
    """A copy under way."""

    book: LinkBook
    num_bytes: int
    ends_at_ns: int


class PrefixReplication:
    """Counts misses that another pool would have served, and has the hot ones copied."""

    turns_each_beat = False

    def __init__(
        self,
        driver: Driver,
        transfers: Transfers,
        fetcher: Fetcher,
        settings: CopySettings,
        journal: Journal,
    ) -> None:
        self._driver, self._transfers, self._fetcher = driver, transfers, fetcher
        self._settings, self._journal = settings, journal
        self._hot = Replication[bytes](settings)
        self._open: dict[bytes, _Open] = {}

    @property
    def num_open(self) -> int:
        """Copies under way."""
        return len(self._open)

    def routed(self, arrival: Arrival, found: Routed, considered: Considered, now_ns: int) -> None:
        """A request was routed: count what it computes in the PD cluster and a PrfaaS pool has."""
        layout, hashes = arrival.layout, arrival.hashes
        if layout is None or not hashes:
            return
        for option in considered.missed(found):
            prompt = CopiedPrompt(
                Prefix(layout, hashes, arrival.tenant, arrival.quality),
                arrival.num_prompt_tokens,
                layout.boundary_tokens,
                any(group.kind is not GroupKind.FULL_ATTENTION for group in layout.groups),
                partial(_bytes_between, layout),
            )
            costs = option.cluster.costs
            assert costs is not None  # noqa: S101 (nothing is missed without)
            held_tokens = option.facts.pullable_tokens
            ends = option.pull_link.source, found.destination
            self._hot.missed(ends, prompt, found.present_tokens, held_tokens, costs, now_ns)

    # The loop

    def beat(self, now_ns: int) -> None:
        """Abort copies without a reported end."""
        for transfer_id, copy in list(self._open.items()):
            if now_ns >= copy.ends_at_ns:
                self._over(transfer_id)

    def turn(self, now_ns: int) -> None:
        """One interval has passed: start what is worth it."""
        for source, destination in self._hot.links:
            link = self._driver.dispatcher.links.between(source, destination)
            state = link.book.latest(now_ns) if link.up else None
            chosen = self._hot.choose((source, destination), state, link.ns_per_byte, now_ns)
            begun = [
                copy for copy in chosen if self._start(source, destination, copy, link.book, now_ns)
            ]
            if begun:
                self._note(source, destination, begun)

    def arrived(self, fact: TransferArrived) -> None:
        """A transfer ended; it may have been a copy."""
        self._over(fact.view.transfer_id)

    def _start(
        self, source: str, destination: str, copy: Copy[bytes], book: LinkBook, now_ns: int
    ) -> bool:
        prefix = copy.block_ids
        assert isinstance(prefix, Prefix)  # noqa: S101 (nothing else is counted)
        have_tokens = copy.num_present * prefix.layout.boundary_tokens
        if len(self._open) >= OPEN_MAX:
            return False
        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        transfer = self._transfers.open(
            transfer_id, source, destination, partial(self._reported, transfer_id)
        )
        if self._fetcher.copy(transfer, prefix, have_tokens):
            return False
        book.promise(copy.num_bytes, now_ns)
        ends_at_ns = now_ns + self._fetcher.tickets.lifetime_ns
        self._open[transfer.transfer_id] = _Open(book, copy.num_bytes, ends_at_ns)
        return True

    def _reported(self, transfer_id: bytes, kind: TransferEnd | None, _: bool) -> None:
        if kind is not TransferEnd.COMMITTED:
            self._over(transfer_id)

    def _over(self, transfer_id: bytes) -> None:
        copy = self._open.pop(transfer_id, None)
        if copy is not None:
            copy.book.settle(copy.num_bytes)

    def _note(self, source: str, destination: str, begun: list[Copy[bytes]]) -> None:
        num_bytes = sum(copy.num_bytes for copy in begun)
        self._journal.note(
            Loop.REPLICATION,
            "copies",
            f"link {source}:{destination}",
            why="prefixes that the PD pool often misses are only in the other pool",
            numbers={
                "prefixes": len(begun),
                "bytes": num_bytes,
                "budget_bytes": self._settings.budget_bytes,
            },
        )


def _bytes_between(layout: Layout, final_tokens: int, have_tokens: int) -> int:
    return shipped_bytes(layout, have_tokens=have_tokens, final_tokens=final_tokens)


def copy_settings(routing: RoutingTable, interval_s: float) -> CopySettings:
    """Settings for copies, this number of bytes in each interval of the loop."""
    budget_bytes = round((routing.replication or 0) / 8 * interval_s)
    return CopySettings(
        budget_bytes, routing.replication_half_life, num_candidates_max=CANDIDATES_MAX
    )


class Loops:
    """The long-term loop, and replication; ConfigError if the plan is one of another deployment."""

    def __init__(
        self,
        deployment: Deployment,
        driver: Driver,
        fetcher: Fetcher,
        transfers: Transfers,
        profiles: Profiles,
        journal: Journal,
        facts: FactStream,
    ) -> None:
        self.copier: PrefixReplication | None = None
        if deployment.routing.replication is not None:
            settings = copy_settings(deployment.routing, BEAT_S * LOOP_EVERY)
            self.copier = PrefixReplication(driver, transfers, fetcher, settings, journal)
            facts.subscribe(TransferArrived, self.copier.arrived)
        self.reroling: Reroling | None = None
        if driver.split is not None and deployment.routing.reroling:
            _check_size(deployment, driver.split, profiles)
            self.reroling = Reroling(driver, driver.split, journal)
            facts.subscribe(RequestEnded, self.reroling.ended)

    @property
    def all(self) -> list[PeriodicLoop]:
        """Running loops."""
        return [loop for loop in (self.reroling, self.copier) if loop is not None]


def _check_size(deployment: Deployment, split: Split, profiles: Profiles) -> None:
    if len(split.names) != profiles.num_local:
        raise ConfigError(
            f"routing.reroling: there are {len(split.names)} PD engines, and the plan has "
            f"{profiles.num_local} PD instances; set `instances` of [pd] in "
            f"{deployment.routing.plan} to what there is"
        )
