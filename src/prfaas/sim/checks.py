"""What has to hold after every run, whatever happened in it."""

from __future__ import annotations

from prfaas.errors import PrfaasError
from prfaas.sim.link import BITS_PER_BYTE
from prfaas.sim.oracle import News, reads_of_the_simulation, too_early
from prfaas.sim.request import UNSET, Outcome, Request
from prfaas.sim.simulation import Simulation

_CONSERVED_TOLERANCE = 1e-6


class BrokenInvariantError(PrfaasError):
    """The simulator contradicts itself: a bug, not a result."""


def check(simulation: Simulation) -> None:
    """Check conservation, causality, leaks, and that no decision read what it could not know.

    Raises:
        BrokenInvariantError: One line for everything that does not hold.
    """
    broken = [
        *_conservation(simulation),
        *_capacity(simulation),
        *_causality(simulation),
        *_leaks(simulation),
        *_oracle(simulation),
    ]
    if broken:
        raise BrokenInvariantError("the run is not consistent:\n  " + "\n  ".join(broken[:20]))


def _conservation(sim: Simulation) -> list[str]:
    link = sim.link
    ended = sum(r.outcome is not Outcome.RUNNING for r in sim.requests)
    come = sum(r.arrived_at_ns <= sim.clock.now_ns for r in sim.requests)
    found = []
    if ended + sim.num_open > come:
        found.append(f"{come} requests came, {ended} ended and {sim.num_open} are open")
    if not sim.busy and ended != len(sim.requests):
        found.append(f"{len(sim.requests)} requests came and {ended} ended, yet none is open")
    if sim.num_open and not sim.clock.num_pending:
        found.append(f"{sim.num_open} requests are open and nothing will happen any more")
    split = [r.index for r in sim.requests if r.attempt and not _is_split(r)]
    if split:
        found.append(f"request {split[0]}: cached and new tokens do not add up to its prompt")
    accounted = link.landed_bytes + link.lost_bytes + link.open_bytes
    if link.added_bytes != accounted:
        found.append(f"{link.added_bytes} bytes entered the link, {accounted} are accounted for")
    unsent = link.added_bytes - link.sent_bytes
    if unsent < -(1 + _CONSERVED_TOLERANCE * link.added_bytes):
        found.append(f"the link sent {-unsent:.0f} bytes more than were added")
    return found


def _is_split(request: Request) -> bool:
    parts = (request.num_hit_tokens, request.num_new_tokens)
    return min(parts) >= 0 and sum(parts) == request.num_prompt_tokens


def _capacity(sim: Simulation) -> list[str]:
    """No second of the link carries more than its capacity; no batch exceeds its limit."""
    most = sim.setup.link.bits_per_s / BITS_PER_BYTE * (1 + _CONSERVED_TOLERANCE) + 1
    found = [
        f"the link carried {sent:.0f} bytes in second {window}, at most {most:.0f} fit"
        for window, sent in sim.link.window_bytes.items()
        if sent > most
    ]
    limits = sim.setup.decode
    for name, decoder in sim.decoders.items():
        if decoder.num_running_most > limits.batch_max:
            found.append(f"{name} ran {decoder.num_running_most} of {limits.batch_max} sequences")
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


def _oracle(sim: Simulation) -> list[str]:
    delay_ns = sim.setup.signals.delay_ns
    needed_ns = {
        News.REPORT: delay_ns,
        News.LINK_ALIVE: delay_ns,
        News.LINK_DEAD: sim.setup.link.dead_after_ns,
    }
    return [
        *too_early(sim.front.heard, needed_ns),
        *reads_of_the_simulation(sim.front.dispatcher),
    ]
