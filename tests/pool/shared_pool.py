"""A pool node that sites a and b share, a pool node at each, and authorities of their own."""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.audit.settings import AuditSettings
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.shipping import manifest_digest, manifest_of_keys
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.engine import Push
from prfaas.wire.messages.gateway import Subscribe

from .sites import LOOPBACK, Engine, Peer, Site, dial, seal, until

TAGS = {site: tenant_tag(f"salt of {site}") for site in "ab"}
MEMORY = 1 << 20


@dataclass
class Shared:
    """The running nodes.

    Attributes:
        local: Files.
        node: The shared one.
        pds: Pool node of each site.
        engine: At the shared node.
    """

    local: Path
    node: Site
    pds: dict[str, Site]
    engine: Engine
    peers: list[Peer] = field(default_factory=list)

    def contracts(self, *sites: str, **more: object) -> None:
        """Replace the contracts file."""
        write_contracts(self.local, {site: self.pds[site].port for site in sites}, **more)

    async def gateway(self, site: str) -> Peer:
        """A subscribed gateway of a site."""
        peer = await dial(self.node, self.local / site, f"gateway-{site}")
        peer.channel.send(Subscribe(gateway=f"gateway-{site}"))
        self.peers.append(peer)
        return peer

    def push(self, site: str, keys: Sequence[BlockKey], **ticket: object) -> bytes:
        """Open a transfer to a site, with a ticket of its gateway."""
        blocks, transfer = manifest_of_keys(keys), secrets.token_bytes(16)
        fields: dict[str, object] = {
            "signer": f"gateway-{site}",
            "destination": f"pd-{site}-pool",
            "tenant": TAGS[site],
            "blocks": manifest_digest(blocks),
        }
        fields |= ticket
        identities = self.local / str(fields["signer"]).removeprefix("gateway-")
        sealed = seal(identities, transfer, **fields)  # type: ignore[arg-type]
        peer = str(fields["destination"])
        message = Push(transfer_id=transfer, peer=peer, ticket=sealed, blocks=blocks)
        assert self.engine.send(message)
        return transfer

    async def prefill(self, site: str, keys: list[BlockKey]) -> bool:
        """Compute blocks for a site, and push them; True if they were kept."""
        transfer = self.push(site, keys)
        kept = await self.engine.store(keys, transfer, TAGS[site])
        self.engine.push_done(transfer)
        return kept

    def refusals(self, reason: str) -> float:
        """Tickets that the shared node refused."""
        return self.node.metric("tickets_refused_total", end="source", reason=reason)


def write_contracts(local: Path, ports: dict[str, int], **more: object) -> None:
    """The contracts file; `more` are keys of every contract."""
    text = ""
    for site, port in ports.items():
        text += (
            f'[contracts.{site}]\nauthority = "{local}/{site}/own.pem"\n'
            f'gateways = ["gateway-{site}"]\nshare = 1.0\n'
            f'pools = {{ pd-{site}-pool = "{LOOPBACK}:{port}" }}\n'
        )
        text += "".join(f"{key} = {value}\n" for key, value in more.items())
    (local / "contracts.toml").write_text(text)


@asynccontextmanager
async def shared(
    local: Path,
    memory_bytes: int = MEMORY,
    audit: AuditSettings | None = None,
    node: Mapping[str, object] | None = None,
    **contract: object,
) -> AsyncIterator[Shared]:
    """Start the nodes, and stop them; `node` are settings of the shared one."""
    for site, names in {
        "prfaas": ["prfaas-pool", "gateway-prfaas", "other-pool"],
        "a": ["gateway-a", "pd-a-pool"],
        "b": ["gateway-b", "pd-b-pool"],
    }.items():
        make_authority(local / site)
        for name in names:
            make_identity(local / site, name)
    for site in "ab":
        own = (local / site / "ca.pem").read_text()
        (local / site / "own.pem").write_text(own)
        (local / site / "ca.pem").write_text(own + (local / "prfaas" / "ca.pem").read_text())

    async def start(folder: str, name: str, **more: object) -> Site:
        site = Site(
            PoolProcessSettings(
                **{
                    "name": name,
                    "memory_bytes": MEMORY,
                    "listen": (LOOPBACK, 0),
                    "socket_path": local / f"{name}.sock",
                    "admin": (LOOPBACK, 0),
                    "identity": identity_in(local / folder, name),
                    "peers": {},
                    "sources": frozenset({"prfaas-pool"}),
                    "gateways": frozenset(),
                    **more,
                }  # type: ignore[arg-type]
            )
        )
        await site.ready()
        return site

    pds = {
        site: await start(site, f"pd-{site}-pool", gateways=frozenset({f"gateway-{site}"}))
        for site in "ab"
    }
    write_contracts(local, {site: each.port for site, each in pds.items()}, **contract)
    more: dict[str, object] = {"sources": frozenset(), "memory_bytes": memory_bytes, "audit": audit}
    more |= {"contracts": local / "contracts.toml", **(node or {})}
    shared_node = await start("prfaas", "prfaas-pool", **more)
    engine = Engine("engine", local / "prfaas-pool.sock", local / "a")
    made = Shared(local, shared_node, pds, engine)
    try:
        await engine.connected()
        links = shared_node.node.links
        await until(lambda: len(links) == 2 and all(link.is_up for link in links.values()))
        yield made
    finally:
        engine.close()
        for peer in made.peers:
            peer.pinging.cancel()
            peer.channel.close("the test is over")
        for each in (shared_node, *pds.values()):
            await each.kill()


def forge(local: Path, site: str, name: str) -> None:
    """An identity with any name, of the authority of a site."""
    folder = local / site
    trusted = (folder / "ca.pem").read_bytes()
    (folder / "ca.pem").write_bytes((folder / "own.pem").read_bytes())
    make_identity(folder, name)
    (folder / "ca.pem").write_bytes(trusted)
