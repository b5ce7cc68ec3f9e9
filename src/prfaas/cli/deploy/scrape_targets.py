"""Prometheus' targets of a deployment, in the form of its file-based service discovery.

https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import json
from pathlib import Path

from prfaas.cli.deploy.topology import Topology
from prfaas.config.addresses import join_address

FILE_NAME = "targets.json"


def targets(topology: Topology) -> list[dict[str, object]]:
    """Parts started here with `/metrics`: gateway, pool nodes, engines."""
    deployment = topology.deployment
    gateway = deployment.gateway.name
    found = [_target("gateway", gateway, join_address(topology.gateway))]
    for cluster_name, cluster in deployment.clusters.items():
        for name in cluster.pools:
            if name in topology.admins:
                place = join_address(topology.admins[name])
                found.append(_target("pool", name, place, cluster_name))
        for name, engine in cluster.engines.items():
            if not engine.url:
                place = topology.engines[name].removeprefix("http://")
                found.append(_target("engine", name, place, cluster_name))
    return found


def write_targets(topology: Topology) -> Path:
    """Write them into the state directory atomically; returns the file."""
    path = topology.deployment.state / FILE_NAME
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(targets(topology), indent=2) + "\n")
    draft.replace(path)
    return path


def _target(kind: str, name: str, place: str, cluster: str | None = None) -> dict[str, object]:
    labels = {"job": f"prfaas-{kind}", "part": name}
    return {"targets": [place], "labels": labels | ({"cluster": cluster} if cluster else {})}
