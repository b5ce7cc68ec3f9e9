"""Both sites, as the chart renders them, run on this machine and serve requests."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.wire.identity import identity_in, make_authority, make_identity
from tests.deployments import started
from tests.mooncake.store import missing, running_store

from .charts import MANAGED, SECRETS, rendered
from .local_pods import Cluster
from .rendered_sites import (
    LONG,
    REQUESTS,
    SHORT,
    moved_bytes,
    pd,
    prefill,
    regions_on_disks,
    served,
    tokenizer,
    two_issued_sites,
    until_known,
    until_stored,
    until_whole,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Content of the volume with models: timing engines need a tokenizer only."""
    return tokenizer(tmp_path_factory.mktemp("models"))


@pytest.fixture
def local() -> Iterator[Path]:
    """A folder with a short name: sockets of pool nodes lie in it."""
    with tempfile.TemporaryDirectory(prefix="prfaas") as folder:
        yield Path(folder)


async def run_both(local: Cluster, remote: Cluster, *, is_shared: bool = False) -> None:
    """Start both sites, send requests to every gateway, and run both `helm test`s."""
    async with local.api_server(), remote.api_server():
        await serve_both(local, remote, is_shared=is_shared)
        assert set(local.api.tokens) == {"Bearer a-token"}
        assert not remote.api.tokens, "a PrfaaS site needs no API server"


async def serve_both(local: Cluster, remote: Cluster, *, is_shared: bool) -> None:
    places = local.places() | remote.places()
    parts = [*local.parts(places), *remote.parts(places)]
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
        if is_shared:
            await until_stored(local)
        for cluster in (local, remote):
            test = cluster.test_command(places)
            done = await asyncio.to_thread(
                subprocess.run, test, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout
            assert "failed" not in done.stdout


async def test_two_sites_with_a_pool_node_a_host_and_an_issuer_each(
    checkpoint: Path, local: Path
) -> None:
    here, remote = two_issued_sites(local, checkpoint)
    await run_both(here, remote)
    assert (regions_on_disks(here), regions_on_disks(remote)) == ({"eu"}, {"us"})


@pytest.mark.skipif(bool(missing()), reason=missing() or "there is a client")
async def test_a_site_with_a_mooncake_store(checkpoint: Path, local: Path) -> None:
    """Pool nodes of the PD site write to the store that the values name."""
    with running_store() as store:
        values = {"master": f"127.0.0.1:{store.port}", "keysSecret": "site-keys"}
        here, remote = two_issued_sites(local, checkpoint, values | {"buffer": "16MiB"})
        await run_both(here, remote, is_shared=True)


async def test_two_sites_with_sidecars_and_identities_of_prfaas_identity(
    checkpoint: Path, local: Path
) -> None:
    authority = local / "identities"
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
    remote = rendered("prfaas", prefill("Sidecar", ["pd-a"], ca, **more))
    await run_both(
        Cluster(pd_site, local / "pd", held | salt, claims, authority),
        Cluster(remote, local / "prefill", dict(held), claims, authority),
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


def test_an_engine_of_a_prfaas_site_and_the_gateway_accept_each_other_by_name(local: Path) -> None:
    """vLLM asks for a certificate, and the gateway compares the name in its URL."""
    authorities = {name: local / f"ca-{name}" for name in ("pd", "prefill")}
    for directory in authorities.values():
        make_authority(directory)
    both = "".join((path / "ca.pem").read_text() for path in authorities.values())
    (local / "ca.pem").write_text(both)
    held: dict[str, dict[str, bytes]] = {}
    for role, site in (("pd", "pd"), ("prfaas", "prefill")):
        objects = rendered(role, {"certificates": MANAGED})
        held |= Cluster(objects, local / site, {}, {}, authorities[site]).secrets
    ends = []
    for name in ("pd-prfaas-gateway", "prefill-prfaas-prefill-a-0"):
        for file, ending in (("tls.crt", "pem"), ("tls.key", "key")):
            (local / f"{name}.{ending}").write_bytes(held[f"{name}-identity"][file])
        ends.append(identity_in(local, name))
    gateway, engine = ends
    client, server = gateway.client_context(), engine.server_context()
    client.check_hostname = True
    handshake(client, server, "prefill-a-0.prefill.example.net")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(client, server, "prefill-a-1.prefill.example.net")
    stranger = ssl.create_default_context(cafile=str(local / "ca.pem"))
    with pytest.raises(ssl.SSLError, match=r"(?i)did.not.return.a.certificate"):
        handshake(stranger, server, "prefill-a-0.prefill.example.net")
