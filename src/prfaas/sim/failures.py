"""What breaks during a run, and how it recovers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.core.load_book import LoadBook
from prfaas.sim.prefill import PrefillInstance
from prfaas.sim.setup import Failure, FailureKind

if TYPE_CHECKING:
    from prfaas.sim.simulation import Simulation


def schedule(simulation: Simulation, failures: tuple[Failure, ...]) -> None:
    """Ask the clock for every failure and recovery. The last one to end restores the link."""
    for failure in failures:
        simulation.clock.at(failure.at_ns, lambda f: _break(simulation, f), failure)
        simulation.clock.at(failure.at_ns + failure.for_ns, lambda f: _mend(simulation, f), failure)


def _break(simulation: Simulation, failure: Failure) -> None:
    match failure.kind:
        case FailureKind.LINK:
            simulation.set_link(simulation.setup.link.bits_per_s * failure.capacity_ratio)
        case FailureKind.PREFILL | FailureKind.PRFAAS:
            _fail_prefill(simulation, failure)
        case FailureKind.DECODE:
            _fail_decode(simulation, failure.index)


def _mend(simulation: Simulation, failure: Failure) -> None:
    match failure.kind:
        case FailureKind.LINK:
            simulation.set_link(simulation.setup.link.bits_per_s)
        case FailureKind.PREFILL | FailureKind.PRFAAS:
            _mend_prefill(simulation, failure)
        case FailureKind.DECODE:
            simulation.decoders[failure.index].recover()
            simulation.balancer.set_up(failure.index, up=True)


def _stage(simulation: Simulation, failure: Failure) -> tuple[LoadBook, dict[str, PrefillInstance]]:
    front = simulation.front
    if failure.kind is FailureKind.PRFAAS:
        return front.remote, simulation.remotes
    return front.local, simulation.locals


def _fail_prefill(simulation: Simulation, failure: Failure) -> None:
    """A prefill instance stops; its requests are routed anew."""
    book, instances = _stage(simulation, failure)
    name = book.names[failure.index]
    book.set_ready(name, ready=False)
    for job in instances[name].fail():
        if job.attempt == job.request.attempt:
            simulation.again(job.request)


def _mend_prefill(simulation: Simulation, failure: Failure) -> None:
    """It works again, with an empty queue."""
    book, instances = _stage(simulation, failure)
    name = book.names[failure.index]
    instances[name].recover()
    book.report(name, simulation.clock.now_ns, 0)
    book.set_ready(name, ready=True)


def _fail_decode(simulation: Simulation, index: int) -> None:
    """A decode instance stops; its requests are prefilled again."""
    simulation.balancer.set_up(index, up=False)
    lost = simulation.decoders[index].fail()
    gone = set(lost)
    coming = [r for r, i in simulation.decoder_of.items() if i == index and r not in gone]
    for request in (*lost, *coming):
        simulation.again(request)
