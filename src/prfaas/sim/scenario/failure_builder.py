"""Conversion of `[[failure]]` to failures, checked against the clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prfaas.errors import ConfigError
from prfaas.market.scenario import RevocationTable
from prfaas.sim.scenario.scenario_file import FailureTable
from prfaas.sim.system.setup import ClusterSetup, Failure, FailureKind
from prfaas.units import ns


def make_failures(
    tables: Sequence[FailureTable],
    clusters: Sequence[ClusterSetup],
    local: str,
    num_prefill: int,
    num_pd_instances: int,
    num_pd_hosts: int,
) -> tuple[Failure, ...]:
    """Failures.

    Args:
        num_prefill: PD instances that prefill.

    Raises:
        ConfigError: A cluster or an instance does not exist.
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
