"""Every cell of the chart's matrix renders, and is what Kubernetes and its operators accept."""

import json
import re
from itertools import product

import jsonschema
import pytest
import yaml

from .charts import (
    CHART,
    DISK,
    EXAMPLES,
    MOONCAKE,
    ROOT,
    S3,
    SCALED_SITE,
    WHOLE,
    WHOLE_GATEWAY,
    Object,
    helm,
    in_regions,
    of_kind,
    pod_templates,
    rendered,
    site,
)
from .kubernetes_schemas import accepted, check

VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
CELLS = list(
    product(("pd", "prfaas"), ("cert-manager", "existingSecret"), ("DaemonSet", "Sidecar"))
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("role", "certificates", "mode"), CELLS)
def test_a_cell_of_the_matrix_is_valid(
    role: str, certificates: str, mode: str, version: str
) -> None:
    objects = rendered(role, site(role, certificates, mode), version)
    check(objects, version)
    assert bool(of_kind(objects, "Certificate")) == (certificates == "cert-manager")
    assert bool(of_kind(objects, "DaemonSet")) == (mode == "DaemonSet")
    gateways = [o for o in of_kind(objects, "Deployment") if o["metadata"]["name"].endswith("way")]
    assert len(gateways) == (role == "pd")


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet"])
@pytest.mark.parametrize(("role", "certificates", "mode"), CELLS)
def test_all_that_can_be_switched_on_is_valid(
    role: str, certificates: str, mode: str, kind: str, version: str
) -> None:
    values = site(role, certificates, mode)
    values["pool"] |= WHOLE["pool"]
    values = {**WHOLE, **values, "engines": {"kind": kind, "runtimeClassName": "nvidia"}}
    if role == "pd":
        route = {"kind": "HTTPRoute", "parentRefs": [{"name": "public"}], "hostnames": ["a.net"]}
        if kind == "LeaderWorkerSet":
            route = {"kind": "Ingress", "className": "nginx", "hostnames": ["a.net"]}
            route["tlsSecret"] = "api-tls"
        values["gateway"] = {**WHOLE_GATEWAY, "route": route}
    objects = rendered(role, values, version)
    check(objects, version)
    kinds = {each["kind"] for each in objects}
    assert kind in kinds
    assert {"PodMonitor", "PrometheusRule"} <= kinds
    assert ({"ScaledObject"} <= kinds) == (role == "pd")
    assert kinds & {"HTTPRoute", "Ingress"} or role == "prfaas"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", ["DaemonSet", "Sidecar"])
@pytest.mark.parametrize("certificates", ["cert-manager", "existingSecret"])
@pytest.mark.parametrize("tier", ["s3", "mooncake"])
@pytest.mark.parametrize("role", ["pd", "prfaas"])
def test_tiers_keys_and_regions_are_valid(
    role: str, tier: str, certificates: str, mode: str, version: str
) -> None:
    values = site(role, certificates, mode) | in_regions(role, "eu", "us")
    tiers = {"s3": S3 | {"dataRegion": "eu"}, "mooncake": MOONCAKE | {"dataRegion": "eu"}}
    values["pool"] |= {"disk": DISK, tier: tiers[tier]}
    objects = rendered(role, values, version)
    check(objects, version)
    secrets = {
        volume["secret"]["secretName"]
        for _, pod in pod_templates(objects)
        for volume in pod["spec"].get("volumes", [])
        if "secret" in volume
    }
    assert {"disk-keys", "site-keys"} <= secrets
    assert bool([c for c in of_kind(objects, "Certificate") if "uris" in c["spec"]]) == (
        certificates == "cert-manager"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_scaled_engines_are_valid(version: str) -> None:
    objects = rendered("pd", SCALED_SITE, version)
    check(objects, version)
    assert len(of_kind(objects, "ScaledObject")) == 2


def test_validation_sees_a_misspelt_field() -> None:
    """A validator that passes everything would pass the matrix too."""
    (deployment, *_) = of_kind(rendered("pd"), "Deployment")
    broken = json.loads(json.dumps(deployment))
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="livenesProbe"):
        accepted(json.dumps(broken), "1.34")
    (certificate, *_) = of_kind(rendered("pd"), "Certificate")
    broken = json.loads(json.dumps(certificate))
    broken["spec"]["dnsName"] = ["a"]
    with pytest.raises(jsonschema.ValidationError, match="dnsName"):
        accepted(json.dumps(broken), "1.34")


def test_an_older_kubernetes_is_refused() -> None:
    done = helm(
        "template", "pd", CHART, "--values", EXAMPLES / "pd-values.yaml", "--kube-version", "1.28"
    )
    assert done.returncode != 0
    assert "requires kubeVersion: >=1.29.0-0" in done.stderr


@pytest.mark.parametrize("role", ["pd", "prfaas"])
def test_the_examples_pass_the_linter(role: str) -> None:
    done = helm("lint", "--strict", CHART, "--values", EXAMPLES / f"{role}-values.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def keys(values: Object, place: str = "") -> set[str]:
    found = set()
    for key, value in values.items():
        found.add(f"{place}{key}")
        if isinstance(value, dict) and value:
            found |= keys(value, f"{place}{key}.")
    return found


def described(schema: Object, whole: Object, place: str = "", *, lists: bool = False) -> set[str]:
    """Keys of a schema; those of objects in lists, as `hosts[].name`, only with `lists`."""
    if "$ref" in schema:
        schema = whole["definitions"][schema["$ref"].rpartition("/")[2]]
    found = set()
    for key, value in schema.get("properties", {}).items():
        found |= {f"{place}{key}", *described(value, whole, f"{place}{key}.", lists=lists)}
    if lists and "items" in schema:
        found |= described(schema["items"], whole, f"{place.removesuffix('.')}[].", lists=True)
    return found


def test_every_value_that_the_page_names_exists() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    named = re.findall(r"`((\w+)(?:\[\])?(?:\.\w+(?:\[\])?)+)(?:: [^`]*)?`", page)
    found = {key.removesuffix("[]") for key, top in named if top in schema["properties"]}
    found -= {"site.keys", "gateway.operator_keys"}  # A file; a key of the deployment file.
    assert len(found) > 40
    peers = {f"site.peers[].{each}" for each in ("pools[].address", "engines[].url")}
    known = described(schema, schema, lists=True)
    assert peers <= known
    assert found - {"engines[].url"} <= known


def test_values_and_schema_have_the_same_keys() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    overrides = {key for key in described(schema, schema) if key.startswith("gateway.image.")}
    values["gateway"]["resources"] = {}
    assert keys(values) == described(schema, schema) - overrides - {"global"}
