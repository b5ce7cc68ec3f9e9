"""Settings that are valid and do not work in a pod of Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from prfaas.config.deployment import Deployment
from prfaas.config.tenants import is_loopback

IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""Set in every container of Kubernetes."""


def pod_traps(deployment: Deployment, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line for every setting that does not work in a pod; none outside of pods.

    Args:
        deployment: Its parts without `url` or `address` are started here.
        env: Environment variables.
    """
    if IN_A_POD not in env:
        return
    gateway = deployment.gateway
    if is_loopback(gateway.listen):
        yield (
            f"gateway.listen {gateway.listen} is reached from within this pod alone: Services and "
            f'probes come from outside; listen on "0.0.0.0:{gateway.listen.rpartition(":")[2]}"'
        )
    for cluster in deployment.clusters.values():
        for name, pool in cluster.pools.items():
            if not pool.address and (pool.admin is None or is_loopback(pool.admin)):
                yield (
                    f"/health and /metrics of {name} are on loopback: the kubelet's probes and "
                    'Prometheus cannot reach them in this pod; set admin = "0.0.0.0:7180", and let '
                    "a NetworkPolicy keep others away"
                )
    for name in ("VLLM_PORT", "VLLM_HOST_IP"):
        if "://" in env.get(name, ""):
            yield (
                f"{name} is {env[name]}, set by a Service called vllm: engines use it as their "
                "own setting; set enableServiceLinks: false in the pod"
            )
