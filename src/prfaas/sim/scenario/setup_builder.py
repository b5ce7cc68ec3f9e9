"""Conversion of a scenario file and its plan to a setup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prfaas.core.cache.tenant_shares import Share
from prfaas.core.control.replication import CopySettings
from prfaas.core.control.role_loop import RoleSettings
from prfaas.core.routing.predictions import Costs, with_checkpoints
from prfaas.core.transfer.tcp_goodput import TcpEnds, TcpPath, goodput_bits_per_s
from prfaas.errors import ConfigError
from prfaas.market.scenario import RevocationTable, make_market_plan
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.hardware.profiles import PrefillProfile, make_costs, step_time
from prfaas.planner.model.kv_geometry import KvGeometry
from prfaas.planner.problem import PrfaasCluster, Problem
from prfaas.planner.solve.designs import split_plans
from prfaas.planner.solve.latency import best_operation
from prfaas.planner.solve.search import OperatingPoint
from prfaas.planner.solve.throughput import StageMode
from prfaas.sim.scenario.scenario_file import (
    CacheTable,
    FailureTable,
    PlacementTable,
    ScenarioFile,
    ScenarioSloTable,
    SignalsTable,
)
from prfaas.sim.system.setup import (
    BlockSetup,
    CacheSetup,
    ClusterSetup,
    DecodeLimits,
    Failure,
    FailureKind,
    LinkSetup,
    PlacementSetup,
    RolesSetup,
    RoutingSetup,
    Setup,
    SignalSetup,
    SloSetup,
)
from prfaas.units import ns


def make_failures(
    tables: Sequence[FailureTable],
    clusters: Sequence[ClusterSetup],
    local: str,
    num_prefill: int,
    num_pd_instances: int,
    num_pd_hosts: int,
) -> tuple[Failure, ...]:
    """Failures; ConfigError if a cluster or an instance does not exist.

    Args:
        num_prefill: PD instances that prefill.
    """
    counts = {cluster.name: cluster.num_instances for cluster in clusters}
    hosts = {local: num_pd_hosts, **{cluster.name: cluster.num_hosts for cluster in clusters}}
    for table in tables:
        cluster = _check_cluster(table, list(counts), local)
        of = {
            FailureKind.PRFAAS: counts.get(cluster, 0),
            FailureKind.PREFILL: num_prefill,
            FailureKind.DECODE: num_pd_instances - num_prefill,
            FailureKind.FREEZE: num_pd_instances - num_prefill,
            FailureKind.POOL: hosts.get(cluster, 0),
            FailureKind.STALL: num_prefill if cluster == local else counts.get(cluster, 0),
        }
        count = of.get(table.kind, table.index + 1)
        unit = "host" if table.kind is FailureKind.POOL else "instance"
        if table.index >= count:
            raise ConfigError(
                f"failure of {table.kind} {unit} {table.index}: there are {count}, counted from 0"
            )
    return tuple(failure for table in tables for failure in _repeated(table))


def revoked(
    tables: Sequence[RevocationTable], clusters: Sequence[ClusterSetup]
) -> tuple[Failure, ...]:
    """Failures of all instances of clusters whose capacity leaves."""
    return tuple(
        Failure(FailureKind.PRFAAS, at_ns, until_ns - at_ns, index, cluster=cluster.name)
        for table in tables
        for cluster in clusters
        for _, at_ns, until_ns in (table.times_ns,)
        if cluster.name == table.cluster
        for index in range(cluster.num_instances)
    )


def _check_cluster(table: FailureTable, names: list[str], local: str) -> str:
    """The cluster a failure is about."""
    known = [*names, local] if table.kind in (FailureKind.POOL, FailureKind.STALL) else names
    cluster = table.cluster or (names[0] if names else "")
    if table.kind in (FailureKind.PREFILL, FailureKind.DECODE, FailureKind.FREEZE):
        known = [local]
        cluster = table.cluster or local
    if cluster not in known:
        there = ", ".join(map(repr, known)) or "none"
        raise ConfigError(f"failure of {table.kind} in cluster {cluster!r}: there are {there}")
    return cluster


def _repeated(table: FailureTable) -> Iterator[Failure]:
    for i in range(table.repeat):
        yield Failure(
            table.kind,
            ns(table.at + 2 * i * table.duration),
            ns(table.duration),
            table.index,
            table.capacity,
            table.cluster,
            table.keep_disk,
            ns(table.rebuild),
        )


def make_setup(
    file: ScenarioFile, question: Question, num_prompt_tokens_max: int
) -> tuple[Setup, list[str]]:
    """The system that a file and its plan describe; ConfigError if they do not fit together.

    Args:
        num_prompt_tokens_max: No prompt is longer.

    Returns:
        The setup, and what a reader of the results should know.
    """
    problem, pd = question.problem, question.problem.pd
    found = best_operation(problem, StageMode.EXACT)
    num_prefill = _num_prefill(file, found, pd.num_instances)
    capacity = None if pd.kv_capacity_bytes is None else int(pd.kv_capacity_bytes)
    clusters = _clusters(file, question, num_prompt_tokens_max)
    local = pd.prefill
    setup = Setup(
        name=pd.name,
        prfaas=clusters,
        num_prefill=num_prefill,
        num_decode=pd.num_instances - num_prefill,
        costs=clusters[0].costs
        if clusters
        else _costs(file, question, local, num_prompt_tokens_max),
        step_ns=step_time(pd.decode),
        decode=DecodeLimits(problem.decode_slots, capacity),
        routing=_routing(file, found, [pd.name, *(cluster.name for cluster in clusters)]),
        cache=_cache(file.cache, "pd"),
        num_hosts=_num_hosts("pd", file.hosts.pd, pd.num_instances),
        host_link=LinkSetup(file.hosts.bandwidth, ns(file.hosts.rtt)),
        blocks=BlockSetup(file.cache.block_tokens, file.cache.checkpoint_blocks),
        placement=_placement(file.placement),
        signals=_signals(file.signals),
        slo=_slo(file.slo),
        failures=make_failures(
            file.failure, clusters, pd.name, num_prefill, pd.num_instances, file.hosts.pd
        )
        + revoked(file.revocation, clusters),
        price_per_h=problem.gpu_price_per_h,
        roles=_roles(file, problem),
        market=make_market_plan(
            file.prices, file.revocation, file.placement.price_hysteresis, problem
        ),
    )
    coded = [
        f"link of {cluster.name}: {cluster.link.coding.in_words(cluster.link.bits_per_s / 8)}"
        for cluster in clusters
        if cluster.link.coding is not None
    ]
    threshold = _threshold_note(file, setup.routing)
    notes = [*_continued(problem, num_prompt_tokens_max), *coded, threshold]
    return setup, notes


def _clusters(
    file: ScenarioFile, question: Question, num_prompt_tokens_max: int
) -> tuple[ClusterSetup, ...]:
    problem = question.problem
    names = [problem.pd.name, *(cluster.name for cluster in problem.prfaas)]
    if len(set(names)) < len(names):
        raise ConfigError(f"{file.plan}: clusters {names}; each needs its own name")
    return tuple(
        ClusterSetup(
            cluster.name,
            cluster.num_instances,
            _costs(file, question, cluster.prefill, num_prompt_tokens_max),
            _link(file, cluster, problem.geometry),
            _cache(file.cache, "prfaas"),
            _num_hosts("prfaas", file.hosts.prfaas, cluster.num_instances),
        )
        for cluster in problem.prfaas
    )


def _cache(table: CacheTable, kind: str) -> CacheSetup:
    """Caches of a kind of cluster, "pd" or "prfaas"."""
    host, disk, device = (
        getattr(table, f"{kind}_{key}") for key in ("blocks", "disk_blocks", "device_blocks")
    )
    shares = {name: Share(*share) for name, share in table.shares.items()}
    return CacheSetup(host, disk, table.disk_bandwidth, device, shares)


def _costs(
    file: ScenarioFile, question: Question, remote: PrefillProfile, num_prompt_tokens_max: int
) -> Costs:
    costs = make_costs(
        question.problem.geometry,
        question.problem.pd.prefill,
        remote,
        num_tokens_max=num_prompt_tokens_max + 1,
        chunk_tokens=question.chunk_tokens,
        overlap=file.link.overlap,
    )
    span = file.cache.block_tokens
    return with_checkpoints(costs, -(-file.cache.state_checkpoint_tokens // span) * span)


def _num_hosts(key: str, num_hosts: int, num_instances: int) -> int:
    if num_hosts > max(num_instances, 1):
        raise ConfigError(
            f"hosts.{key} is {num_hosts} of {num_instances} instances; each host needs one"
        )
    return num_hosts


def _num_prefill(file: ScenarioFile, found: OperatingPoint, num_instances: int) -> int:
    given = file.routing.prefill_instances
    num_prefill = found.num_prefill if given is None else given
    if num_prefill >= num_instances:
        raise ConfigError(
            f"routing.prefill_instances is {num_prefill} of {num_instances} PD instances; "
            "at least one has to be left to decode"
        )
    return num_prefill


def _routing(file: ScenarioFile, found: OperatingPoint, names: list[str]) -> RoutingSetup:
    table = file.routing
    planned = found.whole_threshold or 0
    return RoutingSetup(
        policy=table.policy,
        offload_threshold=planned if table.threshold is None else table.threshold,
        moving_threshold=table.moving_threshold,
        admission=file.slo.ttft is not None if table.admission is None else table.admission,
        weights=table.weights,
        bandwidth=table.bandwidth,
        residency=file.residency.among(names),
        planned_ratios=(table.planned_local_ratio, table.planned_remote_ratio),
        prefill_timeout_ns=ns(table.prefill_timeout),
        transfer_timeout_ns=None if table.transfer_timeout is None else ns(table.transfer_timeout),
        early_first_token=table.early_first_token == "auto",  # noqa: S105 (no password)
        relay_decode=table.relay_decode == "auto",
    )


def _threshold_note(file: ScenarioFile, routing: RoutingSetup) -> str:
    origin = "the planner's optimum" if file.routing.threshold is None else "as given"
    return f"threshold {routing.offload_threshold:,} tokens, {origin}"


def _continued(problem: Problem, longest: int) -> list[str]:
    """Notes on profiles whose knots do not reach the scenario's prompts."""
    if longest <= round(problem.workload.lengths.high):
        return []
    notes = []
    for profile in problem.prefill_profiles:
        first, last = profile.lengths[0], profile.lengths[-1]
        ends = [f"below {first:.0f} tokens"] if first > 1 else []
        if longest > last:
            ends.append(f"from {last:.0f} to {longest} tokens")
        if ends:
            notes.append(
                f"profile {profile.name!r} is continued {' and '.join(ends)} along its end segments"
            )
    return notes


