"""What breaks during a run, and how it recovers."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        case FailureKind.PREFILL:
            simulation.fail_prefill(remote=False, index=failure.index)
        case FailureKind.PRFAAS:
            simulation.fail_prefill(remote=True, index=failure.index)
        case FailureKind.DECODE:
            simulation.fail_decode(failure.index)


def _mend(simulation: Simulation, failure: Failure) -> None:
    match failure.kind:
        case FailureKind.LINK:
            simulation.set_link(simulation.setup.link.bits_per_s)
        case FailureKind.PREFILL:
            simulation.mend_prefill(remote=False, index=failure.index)
        case FailureKind.PRFAAS:
            simulation.mend_prefill(remote=True, index=failure.index)
        case FailureKind.DECODE:
            simulation.mend_decode(failure.index)
