"""Values of two small sites that belong together, and requests to them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
import subprocess
import sys
from pathlib import Path

import aiohttp

from prfaas.wire.identity import make_authority

from .charts import DISK, MANAGED, Object, rendered
from .local_pods import Cluster

MODEL = "prfaas-timing"
REQUESTS = 20
SHORT, LONG = 300, 3000
"""Tokens; the threshold is between them."""
PLAN = "/opt/prfaas/examples/plan/paper-case-study.toml"


def tokenizer(folder: Path) -> Path:
    """Make the content of the volume with models: timing engines need a tokenizer only."""
    make = [sys.executable, "-W", "ignore", "-m", "prfaas.engines.checkpoint", "--tokenizer-only"]
    subprocess.run([*make, str(folder / "timing")], check=True, timeout=120)
    return folder


def values(role: str, mode: str) -> Object:
    """Values of both sites' examples that differ here: small, and engines that compute nothing."""
    return {
        "model": {
            "name": MODEL,
            "path": "/models/timing",
            "volume": {"persistentVolumeClaim": {"claimName": "models"}},
        },
        "pool": {"mode": mode, "memory": "64MiB"},
        "engines": {
            "server": "timing",
            "hostMemory": "32MiB",
            "timing": {
                "plan": PLAN,
                "cluster": "prfaas" if role == "prfaas" else "",
                "timeScale": 0.02,
                "bytesScale": 0.001,
                "blockTokens": 256,
            },
        },
    }


def pd(mode: str, hosts: list[Object], ca: dict[str, str], **more: Object) -> Object:
    engines = [
        # Timing engines have no TLS.
        {"name": name, "pool": pool, "url": f"http://{name}.prefill.example.net:8100"}
        for name, pool in (("prefill-a-0", "prefill-a"),)
    ]
    peer: Object = {"name": "prefill", "address": "prefill.example.net", "cidrs": ["10.0.0.0/8"]}
    peer |= {"pools": [{"name": "prefill-a"}], "engines": engines, "ca": ca["prefill"]}
    site = {"ca": ca["pd"], "peers": [peer]}
    settings = '[routing]\npolicy = "paper"\ntransfer_timeout = "60s"\n'
    gateway = {"settings": settings, "replicas": 2, "salt": {"existingSecret": "prfaas-salt"}}
    threshold = {"offloadThreshold": (SHORT + LONG) // 2}
    return {
        **values("pd", mode),
        "site": site,
        "hosts": hosts,
        "gateway": gateway,
        "routing": threshold,
        **more,
    }


def prefill(mode: str, hosts: list[str], ca: dict[str, str], **more: Object) -> Object:
    peer: Object = {"name": "pd", "address": "pd.example.net", "cidrs": ["10.0.0.0/8"]}
    peer |= {"gateways": ["gateway"], "pools": [{"name": name} for name in hosts], "ca": ca["pd"]}
    here = [{"name": "prefill-a", "node": "gpu-1", "engines": [{"name": "prefill-a-0"}]}]
    return {
        **values("prfaas", mode),
        "site": {"ca": ca["prefill"], "peers": [peer]},
        "hosts": here,
        **more,
    }


def located(values: Object, own: str, other: str) -> Object:
    """Give the sites regions, and the pool nodes disks that are sealed with a key of the site."""
    (peer,) = values["site"]["peers"]
    site = values["site"] | {"region": own, "peers": [peer | {"region": other}]}
    return {**values, "site": site, "pool": values["pool"] | {"disk": DISK | {"limit": "64MiB"}}}


def regions_on_disks(cluster: Cluster) -> set[str]:
    """Regions in the folders of the pool nodes' disks."""
    return {file.read_text().strip() for file in cluster.home.glob("node-*/nvme/prfaas/*/regions")}


def two_issued_sites(
    home: Path, checkpoint: Path, store: Object | None = None
) -> tuple[Cluster, Cluster]:
    """A PD site of two hosts and a PrfaaS site, in two regions, with sealed disks.

    Certificates are as cert-manager makes them, of two authorities that know each other.

    Args:
        home: Folder for everything.
        checkpoint: Content of the volume with models.
        store: Values of the PD site's Mooncake Store, if it has one.
    """
    authorities = {name: home / f"ca-{name}" for name in ("pd", "prefill")}
    for directory in authorities.values():
        make_authority(directory)
    ca = {name: (path / "ca.pem").read_text() for name, path in authorities.items()}
    hosts = [
        {"name": f"pd-{host}", "node": f"gpu-{host}", "engines": [{"name": f"pd-{host}-0"}]}
        for host in "ab"
    ]
    salt = {"prfaas-salt": {"tenant.salt": secrets.token_hex(32).encode()}}
    keys = {
        name: {"site.keys": base64.b64encode(secrets.token_bytes(32))}
        for name in ("disk-keys", "site-keys")
    }
    claims = {"models": checkpoint}
    pd_values = located(pd("DaemonSet", hosts, ca, certificates=MANAGED), "eu", "us")
    if store is not None:
        pd_values["pool"] = pd_values["pool"] | {"mooncake": store}
    far = prefill("DaemonSet", ["pd-a", "pd-b"], ca, certificates=MANAGED)
    far_objects = rendered("prfaas", located(far, "us", "eu"))
    return (
        Cluster(rendered("pd", pd_values), home / "pd", salt | keys, claims, authorities["pd"]),
        Cluster(far_objects, home / "prefill", dict(keys), claims, authorities["prefill"]),
    )


async def served(url: str, number: int, tokens: int) -> tuple[str, str]:
    """Send a request; return the path it took and its answer's end."""
    prompt = [(number * 7919 + at) % 300 + 1 for at in range(tokens)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/completions", json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()
        answer = await reply.json()
        return reply.headers["X-Prfaas-Path"], answer["choices"][0]["finish_reason"]


async def moved_bytes(url: str) -> float:
    """KV cache that arrived for the requests of a gateway."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
        page = await reply.text()
    return sum(map(float, re.findall(r"^prfaas_kv_bytes_total\{.*\} (.+)$", page, re.MULTILINE)))


async def until_known(url: str, engines: int) -> None:
    """Wait until a gateway has found the engines of both sites."""
    known = re.compile(r'^prfaas_members\{kind="engine",state="ready"\} (\d+)', re.MULTILINE)
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/metrics") as reply:
                    if [str(engines)] == known.findall(await reply.text()):
                        return
            await asyncio.sleep(0.1)


async def until_whole(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/health?full=1") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.1)


async def until_stored(cluster: Cluster) -> None:
    """Wait until the pool nodes of a site have written blocks to their shared tier."""
    stored = re.compile(
        r'^prfaas_pool_shared_requests_total\{operation="write",outcome="ok"\} (\S+)', re.MULTILINE
    )
    urls = [
        f"http://127.0.0.1:{pod.ports[7180]}/metrics" for pod in cluster.pods if 7180 in pod.ports
    ]
    async with aiohttp.ClientSession() as session:
        while True:
            pages = []
            for url in urls:
                async with session.get(url) as reply:
                    pages.append(await reply.text())
            if sum(float(count) for page in pages for count in stored.findall(page)) > 0:
                return
            await asyncio.sleep(0.1)