def _roles(file: ScenarioFile, problem: Problem) -> RolesSetup | None:
    table = file.routing
    if not table.reroling:
        return None
    if any(f.kind in (FailureKind.PREFILL, FailureKind.DECODE) for f in file.failure):
        raise ConfigError(
            "routing.reroling: failures of PD instances are not simulated together with changes of "
            "their roles; remove one of both"
        )
    settings = RoleSettings(conversion_ns=ns(table.conversion)).paced(ns(table.dwell))
    return RolesSetup(settings, split_plans(problem))


def _link(file: ScenarioFile, cluster: PrfaasCluster, geometry: KvGeometry) -> LinkSetup:
    table, planned = file.link, cluster.link
    rtt_s = planned.rtt_s if table.rtt is None else table.rtt
    path = TcpPath(
        planned.bits_per_s if table.bandwidth is None else table.bandwidth,
        rtt_s,
        planned.loss if table.loss is None else table.loss,
    )
    ends = cluster.transport or TcpEnds(cluster.num_hosts)
    transport = TcpEnds(
        max(table.pool_nodes or ends.num_nodes, file.hosts.prfaas),
        table.connections or ends.connections,
        table.congestion_control or ends.control,
    )
    bits_per_s = goodput_bits_per_s(path, transport)
    flow_bits_per_s = goodput_bits_per_s(path, transport.alone)
    if flow_bits_per_s >= bits_per_s:
        flow_bits_per_s = float("inf")
    return LinkSetup(
        bits_per_s=bits_per_s,
        rtt_ns=ns(rtt_s),
        flow_bits_per_s=flow_bits_per_s,
        dead_after_ns=ns(table.dead_after),
        price_per_tb=planned.price_per_tb,
        planned_bits_per_s=cluster.goodput_bits_per_s,
        planned_bytes_ratio=table.planned_bytes_ratio,
        coding=table.coding(planned.coding, geometry),
    )


def _placement(table: PlacementTable) -> PlacementSetup:
    copies = CopySettings(table.copy_budget, ns(table.half_life)) if table.copy_budget else None
    return PlacementSetup(table.pull, copies, table.second_price)


def _signals(table: SignalsTable) -> SignalSetup:
    return SignalSetup(
        ns(table.interval),
        ns(table.delay),
        ns(table.stale_after),
        ns(table.loop_interval),
        layouts=table.layouts,
    )


def _slo(table: ScenarioSloTable) -> SloSetup:
    return SloSetup(*(None if s is None else ns(s) for s in (table.ttft, table.tpot)))
