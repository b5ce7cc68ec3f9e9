"""Invariants that hold after every run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prfaas.core.control.role_loop import Role
from prfaas.core.request.events import Outcome
from prfaas.core.transfer.link_goodput import BITS_PER_BYTE
from prfaas.errors import PrfaasError
from prfaas.sim.engine.dispatch_driver import News, too_early
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.resources.shared_link import Flow, SharedLink
from prfaas.sim.results.columns import Columns, columns_of, have_finished
from prfaas.sim.results.summary import window_bytes
from prfaas.sim.system.request import UNSET
from prfaas.sim.system.setup import FailureKind

_CONSERVED_TOLERANCE = 1e-6
_CHAIN = (
    "arrived_at_ns",
    "prefill_started_at_ns",
    "prefilled_at_ns",
    "landed_at_ns",
    "finished_at_ns",
)


class BrokenInvariantError(PrfaasError):
    """The simulator contradicts itself: a bug, not a result."""


def check(simulation: Simulation, columns: Columns | None = None) -> None:
    """Check conservation, causality, leaks, and that no report reached a decision too early;
    BrokenInvariantError if one line for everything that does not hold.

    Args:
        columns: Of its requests, if they were read already.
    """
    columns = columns_of(simulation.requests) if columns is None else columns
    broken = [
        *_conservation(simulation, columns),
        *_roles(simulation),
        *_capacity(simulation),
        *_causality(simulation, columns),
        *_leaks(simulation),
        *_oracle(simulation),
    ]
    if broken:
        raise BrokenInvariantError("the run is not consistent:\n  " + "\n  ".join(broken[:20]))


def _conservation(sim: Simulation, columns: Columns) -> list[str]:
    ended = len(sim.requests) - [r.outcome for r in sim.requests].count(Outcome.RUNNING)
    come = int((columns["arrived_at_ns"] <= sim.clock.now_ns).sum())
    found = []
    if ended + sim.num_open > come:
        found.append(f"{come} requests came, {ended} ended and {sim.num_open} are open")
    if not sim.busy and ended != len(sim.requests):
        found.append(f"{len(sim.requests)} requests came and {ended} ended, yet none is open")
    cached, new = columns["num_hit_tokens"], columns["num_new_tokens"]
    whole = cached + new == columns["num_prompt_tokens"]
    split = whole & (cached >= 0) & (new >= 0) | (columns["attempt"] == 0)
    for wrong in np.flatnonzero(~split)[:1]:
        index = sim.requests[wrong].index
        found.append(f"request {index}: cached and new tokens do not add up to its prompt")
    for transport in sim.transports.values():
        found += _link_bytes(transport.link)
    return found


def _link_bytes(link: SharedLink) -> list[str]:
    found = []
    sent_bytes = link.sent_bytes  # It first does what was due by now.
    accounted = link.landed_bytes + link.lost_bytes + link.open_bytes
    if link.added_bytes != accounted:
        found.append(f"{link.added_bytes} bytes entered a link, {accounted} are accounted for")
    allowed = 1 + _CONSERVED_TOLERANCE * link.added_bytes + link.rounded_bytes
    if link.added_bytes - sent_bytes < -allowed:
        found.append(f"a link sent {sent_bytes:.0f} bytes, {link.added_bytes} were added")
    by_purpose = sum(link.sent_by_purpose().values())
    if abs(by_purpose - link.sent_bytes) > allowed:
        found.append(f"a link sent {sent_bytes:.0f} bytes, {by_purpose:.0f} have a purpose")
    return found


def _roles(sim: Simulation) -> list[str]:
    """Every PD instance has one role, works only in it, and both roles are always taken."""
    found = []
    for role in Role:
        if sim.setup.roles is not None and sim.roles.count(role) < 1:
            found.append(f"no instance is left for {role}")
    changed = sum(c.ended_at_ns != UNSET for c in sim.roles.changes)
    if changed < len(sim.roles.changes) - 1:
        found.append(f"{len(sim.roles.changes) - changed} changes of roles at once")
    for change in sim.roles.changes:
        instants = [change.began_at_ns, change.drained_at_ns, change.ended_at_ns]
        happened = [at for at in instants if at != UNSET]
        if happened != sorted(happened):
            found.append(f"the change of instance {change.index} ended before it began")
    if sim.setup.roles is None:
        return found
    for index, role in sim.roles.working:
        prefill = sim.locals[sim.front.prefill_names[index]]
        decode = sim.decoders[sim.front.decode_names[index]]
        if role is Role.DECODE and (prefill.is_busy or prefill.num_waiting):
            found.append(f"instance {index} decodes, yet has prompts to prefill")
        if role is Role.PREFILL and (decode.num_running or decode.num_waiting):
            found.append(f"instance {index} prefills, yet has sequences to decode")
    return found


def _capacity(sim: Simulation) -> list[str]:
    """Check that no second of a link exceeds its capacity, and no batch its limit."""
    found = []
    for name, transports in sim.wans.items():
        most = transports[0].setup.bits_per_s / BITS_PER_BYTE * (1 + _CONSERVED_TOLERANCE) + 1
        found += [
            f"the link of {name} carried {sent:.0f} bytes in second {window}, {most:.0f} fit"
            for window, sent in window_bytes(each.link for each in transports).items()
            if sent > most
        ]
    batch_max = sim.setup.decode.batch_max
    for name, decoder in sim.decoders.items():
        if decoder.num_running_most > batch_max:
            found.append(f"{name} ran {decoder.num_running_most} of {batch_max} sequences")
    return found


def _causality(sim: Simulation, columns: Columns) -> list[str]:
    """A recomputed request may have streamed its first token before its last prefill."""
    finished = have_finished(sim.requests)
    done = columns.chosen(finished)
    chain = np.stack([done[name] for name in _CHAIN], axis=1)
    streamed = done["first_token_at_ns"]
    right = (np.diff(chain, axis=1) >= 0).all(axis=1) & (chain != UNSET).all(axis=1)
    right &= (chain[:, 0] <= streamed) & (streamed <= chain[:, -1])
    return [
        f"request {sim.requests[wrong].index}: its instants do not follow each other"
        for wrong in np.flatnonzero(finished)[~right]
    ]


def _leaks(sim: Simulation) -> list[str]:
    """Check that nothing is allocated after all requests have ended."""
    if sim.num_open:
        return []
    held = {
        "bytes promised to links": _promised(sim),
        "KV bytes held by decode": sum(d.kv_used_bytes for d in sim.decoders.values()),
        "open transfers": sum(1 for flow in _flows(sim) if flow.request),
        "requests open at the gateway": len(sim.front.dispatcher.requests),
    }
    return [f"{count} {what} after the last request ended" for what, count in held.items() if count]


def _promised(sim: Simulation) -> int:
    """Bytes promised to links, those of copies that are still in transit left out."""
    copies = sum(flow.promised_bytes for flow in _flows(sim) if not flow.request)
    return sim.front.dispatcher.promised_bytes - copies


def _flows(sim: Simulation) -> Iterator[Flow]:
    return (flow for each in sim.transports.values() for flow in each.link.flows())


def _oracle(sim: Simulation) -> list[str]:
    """A failed pool closes its connections, so its failure is noticed sooner than a cut."""
    delay_ns = sim.setup.signals.delay_ns
    silence_ns = [cluster.link.dead_after_ns for cluster in sim.setup.prfaas]
    if any(failure.kind is FailureKind.POOL for failure in sim.setup.failures):
        silence_ns.append(delay_ns)
    needed_ns = {
        News.REPORT: delay_ns,
        News.LINK_ALIVE: delay_ns,
        News.LINK_DEAD: min(silence_ns, default=0),
    }
    return too_early(sim.front.heard, needed_ns)
