"""Two PD sites with two gateways each on one PrfaaS cluster: real processes, timing engines.

Each site has its own authority, tenants and secret of salts. The PrfaaS site runs a pool node, two
engines and the proxy, with a contracts file.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import parts
from prfaas.cli.host.processes import ProcessPart
from prfaas.engines.launch import Command
from prfaas.wire.channel import Channel, keep_alive
from prfaas.wire.frames import Frame
from prfaas.wire.identity import Identity, identity_in, make_authority, make_identity
from prfaas.wire.messages.codec import decode
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.gateway import (
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    Subscribe,
    TransferEnded,
)
from tests.deployments import laid_out, started
from tests.ports import free_port

from .site import MAX_MODEL_LEN, MODEL, plan_text, second_gateway

SITES = {"a": 0.7, "b": 0.3}
"""Sites and their shares."""
ENGINES = ("prfaas-0", "prfaas-1")
POOL = "prfaas-pool"
BLOCK_TOKENS = 64
RESERVE = 0.3
PROMPT_TOKENS = 2500

CONTRACT = """
[contracts.{site}]
authority = "{local}/{site}/ca-own.pem"
gateways = ["gateway-{site}1", "gateway-{site}2"]
pools = {{ pd-{site}-pool = "127.0.0.1:{port}" }}
share = {share}
queued_max = 256
cache_reserve = {reserve}
"""
SHARED_ENGINE = """
[engines.{name}]
listen = "127.0.0.1:{port}"
url = "http://127.0.0.1:{behind}"
"""
DEPLOYMENT = """
state = "{local}/{site}/state"
[model]
name = "{model}"
path = "{local}/model"
generate = true
[gateway]
name = "gateway-{site}1"
listen = "127.0.0.1:0"
[gateway.replicas]
gateway-{site}2 = "127.0.0.1:{second}"
[routing]
offload_threshold = 2000
policy = "paper"
prefill_timeout = "100s"
transfer_timeout = "100s"
[security]
identities = "{local}/{site}"
[clusters.prfaas]
role = "prfaas"
[clusters.prfaas.pools.prfaas-pool]
address = "127.0.0.1:{pool}"
{engines}
[clusters.pd]
role = "pd"
[clusters.pd.timing]
plan = "{local}/plan.toml"
block_tokens = 64
max_model_len = {max_model_len}
[clusters.pd.pools.pd-{site}-pool]
memory = "512MiB"
listen = "127.0.0.1:{port}"
[clusters.pd.engines.pd-{site}-0]
pool = "pd-{site}-pool"
host_memory = "32MiB"
"""
REMOTE_ENGINE = """
[clusters.prfaas.engines.{name}]
pool = "prfaas-pool"
url = "https://127.0.0.1:{port}"
"""


@dataclass
class Observer:
    """A gateway's identity, subscribed to the shared pool node: all that its site may learn."""

    names: set[bytes] = field(default_factory=set)
    peers: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    transfers: set[str] = field(default_factory=set)
    is_complete: bool = False
    is_lost: bool = False
    ping: asyncio.Task[None] | None = None

    @classmethod
    async def of(cls, identity: Identity, port: int, name: str) -> Observer:
        found = cls()

        def lost(*_: object) -> None:
            found.is_lost = True

        _, channel = await asyncio.get_running_loop().create_connection(
            lambda: Channel(found.take, lost), "127.0.0.1", port, ssl=identity.client_context()
        )
        channel.send(Subscribe(gateway=name))
        found.ping = asyncio.create_task(keep_alive(channel))
        return found

    def take(self, _: Channel, frame: Frame) -> None:
        match decode(frame.payload):
            case Snapshot() | Stored() as event:
                self.names |= {key.block_hash for key in keys_of(event.keys)}
            case SnapshotEnd():
                self.is_complete = True
            case PoolState() as state:
                self.peers |= {*state.links, *state.telemetry}
                self.tags |= set(state.tenants)
            case TransferEnded() as ended:
                self.transfers.add(ended.peer)


