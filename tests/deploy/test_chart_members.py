"""Members of a site as its chart writes them, and what another host or file restarts."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from prfaas.config.load import load_deployment
from prfaas.core.membership.members import Member, MemberKind
from prfaas.membership.endpoint_slices import members_in, read_slice
from prfaas.membership.folder import MemberFile
from prfaas.membership.peer_entries import peer_clusters
from tests.membership.fake_api import endpoint, endpoint_slice

from .charts import (
    EXAMPLES,
    Object,
    config,
    containers,
    of_every_cell,
    of_kind,
    pod_templates,
    rendered,
    site,
    site_of,
)


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
    # At a PrfaaS site files describe the pool nodes of both sites.
    listed = {"prefill"} if role == "pd" else {"pd", "prefill"}
    assert {each.cluster for each in written.values()} == listed
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
    for text in config(objects, "pools").values():
        assert "kubernetes" not in tomllib.loads(text)["membership"]


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
    role: str, certificates: str, mode: str, tmp_path: Path
) -> None:
    both = {"pd", "prefill"}
    files = config(rendered(role, site(role, certificates, mode)), "pools")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        deployment = load_deployment(tmp_path / name)
        assert list(deployment.pools) == [name.removesuffix(".toml")], "others come and go"
        clusters = peer_clusters(deployment, name.removesuffix(".toml"))
        assert clusters.targets == ({"pd"} if role == "pd" else both)
        assert clusters.sources == (both if role == "pd" else {"prefill"})
        assert (deployment.membership.kubernetes is not None) == (role == "pd")


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


def test_another_host_of_a_prfaas_site_restarts_nothing_and_is_a_peer_of_the_others() -> None:
    hosts = [host("far-a", "n"), host("far-b", "m")]
    before = rendered("prfaas", {"hosts": hosts})
    after = rendered("prfaas", {"hosts": [*hosts, host("far-c", "o")]})
    old, new = dict(pod_templates(before)), dict(pod_templates(after))
    assert len(new.keys() - old.keys()) == 2
    assert {name for name in old if old[name] != new[name]} <= {"prefill-prfaas-test"}
    pools = {each.name for each in written_members(after).values() if each.cluster == "prefill"}
    assert pools == {"far-a", "far-b", "far-c"}
    assert {each.kind for each in written_members(after).values()} == {MemberKind.POOL}


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
    pools = {each.name for each in sliced_members(objects) if each.kind is MemberKind.POOL}
    assert pools == {"pd-a", "pd-b"}
    roles = {
        each.name: each.role for each in sliced_members(objects) if each.kind is MemberKind.ENGINE
    }
    assert roles == {"pd-a-0": "prefill", "pd-b-0": "decode"}
    file = tomllib.loads(config(objects, "gateway")["deployment.toml"])
    assert file["clusters"]["pd"]["has_roles"]
    assert not tomllib.loads(config(rendered("pd"), "gateway")["deployment.toml"])["clusters"][
        "pd"
    ].get("has_roles")
