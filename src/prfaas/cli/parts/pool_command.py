"""`prfaas pool`: one pool node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from prfaas.cli.common.options import AddressType, PeerCountType, PeerRateType, PeerType, logs
from prfaas.cli.common.signals import raise_first, run_until_stopped
from prfaas.errors import ConfigError
from prfaas.units import parse_size
from prfaas.wire.identity import identity_in

POOL_DRAIN_S = 10.0
"""How long transfers under way may go on when a pool node stops."""
BUDGET_HELP = "Limit of the rate to a peer, such as pd-pool=1Gbps; if absent, the path's rate."


@click.command()
@click.option("--name", required=True, help="Name in the deployment file and the certificate.")
@click.option("--listen", type=AddressType(), required=True, help="Address for pools and gateways.")
@click.option("--memory", default="1GiB", show_default=True, help="Limit of KV blocks in memory.")
@click.option(
    "--disk",
    type=click.Path(path_type=Path),
    help="Folder for blocks evicted from memory; created if missing.",
)
@click.option("--disk-limit", help="Limit on the files in that folder.")
@click.option(
    "--socket",
    "socket_path",
    type=click.Path(path_type=Path),
    required=True,
    help="Unix socket for the engines of this host.",
)
@click.option(
    "--admin",
    type=AddressType(),
    default="127.0.0.1:7180",
    show_default=True,
    help="Address of /health and /metrics, plain HTTP; use a local address.",
)
@click.option(
    "--identities",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="Directory with ca.pem, NAME.pem and NAME.key.",
)
@click.option("--peer", "peers", type=PeerType(), multiple=True, help="A pool to push to.")
@click.option("--link-budget", "budgets", type=PeerRateType(), multiple=True, help=BUDGET_HELP)
@click.option(
    "--link-connections",
    "connections",
    type=PeerCountType(),
    multiple=True,
    help="Data connections to a peer; if absent, computed from rate and round trip.",
)
@click.option("--source", "sources", multiple=True, help="A pool that may push to this one.")
@click.option(
    "--gateway",
    "gateways",
    multiple=True,
    help="A gateway that may subscribe, and whose tickets are valid.",
)
@click.option(
    "--tracing",
    help="Collector of spans of transfers, OTLP over HTTP, such as "
    "http://127.0.0.1:4318/v1/traces; none if absent.",
)
@logs
def pool(
    *,
    name: str,
    listen: tuple[str, int],
    memory: str,
    disk: Path | None,
    disk_limit: str | None,
    socket_path: Path,
    admin: tuple[str, int],
    identities: Path,
    peers: tuple[tuple[str, tuple[str, int]], ...],
    budgets: tuple[tuple[str, int], ...],
    connections: tuple[tuple[str, int], ...],
    sources: tuple[str, ...],
    gateways: tuple[str, ...],
    tracing: str | None,
) -> None:
    """Run one pool node: the store of KV blocks of a host's engines.

    \b
    Examples:
      prfaas pool --name prfaas-pool --listen 0.0.0.0:7100 --memory 64GiB \\
          --socket /run/prfaas/pool.sock --identities /etc/prfaas \\
          --peer pd-pool=pd.example.net:7100 --link-budget pd-pool=9Gbps --gateway gateway
      prfaas pool --name pd-pool --listen 0.0.0.0:7100 --memory 64GiB \\
          --socket /run/prfaas/pool.sock --identities /etc/prfaas \\
          --source prfaas-pool --gateway gateway
    """
    from prfaas.pool.node.node import PoolNode
    from prfaas.pool.node.settings import PoolSettings
    from prfaas.wire.renewal import Renewal

    if (disk is None) != (disk_limit is None):
        raise ConfigError("--disk and --disk-limit have to be given together")
    for peer in [*dict(budgets), *dict(connections)]:
        if peer not in dict(peers):
            raise ConfigError(f"there is no --peer {peer} for which a link could have settings")
    if tracing is not None and not tracing.startswith(("http://", "https://")):
        raise ConfigError(f"--tracing {tracing!r} is no http:// or https:// URL of a collector")
    settings = PoolSettings(
        name=name,
        memory_bytes=parse_size(memory),
        disk=disk,
        disk_bytes=parse_size(disk_limit) if disk_limit else 0,
        listen=listen,
        socket_path=socket_path,
        admin=admin,
        identity=identity_in(identities, name),
        peers=dict(peers),
        link_budgets=dict(budgets),
        link_connections=dict(connections),
        sources=frozenset(sources),
        gateways=frozenset(gateways),
        tracing=tracing,
    )

    async def serve(stop: asyncio.Event) -> None:
        node = PoolNode(settings)
        Renewal(settings.identity, name, node.renew_identity, node.metrics.identity_ends).watch()
        running = asyncio.create_task(node.run())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if running.done():
            raise_first(running)
        try:
            await node.drain(POOL_DRAIN_S)
        finally:
            running.cancel()
            await asyncio.wait({running})

    run_until_stopped(serve)
