"""`prfaas ray`: a site on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from prfaas.audit.settings import AuditSettings
from prfaas.cli.common.options import DEPLOYMENT, PATH
from prfaas.cli.common.signals import run_until_stopped
from prfaas.cli.deploy.topology import prepare_identities
from prfaas.cli.deploy.up_command import check_deployment, prepare_model, start_all, state_lock
from prfaas.cli.ray_site.hosts import check_room, placed
from prfaas.cli.ray_site.site import RaySite, check_site
from prfaas.cli.supervision.client import scale_engines
from prfaas.cli.supervision.control import control_channel
from prfaas.cli.supervision.keeper import PartChange, line_of
from prfaas.config.deployment import Deployment
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError
from prfaas.presentation import console_for
from prfaas.sweeps import AUTO, check_installed, ray_cluster

KINDS = ("engine", "pool", "gateway")
console = console_for(160)


@click.group()
def ray() -> None:
    """Run a site on a Ray cluster: Ray places and supervises its parts, and carries no request.

    \b
    Examples:
      prfaas ray up site.toml --address 10.0.0.5:6379 --need engine=GPU:8
      prfaas ray scale --file site.toml pd=4
      prfaas ctl parts --file site.toml
    """


@ray.command()
@click.argument("file", type=DEPLOYMENT)
@click.option(
    "--address",
    default=AUTO,
    help="HOST:PORT of the Ray cluster's head; auto is the cluster on this machine.",
)
@click.option(
    "--need",
    "needs",
    multiple=True,
    metavar="KIND=RESOURCE:AMOUNT",
    help="Resource that Ray reserves for each engine, pool or gateway; CPU:1 if absent.",
)
@click.option(
    "--engines",
    multiple=True,
    metavar="CLUSTER=COUNT",
    help="Engines to start of a cluster; all of FILE if absent. The others are spares.",
)
def up(file: Path, address: str, needs: tuple[str, ...], engines: tuple[str, ...]) -> None:
    """Run the site in FILE on a Ray cluster until stopped, in the foreground.

    Each pool node and its engines share a node. FILE, its state directory's identities, and models
    have to be at the same paths on all nodes. A part that fails is restarted; the parts of a lost
    node move to another one. Ctrl-C stops all.

    \b
    Examples:
      prfaas ray up site.toml
      prfaas ray up site.toml --address 10.0.0.5:6379 --need engine=GPU:8 --need pool=CPU:4
      prfaas ray up site.toml --engines pd=2
    """
    check_installed()
    deployment, wanted = load_deployment(file), _needs(needs)
    counts = dict(_count(each) for each in engines)
    check_site(deployment)
    check_deployment(deployment)
    site = RaySite(deployment, file.absolute(), wanted, counts, _show)

    async def run(stop: asyncio.Event) -> None:
        namespace = f"prfaas:{deployment.state.absolute()}"
        with state_lock(deployment), ray_cluster(address, namespace), _reserved(site):
            prepare_identities(deployment)
            await prepare_model(deployment)
            await placed(site.hosts)
            await _serve(deployment, site, stop)

    run_until_stopped(run)


@contextlib.contextmanager
def _reserved(site: RaySite) -> Iterator[None]:
    check_room(site.hosts)
    for host in site.hosts:
        host.reserve()
    try:
        yield
    finally:
        for host in site.hosts:
            host.release()


async def _serve(deployment: Deployment, site: RaySite, stop: asyncio.Event) -> None:
    for host in site.hosts:
        node, address = host.node() or ("none", "none")
        _print(f"{', '.join(host.needs)}: node {node} at {address}")
    supervisor = site.lay_out()
    audit = AuditSettings.of(deployment.audit)
    async with control_channel(supervisor, deployment.state, audit, site.scale):
        try:
            await start_all(supervisor, stop)
            _print(f"ready at {site.gateway_url}/v1")
            await stop.wait()
        finally:
            _print("stopping")
            await supervisor.stop()


@ray.command()
@click.argument("counts", nargs=-1, required=True, metavar="CLUSTER=COUNT...")
@click.option(
    "--file", type=PATH, required=True, help="Deployment file of a running `prfaas ray up`."
)
def scale(counts: tuple[str, ...], file: Path) -> None:
    """Change the number of engines of a running site; returns once they are ready or gone.

    Run it on the machine of `prfaas ray up`. Engines that leave get no new requests, and stop once
    they have none, or after gateway.drain_timeout.

    \b
    Examples:
      prfaas ray scale --file site.toml pd=4
    """
    state = load_deployment(file).state
    for cluster, count in map(_count, counts):
        names = scale_engines(state, cluster, count)
        click.echo(f"{cluster}: {', '.join(names)}")


def _needs(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for text in texts:
        kind, _, resource = text.partition("=")
        name, _, amount = resource.rpartition(":")
        try:
            value = float(amount)
        except ValueError:
            value = 0.0
        if kind not in KINDS or not name or not 0 < value < 1e6:
            raise ConfigError(
                f"--need {text}: expected KIND=RESOURCE:AMOUNT with KIND engine, pool or gateway "
                "and an amount above 0, such as engine=GPU:8"
            )
        found[kind][name] = value
    return {kind: needs or {"CPU": 1.0} for kind, needs in found.items()}


def _count(text: str) -> tuple[str, int]:
    cluster, _, count = text.partition("=")
    if not cluster or not count.isascii() or not count.isdecimal() or len(count) > 6:
        raise ConfigError(f"{text!r}: expected CLUSTER=COUNT, such as pd=4")
    return cluster, int(count)


def _show(change: PartChange) -> None:
    _print(line_of(change))


def _print(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
