"""Settings that are valid and do not work in a pod of Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from prfaas.config.deployment import Deployment
from prfaas.config.tenants import is_loopback
from prfaas.deployment_secret import FILE_NAME

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
