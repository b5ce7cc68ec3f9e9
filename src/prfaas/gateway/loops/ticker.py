"""Loops of every gateway: the control loops once a second, and leases of the budgets of sites."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prfaas.config.clusters import ClusterTable
from prfaas.core.control.changes import Loop, Number
from prfaas.core.control.threshold_loop import Evidence, Pressures
from prfaas.core.dispatch.types import ThresholdMoved
from prfaas.core.resilience.quarantine import Guards
from prfaas.core.transfer.site_budget import TICK_NS, LeaseBook, demand
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.units import NS_PER_S, format_seconds, seconds_of
from prfaas.wire.messages.base import Ping
from prfaas.wire.messages.gateway import LinkLease, LinkTelemetry

BEAT_S = 1.0
"""Below the age at which what is known of an idle link counts as unknown."""
LOOP_EVERY = 5
"""Beats for each interval of the loops."""
QUIET_BEATS = 10
"""Beats without a refusal after which admission has ended refusing."""


class PeriodicLoop(Protocol):
    """A loop that the pulse gives its turns."""

    turns_each_beat: bool
    """True if it runs in every period, not only in each `LOOP_EVERY`th."""

    def beat(self, now_ns: int) -> None:
        """A second has passed; what was begun continues."""

    def turn(self, now_ns: int) -> None:
        """One interval has passed: begin something, if it is worth it."""


class ControlTicker:
    """The loops of a gateway."""

    def __init__(
        self, driver: Driver, guards: Guards, journal: Journal, loops: Sequence[PeriodicLoop] = ()
    ) -> None:
        self._driver, self._guards, self._journal = driver, guards, journal
        self.loops = list(loops)
        """Loops that get their turns."""
        self._num_late, self._num_quiet, self._late_before = 0, 0, 0
        self._is_refusing = False
        self.frozen = False
        """True if the operator has frozen the loops."""

    async def run(self) -> None:
        """Beat until cancelled."""
        for count in itertools.count(1):
            await asyncio.sleep(BEAT_S)
            self.beat(time.monotonic_ns(), is_turn=count % LOOP_EVERY == 0)

    def beat(self, now_ns: int, *, is_turn: bool) -> None:
        """A second has passed; it may be the loops' turn."""
        self._guards.refresh(now_ns)
        self._watch_admission()
        if is_turn and not self.frozen:
            for moved in self._driver.dispatcher.tick(now_ns):
                self._note_threshold(moved)
        for loop in self.loops:
            loop.beat(now_ns)
            if not self.frozen and (is_turn or loop.turns_each_beat):
                loop.turn(now_ns)

    def _note_threshold(self, moved: ThresholdMoved) -> None:
        up, why, numbers = moved.offload_threshold > moved.before, "", dict[str, Number]()
        if moved.evidence is not None:
            why, numbers = _by_evidence(moved.evidence)
        elif moved.pressures is not None:
            why, numbers = _by_pressure(moved.pressures, "remote" if up else "local")
        self._journal.note(
            Loop.THRESHOLD,
            "raised" if up else "lowered",
            f"link {moved.source}:{moved.destination}",
            old=moved.before,
            new=moved.offload_threshold,
            why=why,
            numbers=numbers,
        )

    def _watch_admission(self) -> None:
        """Refusals can be many: only their beginning and end are recorded."""
        new = self._driver.num_late - self._num_late
        self._num_late = self._driver.num_late
        self._num_quiet = 0 if new else self._num_quiet + 1
        if new and not self._is_refusing:
            self._is_refusing, self._late_before = True, self._num_late - new
            why = "the first token of new requests is predicted to come after ttft_max"
            self._note_admission("began", why, new)
        elif self._is_refusing and self._num_quiet >= QUIET_BEATS:
            self._is_refusing = False
            why = f"no request was refused for {QUIET_BEATS * BEAT_S:.0f} s"
            self._note_admission("ended", why, self._num_late - self._late_before)

    def _note_admission(self, action: str, why: str, num_refused: int) -> None:
        self._journal.note(
            Loop.ADMISSION, action, "refusing", why=why, numbers={"refused": num_refused}
        )


def _by_evidence(found: Evidence) -> tuple[str, dict[str, Number]]:
    """Reason and inputs of a threshold that follows recent requests."""
    why = (
        f"prefill on both sides and the link carry the last {found.num_requests} requests alike "
        f"at {found.balanced:,} tokens; that counts {found.weight:.0%}, the plan the rest"
    )
    return why, {
        "balanced_tokens": found.balanced,
        "weight_ratio": found.weight,
        "requests": found.num_requests,
        "local_engines": found.num_local,
        "remote_engines": found.num_remote,
        "link_bits_per_s": found.bits_per_s,
    }


def _by_pressure(found: Pressures, pressed: str) -> tuple[str, dict[str, Number]]:
    """Reason and inputs of the short-term loop; `pressed` is the side that stays pressed."""
    waits = (found.local_wait_ns, found.remote_wait_ns)
    local, remote = ("unknown" if ns is None else format_seconds(ns) for ns in waits)
    why = f"the {pressed} side stays pressed: {local} of waiting at home, {remote} away and on "
    why += "the link"
    return why, {
        "local_wait_s": seconds_of(found.local_wait_ns),
        "remote_wait_s": seconds_of(found.remote_wait_ns),
        "link_utilisation": found.link_utilisation,
    }


class LeaseGiver:
    """Gives out the budgets of all sites that have one.

    Args:
        sites: Budget of each, bits a second, and the names of its pool nodes.
    """

    def __init__(
        self,
        sites: Iterable[tuple[int, frozenset[str]]],
        pools: Pools,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        now_ns = clock_ns()
        self._books = [(LeaseBook(budget, names, now_ns), names) for budget, names in sites]
        self._pools, self._clock_ns = pools, clock_ns

    @classmethod
    def of(cls, clusters: Iterable[ClusterTable], pools: Pools) -> LeaseGiver:
        """Return one for the sites of a deployment file."""
        sites = [(c.link_budget, frozenset(c.pools)) for c in clusters if c.link_budget]
        return cls(sites, pools)

    async def run(self) -> None:
        """Give out leases until cancelled."""
        while self._books:
            self.tick()
            await asyncio.sleep(TICK_NS / NS_PER_S)

    def tick(self) -> None:
        """Give out leases once."""
        now_ns, known = self._clock_ns(), set(self._pools.names())
        measured = self._pools.telemetry()
        for book, names in self._books:
            for pool in names & known:
                if answered_ns := self._pools.answered_ns(pool):
                    heard_at_ns = min(answered_ns, now_ns)
                    book.heard(pool, _demand(pool, names, measured), heard_at_ns)
            for pool, lease in book.leases(now_ns).items():
                self._pools.send(pool, LinkLease(bits_per_s=lease.bits_per_s, for_ns=lease.for_ns))
            for pool in names & known:
                # Its answer confirms the lease before it, which a frame that crosses would not.
                self._pools.send(pool, Ping(at_ns=now_ns))


def _demand(
    pool: str, site: frozenset[str], measured: Mapping[tuple[str, str], LinkTelemetry]
) -> float:
    """Rate that the links of a pool node to other sites ask for."""
    remote = [
        link
        for (source, destination), link in measured.items()
        if source == pool and destination not in site
    ]
    backlog = sum(link.queued_bytes + link.in_flight_bytes for link in remote)
    return demand(backlog, sum(link.goodput_bits_per_s for link in remote if link.queued_bytes))
