"""Deployment files of pool nodes, as the chart writes them: tiers, their keys, and regions."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli.parts.pool_command import pool as pool_command
from prfaas.cli.parts.pool_settings import settings_in
from prfaas.config.deployment import Deployment
from prfaas.config.load import load_deployment
from prfaas.config.tiers.mooncake import MooncakeTable
from prfaas.pool.shared.mooncake.settings import MooncakeSettings
from prfaas.pool.shared.settings import S3Settings

from .charts import (
    DISK,
    MOONCAKE,
    S3,
    WHOLE,
    Object,
    config,
    containers,
    in_regions,
    of_every_cell,
    of_kind,
    pod_templates,
    rendered,
    site,
    site_of,
)

CREDENTIALS = "s3-user"
EVERY_INTERFACE = "0.0.0.0"  # noqa: S104 (of a pod)


def pool_containers(objects: list[Object]) -> list[tuple[Object, Object]]:
    """Pods with their containers of pool nodes."""
    return [
        (pod, each)
        for _, pod in pod_templates(objects)
        for each in containers(pod)
        if each["name"] == "pool"
    ]


def deployment_of(objects: list[Object], pod: Object, folder: Path) -> Deployment:
    """The file that a pool node of a pod reads."""
    (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "deployment"]
    (item,) = volume["configMap"]["items"]
    file = folder / item["key"]
    file.write_text(config(objects, "pools")[item["key"]])
    return load_deployment(file)


def settings_of(objects: list[Object], folder: Path) -> list[tuple[Object, Object, dict[str, Any]]]:
    """Settings of every pool node, with its pod and container."""
    found = []
    for pod, container in pool_containers(objects):
        command = pool_command.make_context("pool", list(container["args"])).params
        deployment = deployment_of(objects, pod, folder)
        settings = settings_in(deployment, command["name"], folder)
        found.append((pod, container, settings | {"gateways": command["gateways"]}))
    assert found
    return found


def is_mounted(path: Path, secret: str, pod: Object, container: Object) -> bool:
    """Return True if a file is the key `site.keys` of a Secret, for the pod's user alone."""
    for mount in container["volumeMounts"]:
        if path.parent == Path(mount["mountPath"]):
            (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == mount["name"]]
            items = [{"key": "site.keys", "path": path.name}]
            told = {"secretName": secret, "defaultMode": 0o400, "items": items}
            return bool(volume["secret"] == told and mount["readOnly"])
    return False


@of_every_cell
def test_pool_nodes_read_what_the_values_have(
    role: str, certificates: str, mode: str, tmp_path: Path
) -> None:
    """Disk and bucket, with the keys of each from a Secret that only pool nodes have."""
    objects = site_of(role, certificates, mode)
    for pod, container, found in settings_of(objects, tmp_path):
        assert found["memory_bytes"] == 256 << 30
        assert found["listen"] == (EVERY_INTERFACE, 7100)
        assert found["admin"] == (EVERY_INTERFACE, 7180), "probes come from outside the pod"
        assert found["socket_path"] == Path("/run/prfaas/pool.sock")
        assert found["gateways"] == ("gateway",)
        assert (found["disk"], found["disk_bytes"]) == (Path("/var/lib/prfaas/blocks"), 1 << 40)
        assert is_mounted(found["disk_keys"], "disk-keys", pod, container)
        tier = found["shared"]
        assert isinstance(tier, S3Settings)
        assert (tier.bucket, tier.limit_bytes) == ("kv-blocks", 2 << 40)
        assert tier.prefix == {"pd": "pd", "prfaas": "prefill"}[role]
        assert tier.endpoint == "https://s3.example.net:9000"
        assert is_mounted(tier.keys, "site-keys", pod, container)
        assert container["envFrom"] == [{"secretRef": {"name": CREDENTIALS}}]
    readers = {
        each["name"]
        for _, pod in pod_templates(objects)
        for each in containers(pod)
        if {"site-keys", "disk-keys"} & {m["name"] for m in each.get("volumeMounts", [])}
    }
    assert readers == {"pool"}, "no other part has the keys"


@of_every_cell
def test_pool_nodes_get_the_settings_of_a_mooncake_store(
    role: str, certificates: str, mode: str, tmp_path: Path
) -> None:
    store = MOONCAKE | {"replicas": 2, "protocol": "rdma", "devices": "mlx5_0", "buffer": "4GiB"}
    values = site(role, certificates, mode)
    plain = rendered(role, values)
    values["pool"] |= {"mooncake": store | {"deadline": "500ms"}}
    objects = rendered(role, values)
    for pod, container, found in settings_of(objects, tmp_path):
        tier = found["shared"]
        assert isinstance(tier, MooncakeSettings)
        assert tier.master == ("mooncake.store.svc", 50051)
        assert (tier.replicas, tier.protocol, tier.devices) == (2, "rdma", "mlx5_0")
        assert (tier.buffer_bytes, tier.deadline_ns) == (4 << 30, 5 * 10**8)
        assert is_mounted(tier.keys, "site-keys", pod, container)
    assert memory_of(objects) - memory_of(plain) >= 4096, "the buffer is memory of the pod"


