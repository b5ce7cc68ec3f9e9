"""`prfaas up` and `prfaas check`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import chain
from pathlib import Path

import click

from prfaas.audit.settings import AuditSettings
from prfaas.cli.common.options import PATH, logs_of_parts
from prfaas.cli.common.signals import EXIT_FAILURE, StoppedEarlyError, run_until_stopped
from prfaas.cli.deploy.deployment_checks import (
    check_disks,
    check_plan,
    check_shared_memory,
    check_timing,
    open_secrets,
    short_lived,
)
from prfaas.cli.deploy.deployment_warnings import doubts, is_in_a_pod, pod_traps, residency_lines
from prfaas.cli.deploy.pool_alone import check_pool
from prfaas.cli.deploy.progress import StartProgress
from prfaas.cli.deploy.quality_lines import check_quality, quality_lines
from prfaas.cli.deploy.renewals import keep_identities
from prfaas.cli.deploy.topology import (
    FILE_NAME,
    Topology,
    check_addresses,
    check_ports,
    check_sockets,
    identity_problems,
    lay_out,
    parts,
    prepare_identities,
    write_targets,
)
from prfaas.cli.host.capacity import check_capacity
from prfaas.cli.host.processes import open_private
from prfaas.cli.preflight.agreement import (
    certain,
    check_agreement,
    uncertain,
    unlike_samplers,
)
from prfaas.cli.preflight.deployment_files import (
    check_client_tls,
    check_tokenizer,
    client_tls_doubts,
    unusable_disk_keys,
    unusable_shared_tiers,
)
from prfaas.cli.preflight.readiness import incomplete
from prfaas.cli.preflight.vllm_flags import check_engine_args, unkept_states, unlisted_args
from prfaas.cli.supervision.client import pool_addresses
from prfaas.cli.supervision.control import control_channel
from prfaas.cli.supervision.keeper import PartChange, Phase, line_of
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.addresses import join_address
from prfaas.config.deployment import Deployment
from prfaas.config.load import load_deployment
from prfaas.config.tenants import open_doors
from prfaas.engines.shared_memory import remove_abandoned
from prfaas.errors import ConfigError
from prfaas.presentation import console_for

console = console_for(160)


OVERLAY = click.option(
    "--with",
    "overlay",
    type=PATH,
    help="Settings that take precedence over FILE's, as `prfaas plan --emit` writes them.",
)


@click.command()
@click.argument("file", type=PATH)
@OVERLAY
@click.option("--pool", help="Check this pool node alone: the other parts run on other hosts.")
def check(file: Path, overlay: Path | None, pool: str | None) -> None:
    """Validate the deployment in FILE without starting it; exit code 2 if it is invalid.

    If its pool nodes run and the gateway's identity is on this machine, also print which engines
    share blocks and what is converted between them; exit code 1 if some cannot.

    \b
    Examples:
      prfaas check examples/laptop.toml
      prfaas check examples/two-sites.toml --pool prfaas-pool
    """
    deployment = load_deployment(file, overlay)
    if pool is not None:
        problems, warnings = check_pool(deployment, pool)
        _print_findings(problems, warnings)
        console.print(f"{file}: ok for {pool}")
        return
    check_deployment(deployment)
    check_agreement(deployment)
    for cluster_name, cluster in deployment.clusters.items():
        here = [name for name, engine in cluster.engines.items() if not engine.url]
        console.print(
            f"cluster {cluster_name} ({cluster.role}): "
            f"{_many(len(cluster.engines), 'engine')}, {_many(len(cluster.pools), 'pool node')}; "
            f"{_many(len(here), 'engine')} started by `prfaas up` on this machine"
        )
    for line in (*residency_lines(deployment), *quality_lines(deployment)):
        console.print(line, markup=False, soft_wrap=True)
    _print_findings(_not_here_yet(deployment), ())
    _warn(deployment)
    refused = _show_compatibility(deployment)
    console.print(f"{file}: ok")
    if refused:
        raise click.exceptions.Exit(EXIT_FAILURE)


def _print_findings(problems: Iterable[str], warnings: Iterable[str]) -> None:
    for problem in problems:
        console.print(f"not on this machine now: {problem}", markup=False)
    for warning in warnings:
        console.print(f"warning: {warning}", soft_wrap=True, markup=False)


def _show_compatibility(deployment: Deployment) -> bool:
    """Print what running engines share; True if a pair shares nothing."""
    from prfaas.cli.preflight.compatibility import absent, pairs, surveyed, table_of

    found = surveyed(deployment, pool_addresses(deployment))
    for line in absent(deployment, found):
        console.print(line, markup=False, soft_wrap=True)
    shown = pairs(deployment, found)
    if shown:
        console.print(table_of(shown))
    refused = [pair for pair in shown if pair.is_refused]
    for pair in refused:
        console.print(pair.words, markup=False, soft_wrap=True)
    return bool(refused)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _not_here_yet(deployment: Deployment) -> Iterator[str]:
    """Return obstacles to a start on this machine; the file itself can be valid."""
    yield from identity_problems(deployment)
    # Ports of a pod are its own parts', which may run already.
    for look in (check_shared_memory,) if is_in_a_pod() else (check_ports, check_shared_memory):
        try:
            look(deployment)
        except ConfigError as error:
            yield str(error)
    yield from unusable_shared_tiers(deployment)
    yield from unusable_disk_keys(deployment)


@click.command()
@click.argument("file", type=PATH)
@OVERLAY
@click.option("--restart", is_flag=True, help="Restart parts that fail.")
@logs_of_parts
def up(file: Path, overlay: Path | None, restart: bool) -> None:
    """Run the deployment in FILE until stopped, in the foreground.

    Starts every part without `url` or `address` in FILE, prints the endpoint, and reports failures
    of parts; other parts keep running. `prfaas ctl parts` shows all parts, `prfaas ctl restart
    PART` restarts one. Ctrl-C stops all.

    \b
    Examples:
      prfaas up examples/laptop.toml
      prfaas up examples/laptop.toml --log-format json
      prfaas plan plan.toml --emit > settings.toml
      prfaas up two-sites.toml --with settings.toml
    """
    deployment = load_deployment(file, overlay)

    async def run(stop: asyncio.Event) -> None:
        async with running(deployment, file, stop, overlay, restart=restart) as (topology, parts):
            _announce(topology, parts)
            if problem := await incomplete(topology.gateway_url):
                console.print(f"warning: {problem}", soft_wrap=True, markup=False)
            await stop.wait()

    run_until_stopped(run)


@contextlib.asynccontextmanager
async def running(
    deployment: Deployment,
    file: Path,
    stop: asyncio.Event,
    overlay: Path | None = None,
    *,
    restart: bool = False,
) -> AsyncIterator[tuple[Topology, Supervisor]]:
    """A deployment that runs for as long as the context is open.

    Raises:
        ConfigError: Something in the file, or on this machine, has to change first.
        EngineError: A part ended while it was starting.
        StoppedEarlyError: Stopped while it was starting.
    """
    check_deployment(deployment)
    with state_lock(deployment):
        topology = await make_ready(deployment, file, overlay)
        write_targets(topology)
        lines = PartLines()
        supervisor = Supervisor(
            parts(topology), lines.show, deployment.supervision, restart=restart
        )
        audit = AuditSettings.of(deployment.audit)
        async with control_channel(supervisor, deployment.state, audit):
            try:
                with lines.starting():
                    await start_all(supervisor, stop)
                renewing = asyncio.create_task(
                    keep_identities(supervisor, deployment, console.print)
                )
                try:
                    yield topology, supervisor
                finally:
                    renewing.cancel()
            finally:
                console.print("stopping")
                await supervisor.stop()


@contextlib.contextmanager
def state_lock(deployment: Deployment) -> Iterator[None]:
    """Lock the sockets and logs of a deployment against a second start; ConfigError if it runs
    already, or its directory cannot be written."""
    try:
        deployment.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(deployment.state / "lock", "a", opener=open_private)  # noqa: SIM115 - below
    except OSError as error:
        raise ConfigError(
            f"state = {str(deployment.state)!r} cannot be written: {error.strerror}; "
            "name a directory of this user's"
        ) from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"a deployment with state = {str(deployment.state)!r} runs already; "
                "stop it, or name another state directory"
            ) from None
        yield


async def start_all(supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Start everything, unless stopped meanwhile; StoppedEarlyError if it was."""
    started = asyncio.create_task(supervisor.start())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({started, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            raise StoppedEarlyError
        started.result()
    finally:
        started.cancel()
        stopped.cancel()


def check_deployment(deployment: Deployment) -> None:
    """Return faults beyond the rules of the file.

    Raises:
        ConfigError: The checkpoint, its tokenizer or a plan is missing, two parts have one address
            or folder, the plan, a timing engine's memory, an engine's argument, or what all parts
            would fill here does not fit.
    """
    deployment.check_one_local()
    check_addresses(deployment)
    check_sockets(deployment)
    check_disks(deployment)
    check_client_tls(deployment)
    check_capacity(deployment)
    check_timing(deployment)
    check_plan(deployment)
    check_quality(deployment)
    path = Path(deployment.model.path)
    looks_local = path.is_absolute() or deployment.model.path.startswith(".")
    if looks_local and not deployment.model.generate and not (path / "config.json").exists():
        raise ConfigError(
            f"no checkpoint at {path}: there is no {path / 'config.json'}; "
            "set model.path, or model.generate = true for the small random-weight one"
        )
    check_tokenizer(deployment)
    check_engine_args(deployment)


async def make_ready(deployment: Deployment, file: Path, overlay: Path | None = None) -> Topology:
    """Create missing identities and model, and give every part its address.

    Raises:
        ConfigError: An address is taken, memory does not suffice, or something is missing and may
            not, or cannot, be made.
    """
    check_ports(deployment)
    check_shared_memory(deployment)
    for region in remove_abandoned():
        console.print(f"removed {region}, left by a killed engine")
    prepare_identities(deployment)
    await prepare_model(deployment)
    return lay_out(deployment, file, overlay)


async def prepare_model(deployment: Deployment) -> None:
    """Make the small checkpoint if the file asks for it and it is not there.

    Raises:
        ConfigError: It could not be made.
    """
    path = Path(deployment.model.path)
    if not deployment.model.generate or (path / "config.json").exists():
        return
    # Timing engines have no weights.
    weights = any(cluster.timing is None for cluster in deployment.clusters.values())
    what = "a small random-weight hybrid checkpoint" if weights else "a small tokenizer"
    console.print(f"making {what} in {path}")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "prfaas.engines.checkpoint",
        *([] if weights else ["--tokenizer-only"]),
        str(path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, errors = await process.communicate()
    if process.returncode:
        *_, last = errors.decode(errors="replace").splitlines() or ["it logged nothing"]
        raise ConfigError(f"the checkpoint could not be created: {last}")


def _warn(deployment: Deployment) -> None:
    """Warn about access without a key, readable keys, and certificates that end soon."""
    gateway = deployment.gateway
    doors = [
        request_admission
        for listen in (gateway.listen, *gateway.replicas.values())
        for request_admission in open_doors(
            listen,
            tenants=bool(deployment.tenants),
            operator_keys=bool(deployment.operator_keys),
            tls=gateway.tls is not None,
        )
    ]
    found = (
        open_secrets(deployment),
        short_lived(deployment),
        client_tls_doubts(deployment),
        doubts(deployment),
        pod_traps(deployment),
        certain(deployment),
        uncertain(deployment),
        unlike_samplers(deployment),
        unlisted_args(deployment),
        unkept_states(deployment),
    )
    _print_findings((), chain(doors, *found))


def _announce(topology: Topology, supervisor: Supervisor) -> None:
    url, model = topology.gateway_url, topology.deployment.model.name
    for change in supervisor.changes():
        if change.phase is not Phase.READY:
            console.print(f"warning: {line_of(change)}", markup=False, soft_wrap=True)
    console.print(f"\nready at {url}/v1   (model {model})\n")
    key = ' -H "Authorization: Bearer $KEY"' if topology.deployment.tenants else ""
    console.print(
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{model}", "max_tokens": 32, "temperature": 0, '
        '"messages": [{"role": "user", "content": "Hello"}]}\'\n',
        soft_wrap=True,
        markup=False,
    )
    console.print(f"console at {url}/console: what goes where, and why", markup=False)
    for name, admin in topology.admins.items():
        console.print(f"metrics of {name} at http://{join_address(admin)}/metrics", markup=False)
    state = topology.deployment.state
    console.print(f"metrics of all parts, for Prometheus: {state / FILE_NAME}", soft_wrap=True)
    _warn(topology.deployment)
    console.print(f"logs in {topology.deployment.state / 'logs'}; Ctrl-C stops everything")


class PartLines:
    """Prints changes of parts: as a table while they start, a line each afterwards."""

    def __init__(self) -> None:
        self._progress: StartProgress | None = None

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Show a table while the context is open."""
        with StartProgress(console) as progress:
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None

    def show(self, change: PartChange) -> None:
        """A part is in a new phase."""
        if self._progress is not None:
            self._progress.show(change)
        else:
            console.print(line_of(change), markup=False, soft_wrap=True)
