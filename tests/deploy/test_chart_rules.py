"""Invariants of every rendered site: permissions, ports, names, and parts that fit each other."""

import json
import re
import shutil
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from prfaas.cli.preflight.vllm_flags import given
from prfaas.config.clusters import EngineTable
from prfaas.config.deployment import ModelTable
from prfaas.config.load import load_deployment
from prfaas.engines import launch
from prfaas.wire.identity import NAME

from .charts import (
    CHART,
    EXAMPLES,
    ROOT,
    WHOLE,
    WHOLE_GATEWAY,
    Object,
    config,
    containers,
    helm,
    matches,
    of_every_cell,
    of_kind,
    pod_templates,
    rendered,
    site,
    site_of,
)


@of_every_cell
def test_pods_may_do_little(role: str, certificates: str, mode: str) -> None:
    for name, pod in pod_templates(site_of(role, certificates, mode)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"] == 10001
        assert not spec["automountServiceAccountToken"], name
        assert not spec["enableServiceLinks"], "VLLM_PORT would be a Service's"
        for each in containers(pod):
            may = each["securityContext"]
            assert not may["allowPrivilegeEscalation"]
            assert may["capabilities"]["drop"] == ["ALL"]
            assert ("add" in may["capabilities"]) == (each["name"] == "folders")
            assert may["readOnlyRootFilesystem"] or each["name"] == "engine"


@of_every_cell
def test_what_a_pool_node_compiles_has_a_folder(role: str, certificates: str, mode: str) -> None:
    for _, pod in pod_templates(site_of(role, certificates, mode)):
        for each in containers(pod):
            if each["name"] == "pool":
                (folder,) = [e["value"] for e in each["env"] if e["name"] == "NUMBA_CACHE_DIR"]
                mounts = [m["mountPath"] for m in each["volumeMounts"] if not m.get("readOnly")]
                assert any(folder.startswith(f"{mount}/") for mount in mounts)


@of_every_cell
def test_what_is_mounted_is_there_and_secrets_are_their_users(
    role: str, certificates: str, mode: str
) -> None:
    objects = site_of(role, certificates, mode)
    made = {each["metadata"]["name"] for each in of_kind(objects, "ConfigMap")}
    issued = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    for name, pod in pod_templates(objects):
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", [])}
        assert len(volumes) == len(pod["spec"].get("volumes", []))
        mounted = {m["name"] for each in containers(pod) for m in each.get("volumeMounts", [])}
        assert mounted == set(volumes), name
        for each in volumes.values():
            if "configMap" in each:
                assert each["configMap"]["name"] in made
            if "secret" in each:
                assert each["secret"]["defaultMode"] == 0o400
            for source in each.get("projected", {}).get("sources", []):
                assert each["projected"]["defaultMode"] == 0o400
                if "secret" in source and certificates == "cert-manager":
                    assert source["secret"]["name"] in issued


@of_every_cell
def test_selectors_select_what_they_are_for_and_nothing_else(
    role: str, certificates: str, mode: str
) -> None:
    objects = site_of(role, certificates, mode)
    pods = {name: pod["metadata"]["labels"] for name, pod in pod_templates(objects)}
    for each in of_kind(objects, "Deployment", "DaemonSet", "PodDisruptionBudget"):
        name = each["metadata"]["name"]
        assert [n for n, labels in pods.items() if matches(each["spec"]["selector"], labels)] == [
            name
        ]
    owner = {host: engines[0] for host, engines in hosts_of(objects, mode).items()}
    for each in of_kind(objects, "Service"):
        name = each["metadata"]["name"]
        selector = {"matchLabels": each["spec"]["selector"]}
        expected = owner.get(name, name) if mode == "Sidecar" else name
        assert [n for n, labels in pods.items() if matches(selector, labels)] == [expected]


def hosts_of(objects: list[Object], mode: str) -> dict[str, list[str]]:
    """Names of engines' pods by the Service of their pool node, where it is in the same pod."""
    found: dict[str, list[str]] = {}
    for name, pod in pod_templates(objects):
        labels = pod["metadata"]["labels"]
        if mode == "Sidecar" and "prfaas/engine" in labels:
            pool = name.replace(labels["prfaas/engine"], labels["prfaas/pool"])
            found.setdefault(pool, []).append(name)
    return found


@pytest.mark.parametrize("role", ["pd", "prfaas"])
def test_every_identity_that_a_part_uses_is_issued_for_its_name(role: str) -> None:
    objects = rendered(role, site(role, "cert-manager", "DaemonSet"))
    names = {each["spec"]["commonName"]: each["spec"] for each in of_kind(objects, "Certificate")}
    used = set()
    for _, pod in pod_templates(objects):
        for volume in pod["spec"].get("volumes", []):
            for source in volume.get("projected", {}).get("sources", []):
                items = source.get("secret", {}).get("items", [])
                used |= {item["path"].removesuffix(".key") for item in items}
    assert {name for name in used if not name.endswith(".pem")} == set(names)
    for name, spec in names.items():
        assert NAME.fullmatch(name)
        assert name in spec["dnsNames"]
        assert spec["privateKey"]["algorithm"] == "ECDSA", "tickets need it"


@pytest.mark.parametrize("role", ["pd", "prfaas"])
def test_network_policies_equal_the_table_of_ports(role: str) -> None:
    monitoring = [{"podSelector": {"matchLabels": {"who": "prometheus"}}}]
    clients = [{"podSelector": {"matchLabels": {"who": "client"}}}]
    listed = {"networkPolicy": {"clients": clients, "monitoring": monitoring}}
    objects = rendered(role, listed)
    found = {row for policy in of_kind(objects, "NetworkPolicy") for row in opened(policy)}
    assert found == {(f, to, port) for where, f, to, port in table() if where in (role, "both")}


def opened(policy: Object) -> set[tuple[str, str, int]]:
    """Return sources, component and port that a policy opens."""
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    to = policy["metadata"]["name"].rpartition("-")[2]
    return {
        (who(peer), to, port["port"])
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
        for peer in rule["from"]
    }


def who(peer: Object) -> str:
    if "ipBlock" in peer:
        return "site.peers[].cidrs"
    labels = peer["podSelector"]["matchLabels"]
    if "matchExpressions" in peer["podSelector"]:
        (matched,) = peer["podSelector"]["matchExpressions"]
        return str(matched["key"]).rpartition("/")[2]
    known = {"prometheus": "networkPolicy.monitoring", "client": "networkPolicy.clients"}
    component = labels.get("app.kubernetes.io/component", "")
    return known.get(labels.get("who", ""), "helm test" if component == "test" else component)


def table() -> list[tuple[str, str, str, int]]:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    rows = re.findall(r"^\| (pd|prfaas|both) \| (.+?) \| (\w+) \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) > 10
    return [(where, f.partition(",")[0].strip("`"), to, int(port)) for where, f, to, port in rows]


def test_everybody_reaches_the_gateway_where_no_clients_are_listed() -> None:
    (policy,) = [
        each
        for each in of_kind(rendered("pd"), "NetworkPolicy")
        if each["metadata"]["name"].endswith("-gateway")
    ]
    assert policy["spec"]["ingress"] == [{"ports": [{"port": 8000, "protocol": "TCP"}]}]


@pytest.mark.parametrize("role", ["pd", "prfaas"])
def test_vllm_gets_the_flags_and_variables_that_up_gives_it(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "runs_on_cpu", lambda: False)
    monkeypatch.setattr("os.environ", {})
    events = {"kv_events": "ipc:///a", "kv_events_replay": "ipc:///b"} if role == "pd" else {}
    model = ModelTable(name="m", path="/m")
    table = EngineTable.model_validate({"pool": "p", **events})
    by_up = launch.engine_command("e", table, model, ("127.0.0.1", 1), Path("/p"), "run")
    pod = next(p for n, p in pod_templates(rendered(role)) if n.endswith("-a-0"))
    (engine,) = pod["spec"]["containers"]
    flags = {arg.partition("=")[0] for arg in engine["args"] if arg.startswith("--")}
    own = {"--tensor-parallel-size", "--mamba-ssm-cache-dtype", "--block-size"}
    tls = {flag for flag in flags if "ssl" in flag}
    assert bool(tls) == (role == "prfaas")
    assert flags - own - tls == {arg for arg in by_up.args if arg.startswith("--")}
    env = {each["name"]: each["value"] for each in engine["env"]}
    assert env == {**by_up.env, "HOME": "/home/prfaas", "USER": "prfaas"}
    told = json.loads(value_of(engine, "--kv-transfer-config"))
    written = json.loads(by_up.args[by_up.args.index("--kv-transfer-config") + 1])
    assert told.keys() | {"engine_id"} == written.keys()
    assert told["kv_connector_extra_config"].keys() == written["kv_connector_extra_config"].keys()


@pytest.mark.parametrize("role", ["pd", "prfaas"])
def test_vllm_knows_every_argument(role: str) -> None:
    pod = next(p for n, p in pod_templates(rendered(role)) if n.endswith("-a-0"))
    (engine,) = pod["spec"]["containers"]
    found = list(given(engine["args"]))
    assert len(found) > 10
    assert [each.name for each in found if not each.is_known] == []


@pytest.mark.parametrize("certificates", ["cert-manager", "existingSecret"])
@pytest.mark.parametrize("mode", ["DaemonSet", "Sidecar"])
def test_the_deployment_file_is_one_that_gateways_read(
    certificates: str, mode: str, tmp_path: Path
) -> None:
    settings = '[tenants.a]\nkeys = ["sha256:' + "1" * 64 + '"]\n'
    for gateway in (WHOLE_GATEWAY, WHOLE_GATEWAY | {"settings": settings}, {"settings": ""}):
        values: Object = {**WHOLE, **site("pd", certificates, mode), "gateway": gateway}
        for name, text in config(rendered("pd", values), "gateway").items():
            (tmp_path / name).write_text(text)
        read = load_deployment(tmp_path / "deployment.toml", tmp_path / "settings.toml")
        assert set(read.clusters) == {"pd", "prefill"}
        assert not read.pools, "members come and go, and the file restarts gateways"
        assert bool(read.tenants) == (gateway.get("settings") == settings)
        table = read.membership.kubernetes
        assert table is not None
        assert table.selector == "prfaas/kind,app.kubernetes.io/instance=pd"


def notes(role: str, folder: Path) -> str:
    """Return what `helm install` prints at its end, which `helm template` leaves out."""
    chart = folder / role
    shutil.copytree(CHART, chart)
    text = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text(f'{{{{ define "notes" }}}}{text}{{{{ end }}}}')
    wrapped = 'kind: Notes\nmetadata: {name: notes}\ntext: {{ include "notes" . | quote }}\n'
    (chart / "templates" / "notes.yaml").write_text(wrapped)
    example = EXAMPLES / f"{role}-values.yaml"
    shown = ("--show-only", "templates/notes.yaml", "--values", example)
    done = helm("template", "notes", chart, "--namespace", "prfaas", *shown)
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["text"])


@pytest.mark.parametrize(("role", "other"), [("pd", "prfaas"), ("prfaas", "pd")])
def test_the_notes_of_a_release_are_the_entry_of_the_other_sites_peers(
    role: str, other: str, tmp_path: Path
) -> None:
    text = notes(other, tmp_path)
    (entry,) = re.findall(r"(    - name: .*)", text, re.DOTALL)
    (peer,) = yaml.safe_load(entry.replace("ADDRESSES/BITS", "10.0.0.0/8"))
    written = yaml.safe_load((EXAMPLES / f"{role}-values.yaml").read_text())["site"]["peers"]
    for pool in written[0]["pools"]:
        pool.pop("budget", None)
    assert [peer | {"cidrs": written[0]["cidrs"]}] == written
    rendered(role, {"site": {"peers": [peer]}})


def value_of(container: Object, flag: str) -> str:
    (found,) = [arg for arg in container["args"] if arg.startswith(f"{flag}=")]
    return str(found).partition("=")[2]


def test_shared_memory_holds_what_the_engine_shares() -> None:
    pod = next(p for n, p in pod_templates(rendered("pd")) if n.endswith("-a-0"))
    (engine,) = pod["spec"]["containers"]
    (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "shm"]
    shared = json.loads(value_of(engine, "--kv-transfer-config"))["kv_connector_extra_config"]
    room = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) << 20
    assert volume["emptyDir"]["medium"] == "Memory"
    assert room >= shared["cpu_bytes_to_use"] + (1 << 30)