class SharedService:
    """The running deployment.

    Args:
        local: Its files.
        urls: Gateways of each site.
        ports: Of the pool node, the proxy's engines and its admin page.
        http: For questions.
    """

    def __init__(
        self,
        local: Path,
        urls: dict[str, list[str]],
        ports: dict[str, int],
        http: aiohttp.ClientSession,
    ) -> None:
        self.local, self.urls, self.ports, self.http = local, urls, ports, http

    def contracts(self, *sites: str) -> None:
        """Put the contracts of these sites into the file."""
        write_contracts(self.local, self.ports, sites)

    def identity(self, site: str, name: str) -> Identity:
        """Files of a part of a site."""
        return identity_in(self.local / site, name)

    async def observer(self, site: str) -> Observer:
        """Watch the pool node with the identity of a site's second gateway."""
        name = f"gateway-{site}2"
        return await Observer.of(self.identity(site, name), self.ports[POOL], name)

    async def tokens(self, kind: str = "computed") -> dict[str, float]:
        """Tokens of each site at the proxy since its start."""
        page = await self.page()
        pattern = rf'^prfaas_proxy_tokens_total{{kind="{kind}",site="(\w+)"}} (\S+)$'
        return {site: float(value) for site, value in re.findall(pattern, page, re.MULTILINE)}

    async def page(self) -> str:
        """Metrics of the proxy."""
        async with self.http.get(f"http://127.0.0.1:{self.ports['admin']}/metrics") as reply:
            return await reply.text()

    async def ask(self, site: str, number: int, prompt: list[int]) -> tuple[int, str]:
        """Send a prompt to a gateway of a site; status and path."""
        url = self.urls[site][number % 2]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        async with self.http.post(f"{url}/v1/completions", json=body) as reply:
            await reply.read()
            return reply.status, reply.headers.get("X-Prfaas-Path", "")

    def session(self, site: str, name: str) -> aiohttp.ClientSession:
        """A client with the identity of a gateway, past the gateway's own rules."""
        context = self.identity(site, name).client_context()
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        return aiohttp.ClientSession(connector=connector)

    def engine_url(self, name: str = ENGINES[0]) -> str:
        """The proxy's port of an engine."""
        return f"https://127.0.0.1:{self.ports[name]}"


def write_contracts(local: Path, ports: dict[str, int], sites: tuple[str, ...]) -> None:
    """Write the contracts file, as an editor does."""
    text = "".join(
        SHARED_ENGINE.format(name=name, port=ports[name], behind=ports[f"{name} behind"])
        for name in ENGINES
    )
    for site in sites:
        text += CONTRACT.format(
            local=local,
            site=site,
            port=ports[f"pd-{site}-pool"],
            share=SITES[site],
            reserve=RESERVE,
        )
    new = local / "contracts.new"
    new.write_text(text)
    new.replace(local / "contracts.toml")


def write_identities(local: Path) -> None:
    """Authorities and identities: sites trust the PrfaaS site, and not each other."""
    names = {"prfaas": [POOL]} | {
        site: [f"gateway-{site}1", f"gateway-{site}2", f"pd-{site}-pool"] for site in SITES
    }
    for site, parts_of_site in names.items():
        make_authority(local / site)
        for name in parts_of_site:
            make_identity(local / site, name)
    make_identity(local / "prfaas", "proxy", ["127.0.0.1"])
    provider = (local / "prfaas" / "ca.pem").read_text()
    for site in SITES:
        own = (local / site / "ca.pem").read_text()
        (local / site / "ca-own.pem").write_text(own)
        (local / site / "ca.pem").write_text(own + provider)


