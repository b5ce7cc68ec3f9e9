"""From the tables of a scenario file and its plan to a `Setup`."""

from __future__ import annotations

from prfaas.errors import ConfigError
from prfaas.planner.costs import make_costs
from prfaas.planner.load import Question
from prfaas.planner.problem import Problem
from prfaas.planner.search import Operation, optimum
from prfaas.planner.throughput import Mode
from prfaas.sim.decode import DecodeLimits
from prfaas.sim.link import loss_limited_bits_per_s
from prfaas.sim.scenario_file import (
    CacheTable,
    FailureTable,
    RoutingTable,
    ScenarioFile,
    SignalsTable,
    SloTable,
)
from prfaas.sim.setup import (
    CacheSetup,
    Failure,
    FailureKind,
    LinkSetup,
    RoutingSetup,
    Setup,
    SignalSetup,
    SloSetup,
)
from prfaas.sim.timing import step_time
from prfaas.units import NS_PER_S


def make_setup(
    file: ScenarioFile, question: Question, num_prompt_tokens_max: int
) -> tuple[Setup, list[str]]:
    """The system that a file and its plan describe.

    Args:
        file: The scenario file.
        question: Its plan.
        num_prompt_tokens_max: No prompt is longer.

    Returns:
        The setup, and what a reader of the results should know.

    Raises:
        ConfigError: They do not fit together.
    """
    problem, pd = question.problem, question.problem.pd
    _check_clusters(file, problem)
    away = problem.prfaas[0] if problem.prfaas else None
    num_prfaas = away.num_instances if away else 0
    found = optimum(problem, Mode.EXACT)
    num_prefill = _num_prefill(file, found, pd.num_instances)
    num_decode = pd.num_instances - num_prefill
    _check_failures(file, num_prfaas, num_prefill, num_decode)
    batch, _ = pd.decode.largest_batch(problem.workload.mean_context, pd.tpot_max_s)
    capacity = None if pd.kv_capacity_bytes is None else int(pd.kv_capacity_bytes)
    routing = _routing(file.routing, found)
    setup = Setup(
        num_prfaas=num_prfaas,
        num_prefill=num_prefill,
        num_decode=num_decode,
        costs=make_costs(
            problem.geometry,
            pd.prefill,
            away.prefill if away else pd.prefill,
            num_tokens_max=num_prompt_tokens_max + 1,
            chunk_tokens=question.chunk_tokens,
            overlap=file.link.overlap,
        ),
        step_ns=step_time(pd.decode),
        decode=DecodeLimits(max(int(batch), 1), capacity),
        link=_link(file, problem),
        routing=routing,
        cache=_cache(file.cache),
        signals=_signals(file.signals),
        slo=_slo(file.slo),
        failures=tuple(f for table in file.failure for f in _failures(table)),
        price_per_h=problem.gpu_price_per_h,
    )
    notes = [*_continued(problem, num_prompt_tokens_max), _threshold_note(file, routing)]
    return setup, notes


def _check_clusters(file: ScenarioFile, problem: Problem) -> None:
    if len(problem.prfaas) > 1:
        raise ConfigError(
            f"{file.plan}: {len(problem.prfaas)} PrfaaS clusters; the simulator takes at most one"
        )


def _num_prefill(file: ScenarioFile, found: Operation, num_instances: int) -> int:
    given = file.routing.prefill_instances
    num_prefill = found.num_prefill if given is None else given
    if num_prefill >= num_instances:
        raise ConfigError(
            f"routing.prefill_instances is {num_prefill} of {num_instances} PD instances; "
            "at least one has to be left to decode"
        )
    return num_prefill


def _check_failures(file: ScenarioFile, num_prfaas: int, num_prefill: int, num_decode: int) -> None:
    counts = {
        FailureKind.PRFAAS: num_prfaas,
        FailureKind.PREFILL: num_prefill,
        FailureKind.DECODE: num_decode,
    }
    for table in file.failure:
        count = counts.get(table.kind, 1)
        if table.kind is not FailureKind.LINK and table.index >= count:
            raise ConfigError(
                f"failure of {table.kind} instance {table.index}: there are {count}, counted from 0"
            )


def _routing(table: RoutingTable, found: Operation) -> RoutingSetup:
    planned = round(found.offload_threshold or 0)
    return RoutingSetup(
        policy=table.policy,
        offload_threshold=planned if table.threshold is None else table.threshold,
        moving_threshold=table.moving_threshold,
        admission=table.admission,
    )


def _threshold_note(file: ScenarioFile, routing: RoutingSetup) -> str:
    origin = "the planner's optimum" if file.routing.threshold is None else "as given"
    return f"threshold {routing.offload_threshold:,} tokens, {origin}"


def _continued(problem: Problem, longest: int) -> list[str]:
    """Profiles that prompts go beyond."""
    return [
        f"profile {profile.name!r} is continued from {profile.lengths[-1]:.0f} to "
        f"{longest} tokens and below {profile.lengths[0]:.0f} along its end segments"
        for profile in problem.prefill_profiles
        if longest > round(problem.workload.lengths.high) and not profile.covers(1, longest)
    ]


def _link(file: ScenarioFile, problem: Problem) -> LinkSetup:
    table = file.link
    planned = problem.prfaas[0].link if problem.prfaas else None
    if planned is None:
        return LinkSetup(bits_per_s=1.0)
    rtt_ns = _ns(planned.rtt_s if table.rtt is None else table.rtt)
    return LinkSetup(
        bits_per_s=planned.bits_per_s if table.bandwidth is None else table.bandwidth,
        rtt_ns=rtt_ns,
        flow_bits_per_s=loss_limited_bits_per_s(rtt_ns, table.loss, table.connections),
        dead_after_ns=_ns(table.dead_after),
        price_per_tb=planned.price_per_tb,
    )


def _cache(table: CacheTable) -> CacheSetup:
    return CacheSetup(
        table.pd_blocks, table.prfaas_blocks, table.block_tokens, table.checkpoint_blocks
    )


def _signals(table: SignalsTable) -> SignalSetup:
    return SignalSetup(
        _ns(table.interval), _ns(table.delay), _ns(table.stale_after), _ns(table.loop_interval)
    )


def _slo(table: SloTable) -> SloSetup:
    return SloSetup(*(None if s is None else _ns(s) for s in (table.ttft, table.tpot)))


def _failures(table: FailureTable) -> list[Failure]:
    return [
        Failure(
            table.kind,
            _ns(table.at + 2 * i * table.duration),
            _ns(table.duration),
            table.index,
            table.capacity,
        )
        for i in range(table.repeat)
    ]


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