def memory_of(objects: list[Object]) -> int:
    """Smallest memory limit of pool nodes, MiB."""
    limits = [each["resources"]["limits"]["memory"] for _, each in pool_containers(objects)]
    return min(int(limit.removesuffix("Mi")) for limit in limits)


def test_a_store_without_settings_has_the_defaults_of_the_deployment_file(tmp_path: Path) -> None:
    objects = rendered("pd", {"pool": {"mooncake": MOONCAKE}})
    (pod, _), *_ = pool_containers(objects)
    found = deployment_of(objects, pod, tmp_path).clusters["pd"].mooncake
    keys = "/etc/prfaas/site-keys/site.keys"
    told = {"master": MOONCAKE["master"], "keys": keys, "prefix": "pd"}
    assert found == MooncakeTable.model_validate(told)


def test_blocks_on_disk_are_in_the_clear_only_where_the_values_say_so(tmp_path: Path) -> None:
    disk = DISK | {"keysSecret": "", "sealed": False}
    for _, _, found in settings_of(rendered("pd", {"pool": {"disk": disk}}), tmp_path):
        assert found["disk"]
        assert found["disk_keys"] is None
        assert found["own_disk_key"] is None


@pytest.mark.parametrize(("role", "own", "other"), [("pd", "eu", "us"), ("prfaas", "us", "eu")])
def test_regions_are_in_files_and_certificates_alike(
    role: str, own: str, other: str, tmp_path: Path
) -> None:
    values = in_regions(role, own, other)
    pool = {"disk": DISK, "s3": S3 | {"dataRegion": own}}
    objects = rendered(role, {**values, "pool": pool})
    for _, _, found in settings_of(objects, tmp_path):
        assert found["regions"] == {own}
        assert found["shared"].prefix.endswith(f"/in-{own}")
        assert found["needs_grant"] == (role == "prfaas")
    named = {
        each["spec"]["commonName"]: {
            uri.removeprefix("spiffe://prfaas/region/") for uri in each["spec"].get("uris", [])
        }
        for each in of_kind(objects, "Certificate")
    }
    pools = {
        container["args"][1].removeprefix("--name=") for _, container in pool_containers(objects)
    }
    expected = {name: {own} if name in pools else set() for name in named}
    assert named == expected | ({"gateway": {own, other}} if role == "pd" else {})


def test_a_gateway_reads_regions_and_tenants_of_them(tmp_path: Path) -> None:
    """Tenants, their quality and their classes are settings of gateways, as TOML."""
    key = "sha256:" + "1" * 64
    tenants = f'[tenants.clinic]\nkeys = ["{key}"]\nregions = ["eu"]\nquality = "fp8"\n'
    gateway = {"settings": tenants, "regions": ["eu"]}
    values = {**in_regions("pd", "eu", "us"), "gateway": gateway}
    objects = rendered("pd", values)
    for name, text in config(objects, "gateway").items():
        (tmp_path / name).write_text(text)
    read = load_deployment(tmp_path / "deployment.toml", tmp_path / "settings.toml")
    assert read.residency.bars("clinic", "prefill")
    (certificate,) = [
        each for each in of_kind(objects, "Certificate") if each["spec"]["commonName"] == "gateway"
    ]
    assert certificate["spec"]["uris"] == ["spiffe://prfaas/region/eu"]
    assert read.gateway_regions == {"eu"}


def test_a_site_without_regions_names_none() -> None:
    for role in ("pd", "prfaas"):
        objects = rendered(role, {"pool": WHOLE["pool"]})
        assert not [c for c in of_kind(objects, "Certificate") if "uris" in c["spec"]]
        for text in config(objects, "pools").values():
            assert "region" not in str(tomllib.loads(text)["clusters"])


def test_further_arguments_of_pool_nodes_come_after_the_charts_own() -> None:
    more = ["--link-encryption=sealed", "--tracing=http://otel:4318/v1/traces"]
    for _, container in pool_containers(rendered("pd", {"pool": {"args": more}})):
        assert container["args"][-2:] == more
        read = pool_command.make_context("pool", shlex.split(shlex.join(container["args"]))).params
        assert (read["link_encryption"], read["tracing"]) == ("sealed", more[1].partition("=")[2])


def test_a_change_of_one_hosts_memory_restarts_its_pool_node_alone() -> None:
    hosts = [
        {"name": f"pd-{host}", "node": f"gpu-{host}", "engines": [{"name": f"pd-{host}-0"}]}
        for host in "ab"
    ]
    before = dict(pod_templates(rendered("pd", {"hosts": hosts})))
    hosts[0]["memory"] = "128GiB"
    after = dict(pod_templates(rendered("pd", {"hosts": hosts})))
    assert {name for name in before if before[name] != after[name]} == {"pd-prfaas-pd-a"}
