"""`prfaas pool`, `prfaas gateway`, `prfaas identity`: single parts of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from prfaas.errors import ConfigError
from prfaas.logs import LogFormat, set_up_logging
from prfaas.units import parse_rate, parse_size
from prfaas.wire.identity import check_name, identity_in, make_authority, make_identity

if TYPE_CHECKING:
    from prfaas.config.deployment import Deployment

T = TypeVar("T")
CONNECTIONS_MAX = 16
BUDGET_BITS_PER_S_MIN = 1_000_000
POOL_DRAIN_S = 10.0
"""How long transfers under way may go on when a pool node stops."""
Command = TypeVar("Command", bound=Callable[..., None])


class AddressType(click.ParamType[tuple[str, int]]):
    """`HOST:PORT`."""

    name = "host:port"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Split an address."""
        host, _, port = str(value).rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            self.fail(f"{value!r} is not HOST:PORT with a port up to 65535", param, ctx)
        return host.strip("[]"), int(port)


class PeerType(click.ParamType[tuple[str, tuple[str, int]]]):
    """`NAME=HOST:PORT`."""

    name = "name=host:port"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[str, int]]:
        """Split a named address."""
        name, _, address = str(value).partition("=")
        if not name or not address:
            self.fail(f"{value!r} is not NAME=HOST:PORT", param, ctx)
        return name, AddressType().convert(address, param, ctx)


class PeerRateType(click.ParamType[tuple[str, int]]):
    """`NAME=RATE`."""

    name = "name=rate"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Split a named rate."""
        name, _, rate = str(value).partition("=")
        try:
            bits_per_s = parse_rate(rate)
        except ConfigError as error:
            self.fail(f"{value!r} is not NAME=RATE: {error}", param, ctx)
        if not name or bits_per_s < BUDGET_BITS_PER_S_MIN:
            self.fail(f"{value!r} is not NAME=RATE with a rate of 1Mbps or more", param, ctx)
        return name, bits_per_s


class PeerCountType(click.ParamType[tuple[str, int]]):
    """`NAME=COUNT`."""

    name = "name=count"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Split a named count."""
        name, _, count = str(value).partition("=")
        if not name or not count.isdigit() or not 1 <= int(count) <= CONNECTIONS_MAX:
            self.fail(f"{value!r} is not NAME=COUNT, 1 to {CONNECTIONS_MAX}", param, ctx)
        return name, int(count)


LOG_FORMAT_VARIABLE = "PRFAAS_LOG_FORMAT"
_FORMATS = click.Choice([form.value for form in LogFormat])


def logs(command: Command) -> Command:
    """Adds `--log-format` to a command, and sets the log up before it runs."""

    def set_up(_context: click.Context, _option: click.Parameter, value: str) -> None:
        set_up_logging(LogFormat(value))

    option = click.option(
        "--log-format",
        type=_FORMATS,
        default=LogFormat.TEXT.value,
        show_default=True,
        envvar=LOG_FORMAT_VARIABLE,
        expose_value=False,
        callback=set_up,
        help="One line an event, for people or for machines.",
    )
    return option(command)


