"""PrfaaS engines without cores of their own, as a deployment file shows them."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.config.deployment import Deployment
from prfaas.config.engines import cores
from prfaas.config.engines.cores import within


def deployment(pd: dict[str, Any], far: dict[str, Any], **cluster: Any) -> Deployment:
    """One engine in each cluster, with these keys; `cluster`: further keys of the PrfaaS one."""
    clusters = {
        name: {
            "role": role,
            "pools": {f"{name}-pool": {}},
            "engines": {f"{name}-engine": {"pool": f"{name}-pool", **engine}},
        }
        for name, role, engine in (("home", "pd", pd), ("far", "prfaas", far))
    }
    clusters["far"] |= cluster
    return Deployment.model_validate(
        {
            "model": {"name": "timing", "path": "/m"},
            "routing": {"offload_threshold": 1000},
            "security": {"identities": "identities"},
            "clusters": clusters,
        }
    )


def cpus(value: str) -> dict[str, str]:
    return {"cpus": value}


SHARED = {"far-engine": frozenset({"home-engine"})}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "runs_on_cpu", lambda: True)


@pytest.mark.parametrize(
    ("pd", "far"),
    [
        (cpus("0-1"), cpus("0-1")),
        (cpus("0-3"), cpus("2,1")),
        (cpus("0|1"), cpus("1")),
        (cpus("auto"), cpus("nobind")),
        (cpus("auto"), cpus("7")),
        (cpus("0"), {"env": {"VLLM_CPU_OMP_THREADS_BIND": "0"}}),
        ({"env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "cpus": "0"}, cpus("3")),
    ],
)
def test_an_engine_whose_cores_are_all_of_the_pd_engine_adds_none(
    pd: dict[str, Any], far: dict[str, Any]
) -> None:
    assert within(deployment(pd, far)) == SHARED


@pytest.mark.parametrize(
    ("pd", "far"),
    [
        (cpus("0"), cpus("1")),
        (cpus("0"), cpus("0-1")),
        (cpus("0"), cpus("auto")),
        ({}, {}),
        (cpus("0"), {}),
        (cpus("0-1"), cpus("0-1") | {"url": "http://10.0.0.1:8000"}),
        (cpus("0-1") | {"url": "http://10.0.0.1:8000"}, cpus("0-1")),
        (cpus("0-1"), cpus("one")),
        (cpus("one"), cpus("0")),
    ],
)
def test_an_engine_with_another_core_or_elsewhere_adds_some(
    pd: dict[str, Any], far: dict[str, Any]
) -> None:
    assert within(deployment(pd, far)) == {}


def test_engines_on_gpus_and_timing_engines_share_no_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert within(deployment(cpus("0"), cpus("0"), timing={"plan": "plan.toml"})) == {}
    monkeypatch.setattr(cores, "runs_on_cpu", lambda: False)
    assert within(deployment(cpus("0"), cpus("0"))) == {}
