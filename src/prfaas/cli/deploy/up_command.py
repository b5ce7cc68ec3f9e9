"""`prfaas up` and `prfaas check`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import click

from prfaas.audit.settings import AuditSettings
from prfaas.cli.common.options import DEPLOYMENT, PATH, logs_of_parts
from prfaas.cli.common.signals import EXIT_FAILURE, run_until_stopped, unless_stopped
from prfaas.cli.deploy.deployment_checks import (
    check_disks,
    check_plan,
    check_shared_memory,
    check_timing,
    open_secrets,
    short_lived,
    uninstalled,
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
    listens,
    parts,
    port_problem,
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
from prfaas.cli.preflight.compatibility import absent, pairs, surveyed, table_of
from prfaas.cli.preflight.deployment_files import (
    check_client_tls,
    check_tokenizer,
    client_tls_doubts,
    unusable_disk_keys,
    unusable_shared_tiers,
)
from prfaas.cli.preflight.live_parts import engine_problems, pool_problems, serves
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
from prfaas.engines.checkpoint import make_checkpoint
from prfaas.engines.shared_memory import remove_abandoned
from prfaas.errors import ConfigError
from prfaas.extras import require
from prfaas.presentation import console_for
from prfaas.wire.messages.survey import Surveyed

console = console_for(160)


OVERLAY = click.option(
    "--with",
    "overlay",
    type=PATH,
    help="Settings that take precedence over FILE's, as `prfaas plan --emit` writes them.",
)


@click.command()
@click.argument("file", type=DEPLOYMENT)
@OVERLAY
@click.option("--pool", help="Check this pool node alone: the other parts run on other hosts.")
@click.option("--strict", is_flag=True, help="Count warnings as failures.")
def check(file: Path, overlay: Path | None, pool: str | None, strict: bool) -> None:
    """Validate the deployment in FILE without starting it; exit code 2 if it is invalid.

    Exit code 1 if something would make requests fail, or keep them from being offloaded: a missing
    or wrong identity, an address in use, a package that is not installed, an engine at a `url` that
    does not answer or serves another model, a pool node at an `address` that does not answer,
    engines that cannot share blocks. Each failure is a line with the next step. If pool nodes run,
    also print which engines share blocks and what is converted between them.

    \b
    Examples:
      prfaas check examples/laptop.toml
      prfaas check examples/laptop.toml --strict
      prfaas check examples/two-sites.toml --pool prfaas-pool
    """
    deployment = load_deployment(file, overlay)
    if pool is not None:
        problems, warnings = check_pool(deployment, pool)
        _conclude(f"{file}: ok for {pool}", f"{file}", problems, warnings, strict=strict)
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
    found = surveyed(deployment, pool_addresses(deployment))
    shown = _show_compatibility(deployment, found)
    failures = [*_failures(deployment, found), *pool_problems(deployment, found), *shown]
    _conclude(f"{file}: ok", f"{file}", failures, list(_warnings(deployment)), strict=strict)


def _conclude(
    fine: str, file: str, failures: Sequence[str], warnings: Sequence[str], *, strict: bool
) -> None:
    """Print findings and the result; end with exit code 1 if it is a failure."""
    for failure in failures:
        console.print(f"failure: {failure}", soft_wrap=True, markup=False)
    _print_warnings(warnings)
    if not failures and not (strict and warnings):
        console.print(fine, soft_wrap=True, markup=False)
        return
    counts = [_many(len(failures), "failure"), _many(len(warnings), "warning")]
    console.print(f"{file}: {', '.join(counts)}", soft_wrap=True, markup=False)
    raise click.exceptions.Exit(EXIT_FAILURE)


def _print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}", soft_wrap=True, markup=False)


def _show_compatibility(
    deployment: Deployment, found: Mapping[str, Surveyed | str]
) -> Iterator[str]:
    """Print what running engines share; yield a failure for each pair that shares nothing."""
    for line in absent(deployment, found):
        console.print(line, markup=False, soft_wrap=True)
    shown = pairs(deployment, found)
    if shown:
        console.print(table_of(shown))
    yield from (pair.words for pair in shown if pair.is_refused)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _failures(deployment: Deployment, found: Mapping[str, Surveyed | str]) -> Iterator[str]:
    """Return what would keep parts from starting on this machine, or from serving requests."""
    yield from uninstalled(deployment)
    yield from identity_problems(deployment)
    is_running = _runs_here(deployment)
    # Ports of a pod are its own parts', which may run already.
    if not is_running and not is_in_a_pod():
        yield from _ports_in_use(deployment, found)
    if not is_running:
        try:
            check_shared_memory(deployment)
        except ConfigError as error:
            yield str(error)
    yield from unusable_shared_tiers(deployment)
    yield from unusable_disk_keys(deployment)
    yield from engine_problems(deployment)


def _ports_in_use(deployment: Deployment, found: Mapping[str, Surveyed | str]) -> Iterator[str]:
    """Return addresses that are taken, but for those of parts that run already by themselves."""
    for name, listen in listens(deployment):
        problem = port_problem(name, listen)
        pool = name.removeprefix("admin of ")
        is_own = isinstance(found.get(pool), Surveyed)
        if problem is not None and not is_own and not serves(deployment, listen):
            yield problem


def _runs_here(deployment: Deployment) -> bool:
    """Return True if `prfaas up` runs this deployment."""
    try:
        with (deployment.state / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@click.command()
@click.argument("file", type=DEPLOYMENT)
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
    await unless_stopped(supervisor.start(), stop)


def check_deployment(deployment: Deployment) -> None:
    """Return faults beyond the rules of the file.

    Raises:
        ConfigError: The checkpoint, its tokenizer or a plan is missing, two parts have one address
            or folder, the plan, a timing engine's memory, an engine's argument, or what all parts
            would fill here does not fit.
    """
    require("a gateway, which starts here,", "gateway")
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
    for problem in uninstalled(deployment):
        raise ConfigError(problem)
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
    if all(cluster.timing is not None for cluster in deployment.clusters.values()):
        # Timing engines have no weights.
        make_checkpoint(path, weights=False)
        return
    console.print(f"making a small random-weight hybrid checkpoint in {path}")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "prfaas.engines.checkpoint",
        str(path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, errors = await process.communicate()
    if process.returncode:
        *_, last = errors.decode(errors="replace").splitlines() or ["it logged nothing"]
        raise ConfigError(f"the checkpoint could not be created: {last}")


def _warnings(deployment: Deployment) -> Iterator[str]:
    """Access without a key, readable keys, certificates that end soon, and doubts."""
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
    yield from chain(doors, *found)


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
    _print_warnings(_warnings(topology.deployment))
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
