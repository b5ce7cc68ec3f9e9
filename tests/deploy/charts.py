"""Rendering the chart with the real `helm`, and reading what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "prfaas"
EXAMPLES = ROOT / "examples" / "kubernetes"
NAMESPACE = "prfaas"
HELM = Path(sys.executable).with_name("helm")
RELEASES = {"pd": "pd", "prfaas": "prefill"}
"""Names of the releases, by role."""

Object = dict[str, Any]
"""An object of Kubernetes, or a part of one."""


def helm(*args: str | Path, values: Object | None = None) -> subprocess.CompletedProcess[str]:
    """Run `helm`; `values` go to its standard input, to be read with `--values -`."""
    if not HELM.exists():
        pytest.skip("helm-binary has no build for this machine")
    command = [str(HELM), *map(str, args)]
    if values is not None:
        command += ["--values", "-"]
    return subprocess.run(
        command,
        input=None if values is None else json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def template(role: str, values: Object, version: str = "1.34") -> subprocess.CompletedProcess[str]:
    """Render the example of a role with other values over it."""
    example = EXAMPLES / f"{role}-values.yaml"
    args = ("template", RELEASES[role], CHART, "--namespace", NAMESPACE)
    return helm(*args, "--kube-version", version, "--values", example, values=values)


@cache
def _rendered(role: str, values: str, version: str) -> list[Object]:
    done = template(role, json.loads(values), version)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if found]


def rendered(role: str, values: Object | None = None, version: str = "1.34") -> list[Object]:
    """Objects of a site; rendered once for the same values."""
    return _rendered(role, json.dumps(values or {}, sort_keys=True), version)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """The objects of some kinds."""
    return [each for each in objects if each["kind"] in kinds]


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Pod templates with the names of what makes pods of them."""
    for each in of_kind(objects, "Deployment", "DaemonSet", "StatefulSet"):
        yield each["metadata"]["name"], each["spec"]["template"]
    for each in of_kind(objects, "LeaderWorkerSet"):
        yield each["metadata"]["name"], each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    for each in of_kind(objects, "Pod"):
        yield each["metadata"]["name"], each


def containers(pod: Object) -> list[Object]:
    """All containers of a pod, those that run before the others included."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def matches(selector: Object, labels: Object) -> bool:
    """Return True if a label selector selects these labels."""
    wanted = selector.get("matchLabels", {}).items()
    for rule in selector.get("matchExpressions", []):
        value, operator = labels.get(rule["key"]), rule["operator"]
        if not (value is not None if operator == "Exists" else value in rule["values"]):
            return False
    return bool(wanted <= labels.items())


SECRETS: Object = {"source": "existingSecret", "existingSecret": "prfaas-identities"}
MANAGED: Object = {"source": "cert-manager", "issuerRef": {"name": "prfaas", "kind": "Issuer"}}


def site(role: str, certificates: str, mode: str) -> Object:
    """Values of a site, for one cell of the matrix."""
    values: Object = {
        "certificates": MANAGED if certificates == "cert-manager" else SECRETS,
        "pool": {"mode": mode},
    }
    if mode == "Sidecar":
        name = "pd" if role == "pd" else "prefill"
        values["hosts"] = [
            {"name": f"{name}-{host}", "engines": [{"name": f"{name}-{host}-0"}]} for host in "ab"
        ]
    return values


S3: Object = {"bucket": "kv-blocks", "limit": "2TiB", "keysSecret": "site-keys"}
MOONCAKE: Object = {"master": "mooncake.store.svc:50051", "keysSecret": "site-keys"}
DISK: Object = {"limit": "1TiB", "hostPath": "/nvme/prfaas", "keysSecret": "disk-keys"}
WHOLE: Object = {
    "pool": {
        "disk": DISK,
        "hostPort": True,
        "s3": S3 | {"credentialsSecret": "s3-user", "endpoint": "https://s3.example.net:9000"},
    },
    "monitoring": {
        "podMonitor": True,
        "prometheusRule": True,
        "dashboard": True,
        "prometheusUrl": "http://prometheus.monitoring:9090",
    },
    "imagePullSecrets": [{"name": "registry"}],
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "priorityClassName": "high",
}
"""Everything that both roles can have."""
WHOLE_GATEWAY: Object = {
    "autoscaling": {"enabled": True},
    "tls": {"existingSecret": "api-tls"},
    "operatorKey": {"hashes": ["sha256:" + "0" * 64], "existingSecret": "operator"},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
}


def hosts(*found: Object) -> Object:
    return {"hosts": list(found)}


def host(name: str, node: str, *engines: Object) -> Object:
    return {"name": name, "node": node, "engines": list(engines)}


PROMETHEUS: Object = {"monitoring": {"prometheusUrl": "http://prometheus:9090"}}
SCALED: Object = {"name": "p", "maxReplicas": 6}
SCALED_SITE: Object = {
    **hosts(
        host("pd-a", "n", SCALED | {"role": "prefill"}, {"name": "d", "role": "decode"}),
        host("pd-b", "m", SCALED | {"name": "q", "minReplicas": 2, "role": "prefill"}),
    ),
    **PROMETHEUS,
}


CELLS = list(
    product(("pd", "prfaas"), ("cert-manager", "existingSecret"), ("DaemonSet", "Sidecar"))
)


of_every_cell = pytest.mark.parametrize(("role", "certificates", "mode"), CELLS)


def site_of(role: str, certificates: str, mode: str) -> list[Object]:
    """A rendered site of a cell, with everything of its pool nodes."""
    values = site(role, certificates, mode)
    values["pool"] |= WHOLE["pool"]
    return rendered(role, values)


def in_regions(role: str, own: str, other: str) -> Object:
    """Values of a site with a region, whose peer has another."""
    example = yaml.safe_load((EXAMPLES / f"{role}-values.yaml").read_text())
    (peer,) = example["site"]["peers"]
    return {"site": {"region": own, "peers": [peer | {"region": other}]}}


def config(objects: list[Object], part: str) -> dict[str, str]:
    """Files of a ConfigMap."""
    (found,) = [
        each.get("data", {})
        for each in of_kind(objects, "ConfigMap")
        if each["metadata"]["name"].endswith(f"-prfaas-{part}")
    ]
    return dict(found)
