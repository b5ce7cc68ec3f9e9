"""`prfaas pool`: one pool node."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prfaas.cli.common.options import (
    ADDRESS,
    DEPLOYMENT,
    FOLDER,
    NAMED_ADDRESS,
    NAMED_COUNT,
    NAMED_RATE,
    PATH,
    logs,
)
from prfaas.cli.common.signals import raise_first, run_until_stopped
from prfaas.cli.parts.pool_settings import (
    ADMIN,
    Following,
    follow_file,
    follow_sources,
    s3_options,
    settings_in,
    shared_tier,
)
from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.errors import ConfigError
from prfaas.units import NS_PER_S, parse_size

if TYPE_CHECKING:
    from prfaas.pool.process.process import PoolProcessSettings

Address = tuple[str, int]
MEMORY_BYTES = 2**30
REQUIRED = {"listen": "--listen", "socket_path": "--socket", "identity": "--identities"}


@click.command()
@click.argument("file", type=DEPLOYMENT, required=False)
@click.option("--with", "overlay", type=PATH, help="Settings over FILE's.")
@click.option("--name", required=True, help="Name in the deployment file and the certificate.")
@click.option("--listen", type=ADDRESS, help="Address for pools and gateways.")
@click.option("--memory", help="Limit of KV blocks in memory; 1GiB without FILE.")
@click.option(
    "--disk", type=PATH, help="Folder for blocks evicted from memory; created if missing."
)
@click.option("--disk-limit", help="Limit on the files in that folder.")
@click.option(
    "--disk-keys",
    type=PATH,
    help="File of the site's keys; with it, blocks in that folder are sealed with a key for each "
    "tenant. Without FILE and this option they are in the clear.",
)
@click.option(
    "--socket", "socket_path", type=PATH, help="Unix socket for the engines of this host."
)
@click.option(
    "--admin",
    type=ADDRESS,
    help="Address of /health and /metrics, plain HTTP; use a local address. 127.0.0.1:7180 unless "
    "FILE has another.",
)
@click.option("--identities", type=FOLDER, help="Directory with ca.pem, NAME.pem and NAME.key.")
@click.option(
    "--peer", "peers", type=NAMED_ADDRESS, multiple=True, help="A pool to push to, and its address."
)
@click.option(
    "--link-budget",
    "budgets",
    type=NAMED_RATE,
    multiple=True,
    help="Limit of the rate to a peer, such as pd-pool=1Gbps; if absent, the path's rate.",
)
@click.option(
    "--link-connections",
    "connections",
    type=NAMED_COUNT,
    multiple=True,
    help="Data connections to a peer; if absent, computed from rate and round trip.",
)
@click.option(
    "--link-codec",
    type=click.Choice([mode.value for mode in LinkCodec]),
    help="Lossless coding of blocks on links: where it raises their rate, never, or always; auto "
    "without FILE.",
)
@click.option(
    "--link-encryption",
    type=click.Choice([choice.value for choice in LinkEncryption]),
    help="Protection of blocks on links: sealed without FILE. network does not encrypt.",
)
@click.option(
    "--link-lanes",
    type=click.IntRange(1, 16),
    help="Threads that move the bytes of sealed data connections; 1 without FILE.",
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    help="A pool that may push to this one, or a pattern such as site/prfaas/pool/*.",
)
@click.option(
    "--gateway",
    "gateways",
    multiple=True,
    help="A gateway that may subscribe, and whose tickets are valid, or a pattern.",
)
@click.option(
    "--peers-from",
    "peers_file",
    type=PATH,
    help="TOML file with the sources of peers that join and leave while the pool node runs.",
)
@click.option(
    "--contracts",
    type=PATH,
    help="Contracts file of the sites that share this pool node; followed while it runs.",
)
@click.option(
    "--audit",
    type=PATH,
    help="Folder of the audit log, with the defaults of [audit]; none if absent.",
)
@click.option(
    "--tracing",
    help="Collector of spans of transfers, OTLP over HTTP, such as "
    "http://127.0.0.1:4318/v1/traces; none if absent.",
)
@s3_options
@logs
def pool(
    *,
    file: Path | None,
    overlay: Path | None,
    name: str,
    listen: Address | None,
    memory: str | None,
    disk: Path | None,
    disk_limit: str | None,
    disk_keys: Path | None,
    socket_path: Path | None,
    admin: Address | None,
    identities: Path | None,
    peers: tuple[tuple[str, Address], ...],
    budgets: tuple[tuple[str, int], ...],
    connections: tuple[tuple[str, int], ...],
    link_codec: str | None,
    link_encryption: str | None,
    link_lanes: int | None,
    sources: tuple[str, ...],
    gateways: tuple[str, ...],
    peers_file: Path | None,
    contracts: Path | None,
    audit: Path | None,
    tracing: str | None,
    **s3: str | None,
) -> None:
    """Run one pool node: the store of KV blocks of a host's engines.

    FILE is the deployment file that `prfaas gateway` reads. The pool node takes the settings of the
    pool NAME in it; options override them. Without FILE, --listen, --socket and --identities are
    required.

    \b
    Examples:
      prfaas pool examples/two-sites.toml --name prfaas-pool
      prfaas pool --name pd-pool --listen 0.0.0.0:7100 --memory 64GiB \\
          --socket /run/prfaas/pool.sock --identities /etc/prfaas \\
          --source prfaas-pool --gateway gateway
    """
    from prfaas.audit.settings import AuditSettings
    from prfaas.config.load import load_deployment
    from prfaas.pool.process.process import PoolProcessSettings
    from prfaas.wire.allow_list import check_entries
    from prfaas.wire.identity import identity_in

    if (disk is None) != (disk_limit is None):
        raise ConfigError("--disk and --disk-limit have to be given together")
    if tracing is not None and not tracing.startswith(("http://", "https://")):
        raise ConfigError(f"--tracing {tracing!r} is no http:// or https:// URL of a collector")
    if file is not None and peers_file is not None:
        raise click.UsageError("--peers-from does not go with FILE; write [membership] in FILE.")
    if overlay is not None and file is None:
        raise click.UsageError("--with needs FILE.")
    if file is None:
        found: dict[str, Any] = {"memory_bytes": MEMORY_BYTES, "admin": ADMIN, "peers": {}}
        found |= {"link_budgets": {}, "link_connections": {}}
        found |= {"sources": frozenset(), "gateways": frozenset(), "shared": None}
    else:
        deployment = load_deployment(file, overlay)
        found = settings_in(deployment, name, file)
    found["peers"] |= dict(peers)
    found["link_budgets"] |= dict(budgets)
    found["link_connections"] |= dict(connections)
    given = {
        "listen": listen,
        "memory_bytes": parse_size(memory) if memory is not None else None,
        "disk": disk,
        "disk_bytes": parse_size(disk_limit) if disk_limit is not None else None,
        "disk_keys": disk_keys,
        "socket_path": socket_path,
        "admin": admin,
        "identity": identity_in(identities, name) if identities else None,
        "sources": frozenset(sources) or None,
        "gateways": frozenset(gateways) or None,
        "audit": AuditSettings(audit, audit) if audit is not None else None,
        "tracing": tracing,
        "contracts": contracts,
        "link_codec": LinkCodec(link_codec) if link_codec is not None else None,
        "link_encryption": LinkEncryption(link_encryption) if link_encryption else None,
        "link_lanes": link_lanes,
    }
    found |= {key: value for key, value in given.items() if value is not None}
    found["shared"] = shared_tier({k: v for k, v in s3.items() if v is not None}, found["shared"])
    check_entries([*found["sources"], *found["gateways"]])
    _check(found, file, can_grow=peers_file is not None)
    if file is not None:
        with contextlib.suppress(OSError):  # The pool node reports why it cannot create its socket.
            found["socket_path"].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = PoolProcessSettings(name=name, **found)
    following = None
    if file is not None:
        following = follow_file(file, overlay, deployment, name, dict(peers), admits=not sources)
    elif peers_file is not None:
        following = follow_sources(peers_file)
    _run(settings, following)


def _check(found: dict[str, Any], file: Path | None, *, can_grow: bool) -> None:
    """See that a pool node has all it needs; ConfigError if something is neither in the file nor
    among the options."""
    for key, option in REQUIRED.items():
        if key not in found:
            where = f"its `{key}` in {file}" if file else "FILE, the deployment file"
            raise click.UsageError(f"Missing option '{option}', or {where}.")
    peers = found["peers"]
    for peer, address in peers.items():
        if address is None:
            raise ConfigError(
                f"it is not known where {peer} is; say --peer {peer}=HOST:PORT, give it an "
                "`address` in the file, or use `prfaas up`"
            )
    if can_grow:
        return  # A peer that is not known yet may have them.
    for peer in [*found["link_budgets"], *found["link_connections"]]:
        if peer not in peers:
            raise ConfigError(f"there is no --peer {peer} for which a link could have settings")


def _run(settings: PoolProcessSettings, following: Following | None) -> None:
    from prfaas.pool.codec.loading import KERNELS
    from prfaas.pool.process.process import PoolProcess
    from prfaas.wire.renewal import Renewal

    async def serve(stop: asyncio.Event) -> None:
        process, name = PoolProcess(settings), settings.name
        node, renew = process.node, process.node.link_room.renew_identity
        Renewal(settings.identity, name, renew, node.metrics.identity_ends).watch()
        members = following.members(node) if following is not None else None
        running = asyncio.create_task(process.run())
        if members is not None:
            members.start()
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if members is not None:
            await members.close()
        if running.done():
            raise_first(running)
        try:
            await node.drain(settings.drain_ns / NS_PER_S)
        finally:
            running.cancel()
            await asyncio.wait({running})
            KERNELS.stop()

    run_until_stopped(serve)
