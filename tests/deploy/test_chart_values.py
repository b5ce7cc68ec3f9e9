"""Nulls, numbers, booleans and odd names in values render what Kubernetes accepts."""

import json
from collections.abc import Iterator
from functools import cache

import pytest
import yaml

from .charts import (
    CHART,
    DISK,
    EXAMPLES,
    NAMESPACE,
    WHOLE,
    WHOLE_GATEWAY,
    Object,
    config,
    containers,
    helm,
    of_kind,
    pod_templates,
    rendered,
    template,
)
from .kubernetes_schemas import check

DEFAULTS: Object = yaml.safe_load((CHART / "values.yaml").read_text())


def nulls(values: Object, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of the defaults."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from nulls(value, *path, key)


def nested(path: tuple[str, ...], value: object) -> Object:
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


@cache
def unset() -> str:
    return template("pd", {}).stdout


def with_value(values: str) -> str:
    """Render the example with other values; most defaults change nothing of it."""
    changed = json.loads(values)
    example = yaml.safe_load((EXAMPLES / "pd-values.yaml").read_text())
    while isinstance(changed, dict):
        ((key, changed),) = changed.items()
        if not isinstance(example, dict) or key not in example:
            return unset()
        example = example[key]
    return template("pd", json.loads(values)).stdout


PATHS = list(nulls(DEFAULTS))
NEEDED = {"site", "site.name", "site.role", "model", "model.name", "model.path", "hosts"}


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_null_is_the_default_of_a_key(path: tuple[str, ...]) -> None:
    done = template("pd", nested(path, None))
    if ".".join(path) in NEEDED:
        assert done.returncode != 0
        assert path[-1] in done.stderr
        return
    if done.returncode != 0:
        # The example sets what the default leaves empty, and the chart's own check names it.
        assert ": missing" in done.stderr
        assert path[0] in done.stderr
        return
    default = DEFAULTS
    for key in path:
        default = default[key]
    if not isinstance(default, dict):
        assert done.stdout == with_value(json.dumps(nested(path, default)))


PLAIN = [1, 2.5, 1e6, 1000660000, True, False, "1", "true", "on", "null", "1e3", "a: b", "# no", ""]
MANY: Object = {
    "gateway": WHOLE_GATEWAY
    | {
        "env": [{"name": f"V{n}", "value": each} for n, each in enumerate(PLAIN)],
        "service": {"annotations": {f"a{n}": each for n, each in enumerate(PLAIN)}},
        "route": {"kind": "Ingress", "hostnames": ["*.example.net"], "tlsSecret": "123"},
        "settings": "  # indented\n[routing]\n",
        "files": {"1": "  x: 1\r\n\ty\n"},
        "salt": {"existingSecret": "1e3"},
    },
    "engines": {"env": [{"name": "N", "value": 0.9}], "args": ["--x", 1000000, 0.9, True]},
    "pool": {"cpu": 2, "args": [4], "disk": DISK | {"hostPath": "/a: b # c", "keysSecret": "0"}},
    "model": {"path": "/models/a: b #1", "name": "true", "mountPath": "/m: # n"},
    "nodeSelector": {"gpu": True, "generation": 9},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "g", "operator": "In", "values": [1, True]}]}
                ]
            }
        }
    },
    "tolerations": [{"key": "gpu", "operator": "Equal", "value": True, "tolerationSeconds": 300}],
    "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"v": 1}}}]},
    "serviceAccount": {"name": "123", "annotations": {"n": 1}},
    "podSecurity": {"user": 1000660000},
    "monitoring": WHOLE["monitoring"] | {"labels": {"release": 1}},
    "priorityClassName": "1",
}


def test_numbers_and_booleans_become_strings_where_kubernetes_wants_strings() -> None:
    objects = rendered("pd", MANY)
    check(objects, "1.34")
    pods = dict(pod_templates(objects))
    gateway = pods["pd-prfaas-gateway"]["spec"]["containers"][0]
    found = [each["value"] for each in gateway["env"] if each["name"] != "HOME"]
    assert found == [
        *("1", "2.5", "1000000", "1000660000", "true", "false"),
        *("1", "true", "on", "null", "1e3", "a: b", "# no", ""),
    ]
    for pod in pods.values():
        assert pod["spec"]["securityContext"]["runAsUser"] == 1000660000
    engine = next(pod for name, pod in pods.items() if "engine" in json.dumps(pod["metadata"]))
    assert engine["spec"]["containers"][0]["args"][-4:] == ["--x", "1000000", "0.9", "true"]
    assert "1.00066e+09" not in json.dumps(objects)


def test_texts_of_the_gateway_arrive_as_they_were_given() -> None:
    files = config(rendered("pd", MANY), "gateway")
    assert files["settings.toml"] == "  # indented\n[routing]\n"
    assert files["1"] == "  x: 1\r\n\ty\n"


@pytest.mark.parametrize(
    "release", ["1", "0abc", "my.release", "1.2.3", "prfaas", "x.prfaas.y", "9-prfaas"]
)
@pytest.mark.parametrize("role", ["pd", "prfaas"])
def test_every_name_of_a_release_makes_valid_names_of_services(release: str, role: str) -> None:
    example = EXAMPLES / f"{role}-values.yaml"
    done = helm("template", release, CHART, "--namespace", NAMESPACE, "--values", example)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each]
    check(objects, "1.34")
    for each in of_kind(objects, "Service"):
        name = each["metadata"]["name"]
        assert name[0].isalpha(), name
        assert "." not in name
    for each in objects:
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == release


@pytest.mark.parametrize("name", ["on", "y", "n", "no", "true", "null", "off"])
def test_a_part_may_be_called_like_a_boolean(name: str) -> None:
    hosts = [{"name": f"{name}", "node": "n", "engines": [{"name": "e"}]}]
    managed = {"source": "cert-manager", "issuerRef": {"name": "true"}}
    check(rendered("pd", {"hosts": hosts, "certificates": managed}), "1.34")


def test_audit_logs_can_be_on_volumes_of_their_own() -> None:
    volumes = [{"name": "audit", "persistentVolumeClaim": {"claimName": "audit"}}]
    mounts = [{"name": "audit", "mountPath": "/var/lib/audit"}]
    extra = {"extraVolumes": volumes, "extraVolumeMounts": mounts}
    objects = rendered("pd", {"gateway": extra, "pool": extra})
    check(objects, "1.34")
    for _, pod in pod_templates(objects):
        part = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        held = [
            each["name"] for each in containers(pod) if mounts[0] in each.get("volumeMounts", [])
        ]
        assert held == ([part] if part in ("gateway", "pool") else [])
        assert (volumes[0] in pod["spec"].get("volumes", [])) == bool(held)