@pytest.mark.parametrize("mode", ["DaemonSet", "Sidecar"])
def test_a_pool_node_may_have_more_memory_than_it_is_told_to_hold(mode: str) -> None:
    for _, pod in pod_templates(rendered("pd", site("pd", "existingSecret", mode))):
        for each in containers(pod):
            if each["name"] == "pool":
                limit = int(each["resources"]["limits"]["memory"].removesuffix("Mi"))
                assert limit > 257 << 10
                assert each.get("restartPolicy") == ("Always" if mode == "Sidecar" else None)


def test_authorities_of_peers_are_trusted_beside_the_sites_own() -> None:
    pem = "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n"
    peer: Object = {
        "name": "other",
        "ca": pem.format("BB=="),
        "cidrs": ["10.0.0.0/8"],
        "address": "o.net",
    }
    peer |= {"pools": [{"name": "o"}], "engines": [{"name": "o-0", "pool": "o"}]}
    objects = rendered("pd", {"site": {"ca": pem.format("AA=="), "peers": [peer]}})
    (bundle,) = [o for o in of_kind(objects, "ConfigMap") if "ca.pem" in o.get("data", {})]
    assert bundle["data"]["ca.pem"].split() == (pem.format("AA==") + pem.format("BB==")).split()
    for name, pod in pod_templates(objects):
        sources = [
            s
            for v in pod["spec"].get("volumes", [])
            for s in v.get("projected", {}).get("sources", [])
        ]
        authorities = [s["configMap"]["name"] for s in sources if "configMap" in s]
        # The last one is the API server's.
        expected = [bundle["metadata"]["name"]] * any("secret" in s for s in sources)
        assert [name for name in authorities if name != "kube-root-ca.crt"] == expected, name


def test_the_rules_and_the_dashboard_are_the_projects(tmp_path: Path) -> None:
    for name in ("alerts.yml", "grafana.json"):
        assert (CHART / "files" / name).resolve() == ROOT / "dashboards" / name
    packed = helm("package", CHART, "--destination", tmp_path)
    assert packed.returncode == 0, packed.stderr
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as package:
        assert package.getmember("prfaas/files/alerts.yml").isfile()
    objects = rendered("pd")
    (rule,) = of_kind(objects, "PrometheusRule")
    assert len(rule["spec"]["groups"][0]["rules"]) > 10
    jobs = {
        relabeling["replacement"]
        for monitor in of_kind(objects, "PodMonitor")
        for relabeling in monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]
    }
    assert jobs == {"prfaas-gateway", "prfaas-pool", "prfaas-engine"}


def test_the_charts_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (CHART / "Chart.yaml").read_text()
    assert f'appVersion: "{project}"' in chart
    assert f"version: {project}\n" in chart
