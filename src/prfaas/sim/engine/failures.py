"""Failures during a run, and their recovery."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prfaas.core.request.states import Stage
from prfaas.sim.resources.decode_instance import DecodeInstance
from prfaas.sim.resources.pool_caches import Pool
from prfaas.sim.resources.prefill_instance import PrefillInstance
from prfaas.sim.system.setup import Failure, FailureKind
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.sim.engine.request_run import RunParts


def schedule(simulation: RunParts, failures: tuple[Failure, ...]) -> None:
    """Ask the clock for every failure and recovery. The last one to end restores the link."""
    for failure in failures:
        simulation.clock.at(failure.at_ns, partial(_step, simulation, True), failure)
        end_ns = failure.at_ns + failure.for_ns
        simulation.clock.at(end_ns, partial(_step, simulation, False), failure)


def in_words(failure: Failure) -> str:
    """Description of a failure and its time."""
    ratio = failure.capacity_ratio
    what = {
        FailureKind.LINK: f"link at {ratio:.0%} of its capacity" if ratio else "link cut",
        FailureKind.PREFILL: f"PD-P instance {failure.index} down",
        FailureKind.PRFAAS: f"PrfaaS instance {failure.index} down",
        FailureKind.DECODE: f"PD-D instance {failure.index} down",
        FailureKind.POOL: "pool down",
        FailureKind.STALL: f"instance {failure.index} stalled",
        FailureKind.FREEZE: f"PD-D instance {failure.index} frozen",
    }[failure.kind]
    what += f" ({failure.cluster})" if failure.cluster else ""
    start, end = failure.at_ns / NS_PER_S, (failure.at_ns + failure.for_ns) / NS_PER_S
    return f"{what}, {start:,.0f} to {end:,.0f} s"


def _step(simulation: RunParts, begins: bool, failure: Failure) -> None:
    """A failure begins, or ends."""
    match failure.kind:
        case FailureKind.LINK:
            for transport in simulation.wans.get(_cluster(simulation, failure), ()):
                transport.set_capacity(failure.capacity_ratio if begins else 1.0)
        case FailureKind.POOL:
            _set_pool(simulation, failure, up=not begins)
        case FailureKind.PREFILL | FailureKind.PRFAAS:
            instance = _prefill_instance(simulation, failure)
            (_fail_prefill if begins else _recover)(simulation, instance)
        case FailureKind.STALL:
            instance = _prefill_instance(simulation, failure)
            (instance.stall if begins else instance.resume)()
        case FailureKind.DECODE | FailureKind.FREEZE:
            name = list(simulation.decoders)[failure.index]
            if not begins:
                _recover(simulation, simulation.decoders[name], simulation.lane(name))
            elif failure.kind is FailureKind.DECODE:
                _fail_decode(simulation, name)
            else:
                _freeze(simulation, name)


def _cluster(simulation: RunParts, failure: Failure) -> str:
    """The cluster of a failure; the first PrfaaS cluster by default."""
    return failure.cluster or next(iter(simulation.wans), "")


def _set_pool(simulation: RunParts, failure: Failure, *, up: bool) -> None:
    """A pool node dies, or is back.

    Its cache is lost, its connections close, the gateway knows at once. Engines go on without it.
    What it had kept of unfinished transfers is lost with it. When it stores again, what it holds
    counts as nothing until the gateway has a snapshot.
    """
    name = simulation.setup.pools_of[_cluster(simulation, failure)][failure.index]
    pool = simulation.front.caches.pools[name]
    pool.is_up = up
    if not up:
        pool.fail(keeps_disk=failure.keeps_disk)
        for run in simulation.open.values():
            if run.request.kept_in == name:
                run.request.kept_tokens = 0
    for ends, transport in simulation.transports.items():
        if name in ends:
            transport.set_pool(up=up)
    if up:
        simulation.clock.after(failure.rebuild_ns, _know, pool)


def _know(pool: Pool) -> None:
    pool.is_known = pool.is_up


def _prefill_instance(simulation: RunParts, failure: Failure) -> PrefillInstance:
    front, cluster = simulation.front, _cluster(simulation, failure)
    if failure.kind is FailureKind.PREFILL or cluster == simulation.setup.name:
        return simulation.locals[front.prefill_names[failure.index]]
    return simulation.remotes[front.prfaas_names[cluster][failure.index]]


def _recover(simulation: RunParts, *instances: PrefillInstance | DecodeInstance) -> None:
    """An instance works again, with an empty queue."""
    for instance in instances:
        instance.recover()
    simulation.front.set_ready(instances[0].name, ready=True, now_ns=simulation.clock.now_ns)


def _fail_prefill(simulation: RunParts, instance: PrefillInstance) -> None:
    """A prefill instance stops, and its connections close: the gateway hears of it from those, else
    from the next request, or the next health check."""
    _check_soon(simulation, instance)
    simulation.front.caches.devices.clear(instance.name)
    for job in instance.fail():
        if job.attempt == job.request.attempt:
            simulation.open[job.request.index].prefill_failed(may_have_died=True)
    for run in list(simulation.open.values()):
        if run.life.stage is Stage.RELAYING and run.routed.prefill == instance.name:
            assert run.relay is not None  # noqa: S101 (it has begun)
            run.relay.end()
            run.prefill_failed(may_have_died=True)


def _fail_decode(simulation: RunParts, name: str, *, is_dead: bool = True) -> None:
    """A decode instance stops, and its connections close."""
    _check_soon(simulation, simulation.decoders[name])
    simulation.decoders[name].fail()
    simulation.lane(name).fail()
    for run in [run for run in simulation.open.values() if run.decoder == name]:
        run.broke(had_request=is_dead)


def _freeze(simulation: RunParts, name: str) -> None:
    """A decode instance stops, and its connections stay open."""
    simulation.decoders[name].freeze()
    simulation.lane(name).freeze()
    after_ns = simulation.setup.signals.frozen_after_ns
    simulation.clock.after(after_ns, partial(_give_up, simulation), name)


def _give_up(simulation: RunParts, name: str) -> None:
    """The gateway ends the legs of an instance that still does not answer."""
    if simulation.decoders[name].is_frozen:
        simulation.front.set_ready(name, ready=False, now_ns=simulation.clock.now_ns)
        _fail_decode(simulation, name, is_dead=False)


def _check_soon(simulation: RunParts, instance: PrefillInstance | DecodeInstance) -> None:
    """Have a health check find an instance that is still down then."""

    def check(name: str) -> None:
        if not instance.up:
            simulation.front.set_ready(name, ready=False, now_ns=simulation.clock.now_ns)

    simulation.clock.after(simulation.setup.signals.gone_after_ns, check, instance.name)