def provider_parts(local: Path, ports: dict[str, int]) -> list[list[ProcessPart]]:
    """Processes of the PrfaaS site, in the order of their start."""
    socket, contracts = local / "prfaas" / "pool.sock", str(local / "contracts.toml")
    identities = str(local / "prfaas")

    def part(name: str, kind: str, admin: str, *args: str) -> ProcessPart:
        command = Command([sys.executable, "-m", "prfaas", *args], dict(os.environ))
        return ProcessPart(name, kind, command, admin, local / "logs" / f"{name}.log")

    node = f"127.0.0.1:{ports['pool admin']}"
    pool = part(
        POOL,
        "pool node",
        f"http://{node}/health",
        *("pool", "--name", POOL, "--listen", f"127.0.0.1:{ports[POOL]}", "--memory", "64MiB"),
        *("--socket", str(socket), "--admin", node, "--identities", identities),
        *("--contracts", contracts, "--audit", str(local / "audit")),
    )
    engines = [f"{name}=127.0.0.1:{ports[f'{name} behind']}" for name in ENGINES]
    engine = part(
        ENGINES[0],
        "timing engines",
        f"http://127.0.0.1:{ports[f'{ENGINES[-1]} behind']}/health",
        *("engine", "timing", "--plan", str(local / "plan.toml"), "--cluster", "prfaas"),
        *("--model", MODEL, "--model-path", str(local / "model"), "--pool", str(socket)),
        *("--block-tokens", str(BLOCK_TOKENS), "--max-model-len", str(MAX_MODEL_LEN)),
        *(text for each in engines for text in ("--engine", each)),
    )
    admin = f"127.0.0.1:{ports['admin']}"
    proxy = part(
        "proxy",
        "proxy",
        f"http://{admin}/health",
        *("proxy", contracts, "--name", "proxy", "--identities", identities),
        *("--admin", admin, "--audit", str(local / "audit")),
    )
    return [[pool], [engine], [proxy]]


@asynccontextmanager
async def sharing(local: Path, slower: float = 1.0) -> AsyncIterator[SharedService]:
    """Start everything, and stop it.

    Args:
        local: An empty folder.
        slower: Factor of the engines' times.
    """
    write_identities(local)
    (local / "plan.toml").write_text(plan_text(len(ENGINES), slower))
    names = [POOL, "admin", "pool admin", *ENGINES, *(f"{name} behind" for name in ENGINES)]
    names += [f"pd-{site}-pool" for site in SITES] + [f"second {site}" for site in SITES]
    ports = {name: free_port() for name in names}
    write_contracts(local, ports, tuple(SITES))
    engines = "".join(REMOTE_ENGINE.format(name=name, port=ports[name]) for name in ENGINES)
    stages, urls = list[list[ProcessPart]](), dict[str, list[str]]()
    for site in SITES:
        file = local / f"{site}.toml"
        file.write_text(
            DEPLOYMENT.format(
                local=local,
                site=site,
                model=MODEL,
                second=ports[f"second {site}"],
                pool=ports[POOL],
                port=ports[f"pd-{site}-pool"],
                engines=engines,
                max_model_len=MAX_MODEL_LEN,
            )
        )
        topology = await laid_out(file)
        own = parts(topology)
        [gateway] = [part for part in own[1] if part.kind == "gateway"]
        address = ("127.0.0.1", ports[f"second {site}"])
        second = second_gateway(gateway, topology.gateway_url, address)
        second.name = f"gateway-{site}2"
        second.command.args.extend(["--name", second.name])
        own[1].append(second)
        urls[site] = [topology.gateway_url, f"http://127.0.0.1:{address[1]}"]
        stages = [
            [*earlier, *more] for earlier, more in zip(stages or [[]] * len(own), own, strict=True)
        ]
    stages = provider_parts(local, ports) + stages
    async with (
        started(stages),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        service = SharedService(local, urls, ports, http)
        async with asyncio.timeout(60):
            while not await is_whole(service):  # noqa: ASYNC110 - processes signal nothing
                await asyncio.sleep(0.1)
        yield service


async def is_whole(service: SharedService) -> bool:
    """Return True if every gateway sees every part of its deployment."""
    for url in [url for urls in service.urls.values() for url in urls]:
        try:
            async with service.http.get(f"{url}/health?full=1") as reply:
                if reply.status != 200 or (await reply.json()).get("missing"):
                    return False
        except aiohttp.ClientError:
            return False
    return True
