"""`prfaas link`: tests of the path between two pool nodes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from prfaas.cli.common.options import ADDRESS, FOLDER, PATH, ParsedType, logs
from prfaas.cli.common.signals import run_until_stopped
from prfaas.errors import ConfigError
from prfaas.units import parse_rate

CONNECTIONS = (1, 2, 4, 8, 16)
SECONDS_MAX = 20.0


def _counts(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(count.isdecimal() and 1 <= int(count) <= CONNECTIONS[-1] for count in counts):
        raise ConfigError(f"{text!r} is no list of numbers from 1 to {CONNECTIONS[-1]}")
    return tuple(sorted({int(count) for count in counts}))


@click.group()
def link() -> None:
    """The path between two pool nodes.

    \b
    Examples:
      prfaas link test prfaas-pool pd-pool --file two-sites.toml
      prfaas link serve pd-pool --source prfaas-pool --listen 0.0.0.0:7100 --identities /etc/prfaas
    """


@link.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--file",
    type=PATH,
    help="Deployment file with the directory of identities; a running `prfaas up` of it has B's "
    "address.",
)
@click.option("--to", "address", type=ADDRESS, help="Address of B, in place of FILE's.")
@click.option(
    "--identities", type=FOLDER, help="Directory with ca.pem, A.pem and A.key, in place of FILE's."
)
@click.option(
    "--connections",
    type=ParsedType("n,n,...", _counts),
    default="1,2,4,8,16",
    help="Numbers of connections to try.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.2, SECONDS_MAX),
    default=3.0,
    help="Duration of each measurement, after a second of warm-up.",
)
@click.option("--budget", help='Rate of all connections together, as in "900Mbps".')
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def test(
    *,
    a: str,
    b: str,
    file: Path | None,
    address: tuple[str, int] | None,
    identities: Path | None,
    connections: tuple[int, ...],
    seconds: float,
    budget: str | None,
    as_json: bool,
) -> None:
    """Measure the capacity of the path from pool A to pool B as a link would use it.

    Run it on the host of A: it uses A's identity, connects to B's port, and sends bytes that B
    drops. B is a pool node that has A as a source, or `prfaas link serve`. A test slows transfers
    on the same path.

    Goodput is the rate that B acknowledged inside TLS 1.3, comparable with `iperf3 -C bbr -P N`.

    \b
    Examples:
      prfaas link test prfaas-pool pd-pool --file two-sites.toml
      prfaas link test prfaas-pool pd-pool --to pd.example.net:7100 --identities /etc/prfaas
      prfaas link test prfaas-pool pd-pool --file two-sites.toml --connections 4,6 --budget 900Mbps
    """
    from prfaas.cli.operate.link_report import as_object, print_report, run_probes
    from prfaas.cli.supervision.client import pool_address
    from prfaas.config.load import load_deployment
    from prfaas.wire.identity import identity_in

    deployment = load_deployment(file) if file is not None else None
    directory = identities or (deployment.security.identities if deployment else None)
    if directory is None:
        raise ConfigError("the identity is unknown; give --file or --identities")
    place = address or (pool_address(deployment, b) if deployment else None)
    if place is None:
        raise ConfigError(f"it is not known where {b} is; give --to HOST:PORT")
    report = asyncio.run(
        run_probes(
            identity_in(directory, a),
            b,
            place,
            connections,
            seconds,
            parse_rate(budget) if budget else 0,
        )
    )
    if as_json:
        click.echo(json.dumps(as_object(report), indent=1))
    else:
        print_report(report, a, b)


@link.command()
@click.argument("name")
@click.option("--listen", type=ADDRESS, required=True, help="Address to listen at.")
@click.option("--source", "sources", multiple=True, required=True, help="A pool that may test.")
@click.option(
    "--identities", type=FOLDER, required=True, help="Directory with ca.pem, NAME.pem and NAME.key."
)
@logs
def serve(
    *, name: str, listen: tuple[str, int], sources: tuple[str, ...], identities: Path
) -> None:
    """Run the receiving end of link tests if no pool node runs yet.

    \b
    Example:
      prfaas link serve pd-pool --source prfaas-pool --listen 0.0.0.0:7100 --identities /etc/prfaas
    """
    from prfaas.pool.net.link_probe import ProbeServer
    from prfaas.wire.identity import identity_in

    tls = identity_in(identities, name).accepting()

    async def run(stop: asyncio.Event) -> None:
        server = ProbeServer(listen, tls, frozenset(sources))
        server.open()
        click.echo(f"{name} takes link tests at {listen[0]}:{server.port}; Ctrl-C ends it")
        try:
            await stop.wait()
        finally:
            await server.close()

    run_until_stopped(run)
