"""`prfaas gateway`: one gateway, beside parts that run already."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from prfaas.cli.common.options import ADDRESS, DEPLOYMENT, NAMED_ADDRESS, NAMED_URL, PATH, logs
from prfaas.cli.common.signals import run_until_stopped
from prfaas.config.addresses import join_address, split_address
from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from prfaas.config.deployment import Deployment

T = TypeVar("T")


@click.command()
@click.argument("file", type=DEPLOYMENT)
@click.option("--with", "overlay", type=PATH, help="Settings that take precedence over FILE's.")
@click.option("--name", help="Name of the gateway in FILE; gateway.name if absent.")
@click.option("--listen", type=ADDRESS, help="Address, in place of the one in FILE.")
@click.option("--engine", "engines", type=NAMED_URL, multiple=True, help="Address of an engine.")
@click.option("--pool", "pools", type=NAMED_ADDRESS, multiple=True, help="Address of a pool node.")
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
    """Run a gateway of the deployment in FILE; its other parts run already.

    Give the address of each part without `url` or `address` in FILE. Several gateways can serve one
    deployment: gateway.replicas in FILE names the others.

    \b
    Examples:
      prfaas gateway examples/two-sites.toml
      prfaas gateway examples/two-sites.toml --name gateway-b
      prfaas gateway examples/laptop.toml --engine pd-engine=http://127.0.0.1:8101 ...
    """
    from prfaas.cli.parts.gateway_annexes import serve
    from prfaas.cli.parts.without_torch import keep_torch_out
    from prfaas.config.addresses import Endpoints
    from prfaas.config.load import load_deployment
    from prfaas.membership.deployment_file import DeploymentFile, gateway_view
    from prfaas.membership.sources import sources_of

    deployment = read = load_deployment(file, overlay)
    deployment.check_one_local()
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
            address = split_address(pool_table.address) if pool_table.address else None
            _know(known_pools, part, address, f"--pool {part}=HOST:PORT")
    endpoints, who = Endpoints(known_engines, known_pools), deployment.gateway.name
    watched = DeploymentFile(
        (file, overlay) if overlay else (file,),
        partial(load_deployment, file, overlay),
        read,
        gateway_view(read, dict(engines), dict(pools)),
    )
    sources = [watched, *sources_of(deployment.membership)]
    keep_torch_out()
    run_until_stopped(
        lambda stop: serve(
            deployment,
            endpoints,
            stop,
            lambda url: click.echo(f"gateway {who} listens at {url}"),
            sources,
            # Ctrl-C, and the end of a whole deployment.
            lambda: stop.number is signal.SIGINT,
        )
    )


def listen_on(deployment: Deployment, address: tuple[str, int]) -> Deployment:
    """The same deployment with its gateway at another address."""
    table = deployment.gateway.model_copy(update={"listen": join_address(address)})
    return deployment.model_copy(update={"gateway": table})


def _know(known: dict[str, T], name: str, place: T | None, option: str) -> None:
    if name in known:
        return
    if place is None:
        raise ConfigError(f"it is not known where {name} is; say {option}, or use `prfaas up`")
    known[name] = place
