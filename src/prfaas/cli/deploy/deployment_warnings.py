"""Warnings about valid settings without effect, or that do not work in a pod of Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise

from prfaas.config.clusters import ClusterRole, ClusterTable
from prfaas.config.deployment import Deployment
from prfaas.config.engines.cores import within
from prfaas.config.tenants import is_loopback
from prfaas.core.routing.policies import PolicyName
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.core.transfer.residency import Regions
from prfaas.deployment_secret import FILE_NAME


def doubts(deployment: Deployment) -> Iterator[str]:
    """A line for every setting that an operator may not have meant."""
    routing, clusters = deployment.routing, deployment.clusters
    if routing.effective_policy not in (PolicyName.LOCAL, PolicyName.REMOTE):
        yield from _threshold(routing.offload_threshold, list(clusters.values()))
    blocks = {
        name: (table.timing.block_tokens, table.timing.bytes_scale)
        for name, table in clusters.items()
        if table.timing is not None
    }
    if len(set(blocks.values())) > 1:
        shown = ", ".join(
            f"{name}: {tokens} and {scale}" for name, (tokens, scale) in blocks.items()
        )
        yield (
            f"block_tokens and bytes_scale of the timing tables differ ({shown}): nothing is "
            "offloaded between clusters whose blocks differ (layout_mismatch)"
        )

    if routing.effective_policy is PolicyName.OBSERVED:
        yield from _shared_cores(deployment)
    yield from _unencrypted(clusters)


def _shared_cores(deployment: Deployment) -> Iterator[str]:
    """PrfaaS engines to which the policy offloads nothing."""
    shared = within(deployment)
    for name, homes in shared.items():
        yield (
            f"engine {name} computes on the cores of {', '.join(sorted(homes))}, where offloading "
            "only adds work: the policy observed prefills such prompts locally (shared_cores); "
            'give it `cpus` of its own, or set policy = "paper" to offload all the same'
        )


def _unencrypted(clusters: dict[str, ClusterTable]) -> Iterator[str]:
    """Pool nodes whose blocks may cross the network in the clear."""
    names = [
        name
        for table in clusters.values()
        for name, pool in table.pools.items()
        if pool.link_encryption is LinkEncryption.NETWORK
    ]
    if names:
        yield (
            f'NOT ENCRYPTED: {", ".join(names)} with link_encryption = "network" send KV blocks, '
            "which reveal prompts, readable to anyone on the path, to every peer that has it too; "
            'keep it only where the network itself encrypts (MACsec, WireGuard), else set "sealed"'
        )


def _threshold(tokens: int, clusters: list[ClusterTable]) -> Iterator[str]:
    longest = [each for table in clusters for each in _numbers(table, "max-model-len")]
    block = [each for table in clusters for each in _numbers(table, "block-size")]
    if longest and tokens >= max(longest):
        yield (
            f"routing.offload_threshold {tokens} is not below the longest sequence of any engine, "
            f'{max(longest)} tokens: nothing is offloaded; lower it, or set policy = "local"'
        )
    if block and tokens < min(block):
        yield (
            f"routing.offload_threshold {tokens} is below one KV block, {min(block)} tokens: a "
            "prompt without a whole new block has nothing to ship and is always prefilled locally"
        )


def _numbers(table: ClusterTable, option: str) -> Iterator[int]:
    """Settings of a cluster's engines: its timing table, or their `args`."""
    if table.timing is not None:
        timing = table.timing
        yield timing.max_model_len if option == "max-model-len" else timing.block_tokens
        return
    for engine in table.engines.values():
        words = [word for arg in engine.args for word in arg.split("=", 1)]
        for name, value in pairwise(words):
            if name == f"--{option}" and value.isdecimal():
                yield int(value)


IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""Set in every container of Kubernetes."""


def is_in_a_pod(env: Mapping[str, str] = os.environ) -> bool:
    """Return True in a container of Kubernetes."""
    return IN_A_POD in env


def pod_traps(deployment: Deployment, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line for every setting that does not work in a pod; none outside of pods.

    Args:
        deployment: Its parts without `url` or `address` are started here.
    """
    if not is_in_a_pod(env):
        return
    gateway = deployment.gateway
    if is_loopback(gateway.listen):
        yield (
            f"gateway.listen {gateway.listen} is reached from within this pod alone: Services and "
            f'probes come from outside; listen on "0.0.0.0:{gateway.listen.rpartition(":")[2]}"'
        )
    salt = deployment.state / FILE_NAME
    if deployment.membership.has_sources and not salt.exists():
        yield (
            f"{salt} is missing: this pod makes its own, and finds no blocks that were cached "
            "with another; mount the same Secret in all replicas"
        )
    yield from pool_traps(deployment, env)


def pool_traps(deployment: Deployment, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line for every such setting of the pool nodes and engines that are started here.

    Args:
        deployment: Its parts without `url` or `address` are started here.
    """
    if not is_in_a_pod(env):
        return
    for cluster in deployment.clusters.values():
        for name, pool in cluster.pools.items():
            if pool.address:
                continue
            if pool.admin is None or is_loopback(pool.admin):
                yield (
                    f"/health and /metrics of {name} are on loopback: the kubelet's probes and "
                    'Prometheus cannot reach them in this pod; set admin = "0.0.0.0:7180", and let '
                    "a NetworkPolicy keep others away"
                )
            if pool.listen and is_loopback(pool.listen) and deployment.membership.has_sources:
                yield (
                    f"listen of {name} is {pool.listen}: pool nodes and gateways in other pods "
                    f'cannot reach it; listen on "0.0.0.0:{pool.listen.rpartition(":")[2]}"'
                )
    yield from _unread_api(deployment)
    for name in ("VLLM_PORT", "VLLM_HOST_IP"):
        if "://" in env.get(name, ""):
            yield (
                f"{name} is {env[name]}, set by a Service called vllm: engines use it as their "
                "own setting; set enableServiceLinks: false in the pod"
            )


def _unread_api(deployment: Deployment) -> Iterator[str]:
    """A line for each file without which EndpointSlices cannot be listed."""
    table = deployment.membership.kubernetes
    if table is None:
        return
    names = ["token", "ca.crt", *([] if table.namespace else ["namespace"])]
    unread = [name for name in names if not os.access(table.service_account / name, os.R_OK)]
    if unread:
        yield (
            f"[membership.kubernetes] needs {', '.join(unread)} in {table.service_account}, and "
            f"user {os.getuid()} cannot read it: mount a projected volume with a "
            "serviceAccountToken there, and set fsGroup in the pod"
        )


def residency_lines(deployment: Deployment) -> Iterator[str]:
    """Footprints of clusters, limits of tenants, and the tenants for which pools trust gateways."""
    residency = deployment.residency
    if not residency.all:
        return
    shown = (f"{name} in {_listed(regions)}" for name, regions in residency.clusters.items())
    yield f"residency: blocks of {'; '.join(shown)}"
    remote = [n for n, table in deployment.clusters.items() if table.role is ClusterRole.PRFAAS]
    for tenant, allowed in residency.tenants.items():
        barred = [name for name in remote if residency.bars(tenant, name)]
        where = f"not offloaded to {', '.join(barred)}" if barred else "offloaded to any cluster"
        yield f"residency: tenant {tenant} in {_listed(allowed)}; {where}"
    for tenant, allowed in residency.tenants.items():
        if beyond := deployment.gateway_regions - allowed:
            yield (
                f"residency: pool nodes take the gateways' word that blocks of {tenant} do not go "
                f"to {_listed(beyond)}, for which their certificates sign too; gateways of its own "
                "are bound by their certificates (docs/residency.md)"
            )


def _listed(regions: Regions) -> str:
    return ", ".join(sorted(regions))