def logs_of_parts(command: Command) -> Command:
    """Adds `--log-format` to a command that starts parts: it is theirs."""

    def tell(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
        if value is not None:
            os.environ[LOG_FORMAT_VARIABLE] = value

    option = click.option(
        "--log-format",
        type=_FORMATS,
        expose_value=False,
        callback=tell,
        help="Of the logs of gateway, pool nodes and timing engines: text without it.",
    )
    return option(command)


def run_until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main` on an event loop; SIGINT and SIGTERM set the event it is given.

    A second signal cancels it.
    """

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        running = asyncio.ensure_future(main(stop))

        def on_signal() -> None:
            if stop.is_set():
                running.cancel()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())


BUDGET_HELP = "What may be sent to a peer, such as pd-pool=1Gbps; without it, what the path takes."


@click.command()
@click.option("--name", required=True, help="Name in the deployment file and the certificate.")
@click.option("--listen", type=AddressType(), required=True, help="Where pools and gateways come.")
@click.option("--memory", default="1GiB", show_default=True, help="Limit on KV blocks held.")
@click.option(
    "--disk",
    type=click.Path(path_type=Path),
    help="Folder for blocks that memory has no room for; made if it is not there.",
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
    help="Where /health and /metrics are served, plain HTTP; keep it on this host.",
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
    help="Data connections to a peer; without it, as many as rate and round trip ask for.",
)
@click.option("--source", "sources", multiple=True, help="A pool that may push to this one.")
@click.option(
    "--gateway",
    "gateways",
    multiple=True,
    help="A gateway that may subscribe, and whose tickets count.",
)
@click.option(
    "--tracing",
    "tracing",
    help="Collector that takes spans of transfers, OTLP over HTTP, such as "
    "http://127.0.0.1:4318/v1/traces; without it none are sent.",
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
    """Run one pool node: the store of KV blocks beside the engines of a host.

    \b
    Examples:
      prfaas pool --name prfaas-pool --listen 0.0.0.0:7100 --memory 64GiB \\
          --socket /run/prfaas/pool.sock --identities /etc/prfaas \\
          --peer pd-pool=pd.example.net:7100 --link-budget pd-pool=9Gbps --gateway gateway
      prfaas pool --name pd-pool --listen 0.0.0.0:7100 --memory 64GiB \\
          --socket /run/prfaas/pool.sock --identities /etc/prfaas \\
          --source prfaas-pool --gateway gateway
    """
    from prfaas.pool.node import PoolNode
    from prfaas.pool.settings import PoolSettings

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


def raise_first(task: asyncio.Task[None]) -> None:
    """Raise what ended a task, the operator's mistake first if it is in a group."""
    error = task.exception()
    if isinstance(error, BaseExceptionGroup):
        mistakes = error.subgroup((ConfigError, ssl.SSLError, OSError))
        raise (mistakes or error).exceptions[0]
    if error is not None:
        raise error


@click.command()
@click.argument("names", nargs=-1, required=True)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    required=True,
    help="Where the files go; the authority is made there if it is missing.",
)
@click.option("--address", "addresses", multiple=True, help="Host name or IP for https clients.")
def identity(names: tuple[str, ...], directory: Path, addresses: tuple[str, ...]) -> None:
    """Make identities: a certificate and a key for each NAME, signed by one authority.

    Carry NAME.pem, NAME.key and ca.pem to the host of each part; keep ca.key where you made it.
    An identity that is there already is kept as it is, its addresses included.

    \b
    Examples:
      prfaas identity gateway pd-pool prfaas-pool --directory identities
      prfaas identity prfaas-engine --address prefill.example.net --directory identities
    """
    for name in names:
        check_name(name)
    try:
        make_authority(directory)
        for name in names:
            before = identity_in(directory, name)
            kept = before.certificate.exists() and before.key.exists()
            made = make_identity(directory, name, list(addresses))
            click.echo(f"{made.certificate}\n{made.key}")
            if kept:
                click.echo(
                    f"{name} had an identity, which is kept as it is; for a new one, or other "
                    "addresses, remove both files first",
                    err=True,
                )
    except OSError as error:
        raise ConfigError(f"{error.filename} can not be written: {error.strerror}") from None


class UrlType(click.ParamType[tuple[str, str]]):
    """`NAME=URL`."""

    name = "name=url"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Split a named URL."""
        name, _, url = str(value).partition("=")
        if not name or not url.startswith(("http://", "https://")):
            self.fail(f"{value!r} is not NAME=URL", param, ctx)
        return name, url.rstrip("/")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--with", "overlay", type=click.Path(path_type=Path), help="Settings over FILE's.")
@click.option("--name", help="Which of the gateways in FILE; without it, gateway.name.")
@click.option("--listen", type=AddressType(), help="Instead of its address in FILE.")
@click.option("--engine", "engines", type=UrlType(), multiple=True, help="Where an engine is.")
@click.option("--pool", "pools", type=PeerType(), multiple=True, help="Where a pool node is.")
@logs
def gateway(
    *,
    file: Path,
    overlay: Path | None,
    name: str | None,
    listen: tuple[str, int] | None,
    engines: tuple[tuple[str, str], ...],
    pools: tuple[tuple[str, tuple[str, int]], ...],
) -> None:
    """Run a gateway of the deployment in FILE beside parts that run already.

    Where FILE gives a part no `url` or `address`, say here where it is. Several gateways can serve
    one deployment: gateway.replicas in FILE names the others.

    \b
    Examples:
      prfaas gateway examples/two-sites.toml
      prfaas gateway examples/two-sites.toml --name gateway-b
      prfaas gateway examples/laptop.toml --engine pd-engine=http://127.0.0.1:8101 ...
    """
    from prfaas.config.load import load_deployment
    from prfaas.gateway.app import serve
    from prfaas.gateway.endpoints import Endpoints

    deployment = load_deployment(file, overlay)
    if name is not None:
        if name not in deployment.gateways:
            known = ", ".join(deployment.gateways)
            raise ConfigError(f"--name {name} is no gateway of {file}, which has {known}")
        deployment = deployment.run_by(name)
    if listen is not None:
        deployment = listen_on(deployment, listen)
    known_engines, known_pools = dict(engines), dict(pools)
    for cluster in deployment.clusters.values():
        for part, engine in cluster.engines.items():
            _know(known_engines, part, engine.url, f"--engine {part}=URL")
        for part, pool_table in cluster.pools.items():
            host, _, port = (pool_table.address or "").rpartition(":")
            address = (host.strip("[]"), int(port)) if port else None
            _know(known_pools, part, address, f"--pool {part}=HOST:PORT")
    endpoints, who = Endpoints(known_engines, known_pools), deployment.gateway.name
    run_until_stopped(
        lambda stop: serve(
            deployment, endpoints, stop, lambda url: click.echo(f"gateway {who} listens at {url}")
        )
    )


def listen_on(deployment: Deployment, address: tuple[str, int]) -> Deployment:
    """The same deployment with its gateway at another address."""
    host, port = address
    table = deployment.gateway.model_copy(update={"listen": f"{host}:{port}"})
    return deployment.model_copy(update={"gateway": table})


def _know(known: dict[str, T], name: str, place: T | None, option: str) -> None:
    if name in known:
        return
    if place is None:
        raise ConfigError(f"it is not known where {name} is; say {option}, or use `prfaas up`")
    known[name] = place
