"""Both sites, as the chart renders them, run on this machine and serve requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from prfaas.wire.identity import identity_in, make_authority, make_identity
from tests.deployments import started

from .charts import DISK, MANAGED, SECRETS, Object, rendered
from .local_pods import Cluster

pytestmark = pytest.mark.timeout(300)
MODEL = "prfaas-timing"
REQUESTS = 20
SHORT, LONG = 300, 3000
"""Tokens; the threshold is between them."""
PLAN = "/opt/prfaas/examples/plan/paper-case-study.toml"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Content of the volume with models: timing engines need a tokenizer only."""
    folder = tmp_path_factory.mktemp("models") / "timing"
    make = [sys.executable, "-W", "ignore", "-m", "prfaas.engines.checkpoint", "--tokenizer-only"]
    subprocess.run([*make, str(folder)], check=True, timeout=120)
    return folder.parent


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short name: sockets of pool nodes lie in it."""
    with tempfile.TemporaryDirectory(prefix="prfaas") as folder:
        yield Path(folder)


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


async def run_both(home: Cluster, away: Cluster) -> None:
    """Start both sites, send requests to every gateway, and run both `helm test`s."""
    async with home.api_server(), away.api_server():
        await serve_both(home, away)
        assert set(home.api.tokens) == {"Bearer a-token"}
        assert not away.api.tokens, "a PrfaaS site needs no API server"


async def serve_both(home: Cluster, away: Cluster) -> None:
    places = home.places() | away.places()
    parts = [*home.parts(places), *away.parts(places)]
    of_kind = {kind: [p for p in parts if p.kind == kind] for kind in ("pool", "engine", "gateway")}
    async with started([of_kind["pool"], of_kind["engine"] + of_kind["gateway"]]):
        urls = [part.whole_url.removesuffix("/health") for part in of_kind["gateway"]]
        assert len(urls) == 2
        ready = len(of_kind["engine"])
        await asyncio.gather(*(until_known(url, ready) for url in urls))
        await asyncio.gather(*map(until_whole, urls))
        found = await asyncio.gather(
            *(
                served(urls[number % 2], number, LONG if number % 4 < 2 else SHORT)
                for number in range(REQUESTS)
            )
        )
        assert sum([await moved_bytes(url) for url in urls]) > 0
        paths = [path for path, _ in found]
        assert [end for _, end in found] == ["length"] * REQUESTS
        assert paths.count("remote") == paths.count("local") == REQUESTS // 2
        for cluster in (home, away):
            test = cluster.test_command(places)
            done = await asyncio.to_thread(
                subprocess.run, test, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout
            assert "failed" not in done.stdout


async def test_two_sites_with_a_pool_node_a_host_and_an_issuer_each(
    checkpoint: Path, home: Path
) -> None:
    """Certificates as cert-manager makes them, of two authorities that know each other.

    The sites are in two regions, which certificates name, and blocks on disk are sealed.
    """
    authorities = {name: home / f"ca-{name}" for name in ("pd", "prefill")}
    for directory in authorities.values():
        make_authority(directory)
    ca = {name: (path / "ca.pem").read_text() for name, path in authorities.items()}
    hosts = [
        {"name": f"pd-{host}", "node": f"gpu-{host}", "engines": [{"name": f"pd-{host}-0"}]}
        for host in "ab"
    ]
    more = {"certificates": MANAGED}
    salt = {"prfaas-salt": {"tenant.salt": secrets.token_hex(32).encode()}}
    claims = {"models": checkpoint}
    pd_values = located(pd("DaemonSet", hosts, ca, **more), "eu", "us")
    far_values = located(prefill("DaemonSet", ["pd-a", "pd-b"], ca, **more), "us", "eu")
    keys = {"disk-keys": {"site.keys": base64.b64encode(secrets.token_bytes(32))}}
    here = Cluster(rendered("pd", pd_values), home / "pd", salt | keys, claims, authorities["pd"])
    away = Cluster(
        rendered("prfaas", far_values), home / "prefill", dict(keys), claims, authorities["prefill"]
    )
    await run_both(here, away)
    assert (regions_on_disks(here), regions_on_disks(away)) == ({"eu"}, {"us"})


async def test_two_sites_with_sidecars_and_identities_of_prfaas_identity(
    checkpoint: Path, home: Path
) -> None:
    authority = home / "identities"
    make_authority(authority)
    files = {"ca.pem": (authority / "ca.pem").read_bytes()}
    for name in ("gateway", "pd-a", "prefill-a"):
        make_identity(authority, name)
        identity = identity_in(authority, name)
        for path in (identity.certificate, identity.key):
            files[path.name] = path.read_bytes()
    ca = {"pd": "", "prefill": ""}
    held = {"prfaas-identities": files}
    salt = {"prfaas-salt": {"tenant.salt": secrets.token_hex(32).encode()}}
    claims = {"models": checkpoint}
    hosts = [{"name": "pd-a", "engines": [{"name": "pd-a-0"}]}]
    more = {"certificates": SECRETS}
    pd_site = rendered("pd", pd("Sidecar", hosts, ca, **more))
    away = rendered("prfaas", prefill("Sidecar", ["pd-a"], ca, **more))
    await run_both(
        Cluster(pd_site, home / "pd", held | salt, claims, authority),
        Cluster(away, home / "prefill", dict(held), claims, authority),
    )


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    """Let two ends meet in memory.

    Raises:
        ssl.SSLError: One does not accept the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(3):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    # A server refuses a client after the client's last word.
    with contextlib.suppress(ssl.SSLWantReadError):
        ends[0].read(1)


def test_an_engine_of_a_prfaas_site_and_the_gateway_accept_each_other_by_name(home: Path) -> None:
    """vLLM asks for a certificate, and the gateway compares the name in its URL."""
    authorities = {name: home / f"ca-{name}" for name in ("pd", "prefill")}
    for directory in authorities.values():
        make_authority(directory)
    both = "".join((path / "ca.pem").read_text() for path in authorities.values())
    (home / "ca.pem").write_text(both)
    held: dict[str, dict[str, bytes]] = {}
    for role, site in (("pd", "pd"), ("prfaas", "prefill")):
        objects = rendered(role, {"certificates": MANAGED})
        held |= Cluster(objects, home / site, {}, {}, authorities[site]).secrets
    ends = []
    for name in ("pd-prfaas-gateway", "prefill-prfaas-prefill-a-0"):
        for file, ending in (("tls.crt", "pem"), ("tls.key", "key")):
            (home / f"{name}.{ending}").write_bytes(held[f"{name}-identity"][file])
        ends.append(identity_in(home, name))
    gateway, engine = ends
    client, server = gateway.client_context(), engine.server_context()
    client.check_hostname = True
    handshake(client, server, "prefill-a-0.prefill.example.net")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(client, server, "prefill-a-1.prefill.example.net")
    stranger = ssl.create_default_context(cafile=str(home / "ca.pem"))
    with pytest.raises(ssl.SSLError, match=r"(?i)did.not.return.a.certificate"):
        handshake(stranger, server, "prefill-a-0.prefill.example.net")
