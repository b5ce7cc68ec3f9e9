"""What has to hold after every run, whatever happened in it."""

from __future__ import annotations

from prfaas.errors import PrfaasError
from prfaas.sim.request import UNSET, Outcome, Request
from prfaas.sim.simulation import Simulation

_CONSERVED_TOLERANCE = 1e-6


class BrokenInvariantError(PrfaasError):
    """The simulator contradicts itself: a bug, not a result."""


def check(simulation: Simulation) -> None:
    """Check conservation, causality and leaks.

    Raises:
        BrokenInvariantError: One line for everything that does not hold.
    """
    broken = [*_conservation(simulation), *_causality(simulation), *_leaks(simulation)]
    if broken:
        raise BrokenInvariantError("the run is not consistent:\n  " + "\n  ".join(broken[:20]))


def _conservation(sim: Simulation) -> list[str]:
    link = sim.link
    ended = sum(r.outcome is not Outcome.RUNNING for r in sim.requests)
    come = sum(r.arrived_at_ns <= sim.clock.now_ns for r in sim.requests)
    found = []
    if ended + sim.num_open > come:
        found.append(f"{come} requests came, {ended} ended and {sim.num_open} are open")
    accounted = link.landed_bytes + link.lost_bytes + link.open_bytes
    if link.added_bytes != accounted:
        found.append(f"{link.added_bytes} bytes entered the link, {accounted} are accounted for")
    unsent = link.added_bytes - link.sent_bytes
    if unsent < -(1 + _CONSERVED_TOLERANCE * link.added_bytes):
        found.append(f"the link sent {-unsent:.0f} bytes more than were added")
    return found


def _causality(sim: Simulation) -> list[str]:
    return [
        f"request {r.index}: its instants do not follow each other"
        for r in sim.requests
        if r.outcome is Outcome.FINISHED and not _in_order(r)
    ]


def _in_order(request: Request) -> bool:
    """A recomputed request may have streamed its first token before its last prefill."""
    last_prefill = (request.prefill_started_at_ns, request.prefilled_at_ns, request.landed_at_ns)
    chain = (request.arrived_at_ns, *last_prefill, request.finished_at_ns)
    streamed = request.arrived_at_ns <= request.first_token_at_ns <= request.finished_at_ns
    return UNSET not in chain and streamed and list(chain) == sorted(chain)


def _leaks(sim: Simulation) -> list[str]:
    """When all requests have ended, nobody holds anything."""
    if sim.num_open:
        return []
    held = {
        "bytes promised to the link": sim.front.dispatcher.promised_bytes,
        "KV bytes held by decode": sum(d.kv_used_bytes for d in sim.decoders.values()),
        "open transfers": len(sim.link.flows()),
        "requests open at the gateway": sim.front.dispatcher.num_open,
    }
    return [f"{count} {what} after the last request ended" for what, count in held.items() if count]
