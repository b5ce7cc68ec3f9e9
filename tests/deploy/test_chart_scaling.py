"""Engines that KEDA scales: bounds, members under the names of their pods, and refusals."""

import json

import pytest

from prfaas.membership.endpoint_slices import members_in, read_slice
from tests.membership.fake_api import endpoint, endpoint_slice

from .charts import (
    PROMETHEUS,
    SCALED,
    SCALED_SITE,
    Object,
    containers,
    host,
    hosts,
    of_kind,
    rendered,
    template,
)


def test_a_scaled_engine_is_a_stateful_set_between_two_bounds() -> None:
    objects = rendered("pd", SCALED_SITE)
    sets, scaled = of_kind(objects, "StatefulSet"), of_kind(objects, "ScaledObject")
    targets = [each["spec"]["scaleTargetRef"] for each in scaled]
    names = [each["metadata"]["name"] for each in sets]
    assert targets == [{"kind": "StatefulSet", "name": name} for name in names]
    assert all("replicas" not in each["spec"] for each in sets)
    bounds = [(each["spec"]["minReplicaCount"], each["spec"]["maxReplicaCount"]) for each in scaled]
    assert bounds == [(1, 6), (2, 6)]
    (query,) = {each["spec"]["triggers"][0]["metadata"]["query"] for each in scaled}
    wanted = 'sum(prfaas_prefill_backlog_seconds{namespace="prfaas", cluster="pd"}) / 2'
    assert query == wanted
    services = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    assert {each["spec"]["serviceName"] for each in sets} <= services


def test_scaled_engines_are_members_under_the_names_of_their_pods() -> None:
    objects = rendered("pd", SCALED_SITE)
    (workload, _) = of_kind(objects, "StatefulSet")
    (engine,) = containers(workload["spec"]["template"])
    assert {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in (
        engine["env"]
    )
    (transfer,) = [arg for arg in engine["args"] if arg.startswith("--kv-transfer-config=")]
    extra = json.loads(transfer.partition("=")[2])["kv_connector_extra_config"]
    assert extra["prfaas_engine"] == "$(POD_NAME)"
    name = workload["metadata"]["name"]
    (service,) = [o for o in of_kind(objects, "Service") if o["metadata"]["name"] == name]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    pods = [endpoint(f"{name}-{number}", f"10.0.0.{number}") for number in range(3)]
    found = endpoint_slice(name, service["metadata"]["labels"], ports, *pods)
    listed, refused = members_in([read_slice(found)])
    assert not refused
    assert [each.member.name for each in listed] == [f"{name}-{number}" for number in range(3)]
    assert {(each.member.pool, each.member.role) for each in listed} == {("pd-a", "prefill")}


def test_requests_of_a_replica_end_before_it_is_stopped() -> None:
    (workload, _) = of_kind(rendered("pd", SCALED_SITE), "StatefulSet")
    pod = workload["spec"]["template"]["spec"]
    (engine,) = containers(workload["spec"]["template"])
    (_, seconds) = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert int(seconds) < pod["terminationGracePeriodSeconds"]


ONE = {**hosts(host("pd-a", "n", SCALED)), **PROMETHEUS}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (hosts(host("pd-a", "n", SCALED)), "monitoring.prometheusUrl: missing; hosts[0]"),
        (ONE | {"pool": {"mode": "Sidecar"}}, "engines[0].maxReplicas: with pool.mode Sidecar"),
        (ONE | {"engines": {"kind": "LeaderWorkerSet"}}, 'engines.kind is "LeaderWorkerSet"'),
        (ONE | {"membership": {"endpointSlices": False}}, "maxReplicas: gateways learn of scaled"),
        (ONE | hosts(host("a", "n", SCALED | {"minReplicas": 7})), "minReplicas: 7 is above max"),
        (ONE | hosts(host("a", "n", {"name": "p", "minReplicas": 2})), "maxReplicas: missing"),
        (ONE | {"engines": {"stopSeconds": 60}}, "drainSeconds: 60 is not below"),
        (
            ONE | hosts(host("a", "n", SCALED | {"role": "decode"}, {"name": "q"})),
            "engines[0].maxReplicas: engines are scaled by their prefill work",
        ),
        (ONE | hosts(host("a", "n", SCALED | {"maxReplicas": 0})), "maxReplicas"),
    ],
)
def test_scaling_that_cannot_work_is_refused(values: Object, message: str) -> None:
    done = template("pd", values)
    assert done.returncode != 0
    assert message in done.stderr


def test_engines_of_a_prfaas_site_are_not_scaled() -> None:
    done = template("prfaas", ONE)
    assert "each has a certificate; give each an entry" in done.stderr
