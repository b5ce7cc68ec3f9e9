"""Invariants of every rendered site: permissions, ports, names, and parts that fit each other."""

import json
import re
import shutil
import tarfile
import tomllib
from itertools import product
from pathlib import Path

import pytest
import yaml

from prfaas.cli.preflight.vllm_flags import given
from prfaas.config.clusters import EngineTable
from prfaas.config.deployment import ModelTable
from prfaas.config.load import load_deployment
from prfaas.config.membership import PeersFile
from prfaas.core.membership.members import Kind, Member
from prfaas.engines import launch
from prfaas.membership.endpoint_slices import members_in, read_slice
from prfaas.membership.folder import MemberFile
from prfaas.wire.identity import NAME
from tests.membership.fake_api import endpoint, endpoint_slice

from .charts import (
    CHART,
    EXAMPLES,
    ROOT,
    WHOLE,
    WHOLE_GATEWAY,
    Object,
    containers,
    helm,
    matches,
    of_kind,
    pod_templates,
    rendered,
    site,
)

CELLS = list(
    product(("pd", "prfaas"), ("cert-manager", "existingSecret"), ("DaemonSet", "Sidecar"))
)
of_every_cell = pytest.mark.parametrize(("role", "certificates", "mode"), CELLS)


def site_of(role: str, certificates: str, mode: str) -> list[Object]:
    values = site(role, certificates, mode)
    values["pool"] |= WHOLE["pool"]
    return rendered(role, values)


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


def config(objects: list[Object], part: str) -> dict[str, str]:
    """Files of a ConfigMap."""
    (found,) = [
        each.get("data", {})
        for each in of_kind(objects, "ConfigMap")
        if each["metadata"]["name"].endswith(f"-prfaas-{part}")
    ]
    return dict(found)


def written_members(objects: list[Object]) -> dict[str, Member]:
    """Members in the ConfigMap, as gateways and pool nodes read them."""
    return {
        name: MemberFile.model_validate(tomllib.loads(text))
        .listed(name.removesuffix(".toml"), with_links=True)
        .member
        for name, text in config(objects, "members").items()
    }


def sliced_members(objects: list[Object]) -> list[Member]:
    """Members that the EndpointSlices of the Services describe."""
    slices = [
        endpoint_slice(
            each["metadata"]["name"],
            each["metadata"]["labels"],
            {port["name"]: port["port"] for port in each["spec"]["ports"]},
            endpoint("pod", f"10.0.0.{number}"),
        )
        for number, each in enumerate(of_kind(objects, "Service"))
        if "prfaas/kind" in each["metadata"]["labels"]
    ]
    listed, refused = members_in(map(read_slice, slices))
    assert not refused
    return [each.member for each in listed]


@of_every_cell
def test_every_part_is_a_member_by_exactly_one_source(
    role: str, certificates: str, mode: str
) -> None:
    values = site(role, certificates, mode)
    objects = rendered(role, values)
    sliced, written = sliced_members(objects), written_members(objects)
    assert {each.cluster for each in sliced} == ({"pd"} if role == "pd" else set())
    away = "prefill" if role == "pd" else "pd"
    assert {each.cluster for each in written.values()} == {away}
    by_file = written_members(rendered(role, {**values, "membership": {"endpointSlices": False}}))
    if role == "pd":
        own = {each.name: each for each in by_file.values() if each.cluster == "pd"}
        assert own.keys() == {each.name for each in sliced}
        for each in sliced:
            same = own[each.name]
            assert (each.kind, each.pool, each.role) == (same.kind, same.pool, same.role)
            assert dict(each.settings).keys() <= dict(same.settings).keys()
    else:
        assert by_file == written
        assert dict(written["pd-a.toml"].settings) == {"budget": "9000000000"}


def test_members_without_endpoint_slices_are_reached_by_their_services() -> None:
    objects = rendered("pd", {"membership": {"endpointSlices": False}})
    services = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    places = [
        place
        for each in written_members(objects).values()
        for place in (each.address, *dict(each.settings).values())
        if ".prfaas.svc:" in place
    ]
    hosts = {re.sub(r"\w+://", "", place).partition(".")[0] for place in places}
    assert hosts == services - {"pd-prfaas-gateway"}
    assert not of_kind(objects, "Role", "RoleBinding")
    assert "kubernetes" not in tomllib.loads(config(objects, "peers")["peers.toml"])


@of_every_cell
def test_a_token_is_mounted_only_by_those_who_list_members(
    role: str, certificates: str, mode: str
) -> None:
    objects = site_of(role, certificates, mode)
    found = set()
    for _, pod in pod_templates(objects):
        tokens = {
            volume["name"]
            for volume in pod["spec"].get("volumes", [])
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        }
        for each in containers(pod):
            if tokens & {mount["name"] for mount in each.get("volumeMounts", [])}:
                found.add(each["name"])
    assert found == ({"gateway", "pool"} if role == "pd" else set())
    rules = [rule for each in of_kind(objects, "Role") for rule in each["rules"]]
    may = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
    assert rules == ([may | {"verbs": ["list", "watch"]}] if role == "pd" else [])


