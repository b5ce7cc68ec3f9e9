"""Values that make no sense end `helm template` with their key in the message."""

from typing import Any

import pytest

from .charts import DISK, MOONCAKE, S3, Object, host, hosts, in_regions, template

POOL: Object = {"name": "other-a", "address": "a.other.example.net:7100"}
ENGINE: Object = {"name": "other-a-0", "pool": "other-a", "url": "https://a.other.example.net:8100"}
PEM = "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n"


def peer(**changes: Any) -> Object:
    """Values of a PD site with one peer, as it should be but for some keys; None leaves one out."""
    whole = {"name": "other", "cidrs": ["10.0.0.0/8"], "pools": [POOL], "engines": [ENGINE]}
    return {"site": {"peers": [{k: v for k, v in (whole | changes).items() if v is not None}]}}


A, B = {"name": "e-a"}, {"name": "e-b"}
FORMS: list[tuple[Object, str]] = [
    ({"site": {"role": "both"}}, "site.role"),
    ({"site": {"name": "PD"}}, "site.name"),
    ({"site": {"ca": "MIIB"}}, "site.ca"),
    ({"model": {"name": ""}}, "model.name"),
    ({"hosts": []}, "hosts"),
    (hosts({"name": "pd-a", "node": "n", "engines": []}), "hosts.0.engines"),
    (hosts({"name": "pd_a", "node": "n", "engines": [A]}), "hosts.0.name"),
    ({"pool": {"memory": "256GB"}}, "pool.memory"),
    ({"pool": {"memory": 1024}}, "pool.memory"),
    ({"pool": {"mode": "StatefulSet"}}, "pool.mode"),
    ({"pool": {"port": 70000}}, "pool.port"),
    ({"pool": {"s3": S3 | {"endpoint": "http://s3.example.net"}}}, "pool.s3.endpoint"),
    ({"pool": {"s3": S3 | {"bucket": "KV"}}}, "pool.s3.bucket"),
    ({"pool": {"s3": S3 | {"deadline": "1 second"}}}, "pool.s3.deadline"),
    ({"pool": {"s3": S3 | {"objectSize": "16MB"}}}, "pool.s3.objectSize"),
    ({"pool": {"s3": S3 | {"dataRegion": "EU"}}}, "pool.s3.dataRegion"),
    ({"pool": {"mooncake": MOONCAKE | {"master": "mooncake"}}}, "pool.mooncake.master"),
    ({"pool": {"mooncake": MOONCAKE | {"replicas": 9}}}, "pool.mooncake.replicas"),
    ({"pool": {"mooncake": MOONCAKE | {"protocol": "nvlink"}}}, "pool.mooncake.protocol"),
    ({"pool": {"mooncake": MOONCAKE | {"metadata": "none"}}}, "pool.mooncake.metadata"),
    ({"pool": {"mooncake": MOONCAKE | {"devices": "a b"}}}, "pool.mooncake.devices"),
    ({"pool": {"mooncake": MOONCAKE | {"key": "k"}}}, "key"),
    ({"pool": {"disk": DISK | {"keysSecret": "Disk_Keys"}}}, "pool.disk.keysSecret"),
    ({"pool": {"disk": DISK | {"sealed": "no"}}}, "pool.disk.sealed"),
    ({"site": {"region": "EU West"}}, "site.region"),
    ({"gateway": {"regions": "eu"}}, "gateway.regions"),
    ({"engines": {"kind": "Pod"}}, "engines.kind"),
    ({"gateway": {"replicas": 0}}, "gateway.replicas"),
    ({"gateway": {"operatorKey": {"hashes": ["sk-prfaas-mine"]}}}, "gateway.operatorKey.hashes.0"),
    ({"gateway": {"replica": 3}}, "replica"),
    ({"certificates": {"source": "vault"}}, "certificates.source"),
    ({"podSecurity": {"user": 0}}, "podSecurity.user"),
    ({"image": {"digest": "latest"}}, "image.digest"),
    (peer(region="U.S."), "site.peers.0.region"),
    (peer(pools=[]), "site.peers.0.pools"),
    (peer(pools=[POOL | {"budget": "fast"}]), "site.peers.0.pools.0.budget"),
    (peer(cidrs=["everywhere"]), "site.peers.0.cidrs.0"),
    ({"gateways": {}}, "gateways"),
]
"""Refused by the schema."""
SENSE: list[tuple[Object, str]] = [
    (peer(engines=None), "site.peers[0].engines: missing"),
    (peer(gateways=["gateway"]), "site.peers[0].gateways: PrfaaS sites have no gateway"),
    (peer(cidrs=[]), "site.peers[0].cidrs: empty"),
    (peer(name="pd"), 'site.peers[0].name: "pd" is this site'),
    (peer(ca=PEM), "site.ca: missing beside site.peers[].ca"),
    (peer(engines=[ENGINE | {"pool": "nobody"}]), 'engines[0].pool: "nobody" is none of'),
    (peer(pools=[{"name": "other-a"}]), "site.peers[0].pools[0].address: missing"),
    (peer(engines=[{"name": "x", "pool": "other-a"}]), "site.peers[0].engines[0].url: missing"),
    (
        peer(pools=[POOL | {"name": "pd-a"}], engines=[ENGINE | {"pool": "pd-a"}]),
        '2 parts are called "pd-a"',
    ),
    (hosts(host("pd-a", "", A)), "hosts[0].node: missing"),
    (hosts(host("pd-a", "n", A), host("pd-b", "n", B)), 'hosts[1].node: "n" is another'),
    (hosts(host("pd-a", "n", A, A)), '2 parts are called "e-a"'),
    (hosts(host("gateway", "n", A)), '2 parts are called "gateway"'),
    (hosts(host("pd-a" * 15, "n", A)), "at most 63 are allowed"),
    (
        {**hosts(host("pd-a", "", A, B)), "pool": {"mode": "Sidecar"}},
        "hosts[0].engines: there are 2",
    ),
    (
        hosts(host("pd-a", "n", A | {"role": "prefill"})),
        'hosts[].engines[].role: all are "prefill"',
    ),
    (hosts(host("pd-a", "n", A | {"role": "prefill"}, B)), 'role: some are "both"'),
    ({"gateway": {"salt": {"existingSecret": ""}}}, "gateway.salt.existingSecret: missing"),
    ({"gateway": {"pdb": {"minAvailable": 2}}}, "gateway.pdb.minAvailable: 2 of 2 replicas"),
    ({"gateway": {"route": {"kind": "HTTPRoute"}}}, "gateway.route.parentRefs: missing"),
    ({"gateway": {"route": {"kind": "Ingress"}}}, "gateway.route.hostnames: missing"),
    ({"gateway": {"autoscaling": {"enabled": True}}}, "monitoring.prometheusUrl: missing"),
    (
        {
            "gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}},
            "monitoring": {"prometheusUrl": "http://p:9090"},
        },
        "gateway.autoscaling.minReplicas: 9 is above maxReplicas, 8",
    ),
    ({"routing": {"offloadThreshold": 0}}, "routing.offloadThreshold: missing"),
    ({"certificates": {"source": "existingSecret"}}, "certificates.existingSecret: missing"),
    ({"certificates": {"issuerRef": {"name": ""}}}, "certificates.issuerRef.name: missing"),
    ({"pool": {"disk": {"limit": "1TiB"}}}, "pool.disk: give limit and hostPath together"),
    ({"pool": {"s3": S3 | {"limit": ""}}}, "pool.s3.limit: missing"),
    ({"pool": {"s3": S3 | {"keysSecret": ""}}}, "pool.s3.keysSecret: missing"),
    ({"pool": {"s3": S3 | {"bucket": ""}}}, "pool.s3.bucket: missing"),
    ({"pool": {"s3": {"credentialsSecret": "s3-user"}}}, "pool.s3.bucket: missing"),
    ({"pool": {"s3": S3 | {"objectSize": "128MiB"}}}, "pool.s3.objectSize: 128MiB; the limits"),
    ({"pool": {"s3": S3 | {"limit": "20MiB"}}}, "pool.s3.limit: 20MiB holds fewer than two"),
    ({"pool": {"disk": DISK | {"keysSecret": ""}}}, "pool.disk.keysSecret: missing; kubectl"),
    ({"pool": {"disk": DISK | {"sealed": False}}}, "pool.disk.sealed: false beside keysSecret"),
    ({"pool": {"disk": {"keysSecret": "disk-keys"}}}, "pool.disk.limit: missing beside"),
    ({"pool": {"mooncake": {"keysSecret": "k"}}}, "pool.mooncake.master: missing"),
    ({"pool": {"mooncake": MOONCAKE | {"keysSecret": ""}}}, "pool.mooncake.keysSecret: missing"),
    ({"pool": {"s3": S3, "mooncake": MOONCAKE}}, "a site has one shared tier"),
    ({"pool": {"mooncake": MOONCAKE | {"devices": "mlx5_0"}}}, "pool.mooncake.devices: devices of"),
    ({"pool": {"mooncake": MOONCAKE | {"buffer": "1MiB"}}}, "pool.mooncake.buffer: 1MiB; the limi"),
    (
        {"pool": {"mooncake": MOONCAKE | {"dataRegion": "eu"}}},
        'pool.mooncake.dataRegion: "eu", and',
    ),
    ({"site": {"region": "eu"}}, "site.peers[0].region: missing"),
    (peer(region="us"), "site.region: missing; site.peers[0].region"),
    (
        {**in_regions("pd", "eu", "us"), "pool": {"s3": S3}},
        "pool.s3.dataRegion: missing",
    ),
    (
        {**in_regions("pd", "eu", "us"), "pool": {"s3": S3 | {"dataRegion": "us"}}},
        'pool.s3.dataRegion: "us", and site.region is "eu"',
    ),
    ({"gateway": {"regions": ["eu"]}}, "gateway.regions: site.region is missing"),
    (
        {**in_regions("pd", "eu", "us"), "gateway": {"regions": ["us"]}},
        'gateway.regions: "eu", the site\'s own, is missing',
    ),
    ({"engines": {"image": ""}}, "engines.image: missing"),
    ({"engines": {"server": "timing"}}, "model.name: "),
    ({"engines": {"args": ["--nnodes", "2"]}}, 'engines.args[0]: "--nnodes" puts ranks of an'),
    ({"engines": {"args": ["-x", "--headless"]}}, 'engines.args[1]: "--headless" puts ranks of'),
    (
        {"engines": {"args": ["--distributed_executor_backend=ray"]}},
        'engines.args[0]: "--distributed_executor_backend=ray" puts ranks of an engine on several',
    ),
]
"""Well formed, and refused by the templates."""
OF_PRFAAS: list[tuple[Object, str]] = [
    (
        {"site": {"peers": [{"name": "pd", "cidrs": ["10.0.0.0/8"], "pools": [POOL]}]}},
        "site.peers[0].gateways: missing",
    ),
    (
        {
            "site": {
                "peers": [
                    {
                        "name": "pd",
                        "cidrs": ["10.0.0.0/8"],
                        "pools": [POOL],
                        "gateways": ["g"],
                        "engines": [ENGINE],
                    }
                ]
            }
        },
        "site.peers[0].engines: a PrfaaS site reaches no engine of a PD site",
    ),
    ({"gateway": {"route": {"kind": "Ingress"}}}, "gateway.route.kind: "),
    (hosts(host("p", "n", A | {"role": "decode"})), 'hosts[0].engines[0].role: "decode"'),
    ({"pool": {"disk": DISK | {"keysSecret": ""}}}, "pool.disk.keysSecret: missing"),
    ({"site": {"region": "us"}}, "site.peers[0].region: missing"),
]


@pytest.mark.parametrize(("values", "key"), FORMS, ids=[key for _, key in FORMS])
def test_a_value_of_another_form_is_refused_by_its_key(values: Object, key: str) -> None:
    done = template("pd", values)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
    assert key in done.stderr


@pytest.mark.parametrize(("values", "line"), SENSE, ids=[line[:40] for _, line in SENSE])
def test_values_that_make_no_sense_are_refused_by_their_key(values: Object, line: str) -> None:
    done = template("pd", values)
    assert done.returncode != 0
    assert line in done.stderr


def test_ranks_on_one_host_are_not_refused() -> None:
    args = ["--nnodes", "1", "--distributed-executor-backend", "mp", "--data-parallel-backend=mp"]
    done = template("pd", {"engines": {"args": args}})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("values", "line"), OF_PRFAAS, ids=[line[:40] for _, line in OF_PRFAAS])
def test_what_a_prfaas_site_can_not_have_is_refused(values: Object, line: str) -> None:
    done = template("prfaas", values)
    assert done.returncode != 0
    assert line in done.stderr
