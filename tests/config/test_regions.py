"""Regions of clusters, storage and tenants in a deployment file."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prfaas.config.deployment import Deployment
from prfaas.core.transfer.residency import EVERYWHERE

KEY = "sha256:" + "0" * 64
BUCKET = {"bucket": "blocks", "keys": "keys", "limit": "1GiB"}
STORE = {"master": "127.0.0.1:1", "keys": "keys"}


def deployment(
    pd: dict[str, Any], far: dict[str, Any], regions: list[str] | None = None
) -> Deployment:
    return Deployment.model_validate(
        {
            "model": {"name": "timing-m", "path": "m"},
            "routing": {"offload_threshold": 1},
            "security": {"identities": "."},
            "clusters": {
                "pd": {"role": "pd", **_cluster("a", pd)},
                "far": {"role": "prfaas", **_cluster("b", far)},
            },
            "tenants": {
                "limited": {"keys": [KEY], **({} if regions is None else {"regions": regions})},
                "free": {"keys": [KEY[:-1] + "1"]},
            },
        }
    )


def _cluster(name: str, table: dict[str, Any]) -> dict[str, Any]:
    pool = {"disk": "d", "disk_limit": "1GiB", **table.get("pool", {})}
    engines = {f"e-{name}": {"pool": f"p-{name}"}}
    return {
        "pools": {f"p-{name}": pool},
        "engines": engines,
        **{k: v for k, v in table.items() if k != "pool"},
    }


def test_without_regions_nobody_is_limited() -> None:
    found = deployment({}, {}).residency
    assert found == EVERYWHERE
    assert not found.bars("limited", "far")
    assert not found.allowed("limited")


@pytest.mark.parametrize(
    ("far", "footprint"),
    [
        ({}, {"us"}),
        ({"pool": {"region": "ca"}}, {"us", "ca"}),
        ({"pool": {"disk_region": "uk"}}, {"us", "uk"}),
        ({"s3": {**BUCKET, "data_region": "ap"}}, {"us", "ap"}),
        ({"mooncake": STORE}, {"us"}),
        ({"mooncake": {**STORE, "data_region": "ap"}}, {"us", "ap"}),
    ],
)
def test_a_cluster_is_in_the_regions_of_its_hosts_and_its_storage(
    far: dict[str, Any], footprint: set[str]
) -> None:
    found = deployment({"region": "eu"}, {"region": "us", **far}).residency
    assert found.clusters == {"pd": {"eu"}, "far": footprint}


@pytest.mark.parametrize("storage", [{"disk_region": "us"}, {"region": "us"}])
def test_a_disk_or_host_elsewhere_keeps_a_tenant_from_its_cluster(storage: dict[str, Any]) -> None:
    table = deployment({"region": "eu"}, {"region": "eu", "pool": storage}, ["eu"])
    found = table.residency
    assert found.bars("limited", "far")
    assert found.outside("limited", "far") == {"us"}
    assert not found.bars("free", "far")
    assert found.allowed("free") == {"eu", "us"} == table.gateway_regions


def test_gateways_sign_for_no_region_that_all_tenants_exclude() -> None:
    table = deployment({"region": "eu"}, {"region": "us"}, ["eu"])
    assert table.gateway_regions == {"eu", "us"}
    only = table.model_copy(update={"tenants": {"limited": table.tenants["limited"]}})
    assert only.gateway_regions == {"eu"}


@pytest.mark.parametrize(
    ("pd", "far", "regions", "words"),
    [
        ({"region": "eu"}, {"region": "us"}, [], "tenants.limited.regions is empty"),
        (
            {"region": "eu"},
            {"region": "us"},
            ["eu", "mars"],
            "tenants.limited.regions: 'mars' is the region of no cluster; known are eu, us",
        ),
        (
            {"region": "eu"},
            {"region": "us"},
            ["us"],
            "tenants.limited.regions allows us: it can be ",
        ),
        (
            {"region": "eu", "pool": {"disk_region": "us"}},
            {"region": "us"},
            ["eu"],
            "blocks of the PD cluster pd rest in us too",
        ),
        ({"region": "eu"}, {}, ["eu"], "clusters.far.region is missing"),
        ({"region": "eu"}, {"region": "us", "s3": BUCKET}, None, "far.s3.data_region is missing"),
        ({}, {}, ["eu"], "tenants.limited.regions: no cluster has a region"),
        ({}, {"pool": {"region": "eu"}}, None, "clusters.far.pools.p-b.region: no cluster has"),
        ({}, {"mooncake": {**STORE, "data_region": "eu"}}, None, "far.mooncake.data_region: no cl"),
        ({"region": "Europe"}, {"region": "us"}, None, "region"),
        (
            {"region": "eu"},
            {"region": "us", "pool": {"disk": None, "disk_limit": None, "disk_region": "us"}},
            None,
            "disk_region is given without `disk`",
        ),
    ],
)
def test_a_policy_that_cannot_hold_is_refused_with_its_key(
    pd: dict[str, Any], far: dict[str, Any], regions: list[str] | None, words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        deployment(pd, far, regions)


def test_more_regions_than_a_ticket_names_are_refused() -> None:
    pools = {f"p-{n}": {"region": f"r-{n}"} for n in range(17)}
    engines = {"e": {"pool": "p-0"}}
    with pytest.raises(ValidationError, match="the limit is 16"):
        Deployment.model_validate(
            {
                "model": {"name": "m", "path": "m"},
                "routing": {"offload_threshold": 1},
                "security": {"identities": "."},
                "clusters": {
                    "pd": {"role": "pd", "region": "eu", "pools": pools, "engines": engines}
                },
            }
        )


def test_pages_without_tickets_are_refused_where_only_ticketed_blocks_are_kept() -> None:
    """SGLang passes nothing of a request to its storage: each hand-off would move nothing."""
    pages = {"timing": {"plan": "plan.toml", "hash_scheme": "sglang_pages"}}
    with pytest.raises(ValidationError, match=r"far.timing.hash_scheme: pages .* without the tick"):
        deployment({"region": "eu"}, {"region": "us", **pages})
    assert not deployment({}, pages).residency.all
    assert deployment({"region": "eu", **pages}, {"region": "us"}).residency.all == {"eu", "us"}