@of_every_cell
def test_pool_nodes_read_the_clusters_of_their_peers(
    role: str, certificates: str, mode: str
) -> None:
    found = tomllib.loads(
        config(rendered(role, site(role, certificates, mode)), "peers")["peers.toml"]
    )
    table = PeersFile.model_validate(found)
    assert table.targets == ["pd"]
    assert set(table.sources) == ({"pd", "prefill"} if role == "pd" else set())
    assert (table.kubernetes is not None) == (role == "pd")


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
                assert value_of(each, "--memory") == "256GiB"
                assert limit > 257 << 10
                assert each.get("restartPolicy") == ("Always" if mode == "Sidecar" else None)


def test_an_upgrade_of_one_host_changes_nothing_else() -> None:
    before = dict(pod_templates(rendered("pd")))
    hosts: list[Object] = [
        {"name": f"pd-{host}", "node": node, "engines": [{"name": f"pd-{host}-{n}"} for n in "01"]}
        for host, node in (("a", "gpu-1"), ("b", "gpu-2"))
    ]
    hosts[0]["image"] = {"tag": "0.2.0"}
    after = dict(pod_templates(rendered("pd", {"hosts": hosts})))
    assert {name for name in before if before[name] != after[name]} == {"pd-prfaas-pd-a"}
    tag = {"tag": "0.2.0"}
    after = dict(pod_templates(rendered("pd", {"gateway": {"image": tag}})))
    assert {name for name in before if before[name] != after[name]} == {"pd-prfaas-gateway"}
    everywhere = [host | {"image": tag} for host in hosts]
    before = dict(pod_templates(rendered("pd", {"hosts": everywhere, "gateway": {"image": tag}})))
    after = dict(pod_templates(rendered("pd", {"image": tag})))
    assert {name for name in before if before[name] != after[name]} == {"pd-prfaas-test"}


def test_a_change_of_the_deployment_file_restarts_gateways_alone() -> None:
    before = dict(pod_templates(rendered("pd")))
    after = dict(pod_templates(rendered("pd", {"routing": {"offloadThreshold": 8000}})))
    assert {name for name in before if before[name] != after[name]} == {"pd-prfaas-gateway"}


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


def host(name: str, node: str, **engine: str) -> Object:
    return {"name": name, "node": node, "engines": [{"name": f"{name}-0", **engine}]}


@pytest.mark.parametrize("slices", [True, False])
def test_another_host_of_a_pd_site_restarts_nothing(slices: bool) -> None:
    hosts, member = [host("pd-a", "n"), host("pd-b", "m")], {"endpointSlices": slices}
    before = dict(pod_templates(rendered("pd", {"hosts": hosts, "membership": member})))
    more = [*hosts, host("pd-c", "o")]
    after = dict(pod_templates(rendered("pd", {"hosts": more, "membership": member})))
    assert after.keys() - before.keys() == {"pd-prfaas-pd-c", "pd-prfaas-pd-c-0"}
    test = "pd-prfaas-test"
    assert {name for name in before if before[name] != after[name]} <= {test}


@pytest.mark.parametrize("role", ["pd", "prfaas"])
def test_another_host_of_the_other_site_restarts_nothing(role: str) -> None:
    """A new PD host needs no restart of a pool node that pushes to it."""
    example = yaml.safe_load((EXAMPLES / f"{role}-values.yaml").read_text())
    (peer,) = example["site"]["peers"]
    before = rendered(role)
    grown = peer | {"pools": [*peer["pools"], {"name": "new", "budget": "1Gbps"}]}
    if role == "pd":
        grown["engines"] = [*peer["engines"], {"name": "new-0", "pool": "new"}]
    after = rendered(role, {"site": {"peers": [grown]}})
    assert dict(pod_templates(before)) == dict(pod_templates(after))
    new = written_members(after).keys() - written_members(before).keys()
    assert new == ({"new.toml", "new-0.toml"} if role == "pd" else {"new.toml"})


def test_pool_nodes_of_a_pd_site_exchange_blocks_with_each_other() -> None:
    hosts = [host("pd-a", "n", role="prefill"), host("pd-b", "m", role="decode")]
    objects = rendered("pd", {"hosts": hosts})
    pools = {each.name for each in sliced_members(objects) if each.kind is Kind.POOL}
    assert pools == {"pd-a", "pd-b"}
    roles = {each.name: each.role for each in sliced_members(objects) if each.kind is Kind.ENGINE}
    assert roles == {"pd-a-0": "prefill", "pd-b-0": "decode"}
    file = tomllib.loads(config(objects, "gateway")["deployment.toml"])
    assert file["clusters"]["pd"]["has_roles"]
    assert not tomllib.loads(config(rendered("pd"), "gateway")["deployment.toml"])["clusters"][
        "pd"
    ].get("has_roles")
    for _, template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            if container["name"] == "pool":
                assert "--peers-from=/etc/prfaas/peers/peers.toml" in container["args"]
