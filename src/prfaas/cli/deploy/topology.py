"""Conversion of a deployment file to processes, with their ports and peers.

Prometheus' targets have the form of its file-based service discovery:
https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.cli.host.ports import admin_port, free_ports
from prfaas.cli.host.processes import STOP_S, ProcessPart
from prfaas.config.addresses import Endpoints, join_address, split_address
from prfaas.config.clusters import ClusterTable
from prfaas.config.deployment import Deployment
from prfaas.config.governance.residency import pool_footprint
from prfaas.core.transfer.residency import Regions
from prfaas.engines.launch import Command, engine_command, shared_memory_files, timing_command
from prfaas.errors import ConfigError
from prfaas.units import NS_PER_S
from prfaas.wire.allow_list import wrong_regions
from prfaas.wire.certificates import faults, reissue, renew_due
from prfaas.wire.identity import identity_in, make_authority, make_identity

Address = tuple[str, int]
WARM_UP_TOKENS = 64
ADMIN_TRIES = 20
SOCKET_BYTES_MAX = 107
"""`sun_path` of Linux, less the zero at its end."""
ENGINE_START_TIMEOUT_NS = 30 * 60 * NS_PER_S
"""Loading the weights of a large model takes many minutes."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A deployment with an address for every part."""

    deployment: Deployment
    file: Path
    overlay: Path | None
    """Settings that take precedence over the file's; None for none."""
    run: str
    """Identifier of this start."""
    pools: dict[str, Address]
    """Place where each pool node is reached."""
    engines: dict[str, str]
    """Base URL of each engine."""
    gateway: Address
    """Place where the gateway listens."""
    admins: dict[str, Address]
    """Place where the pool nodes started here serve health and metrics."""

    @property
    def endpoints(self) -> Endpoints:
        """The same, as the gateway wants it."""
        return Endpoints(engines=self.engines, pools=self.pools)

    @property
    def gateway_url(self) -> str:
        """Base URL of the gateway."""
        return f"{self.deployment.gateway.scheme}://{join_address(self.gateway)}"


def lay_out(deployment: Deployment, file: Path, overlay: Path | None = None) -> Topology:
    """Give every part of a deployment its address; ConfigError if a `listen` address is taken."""
    pools: dict[str, Address] = {}
    admins: dict[str, Address] = {}
    engines: dict[str, str] = {}
    # A found port is free until its part listens, so it is not given to another part.
    taken = {split_address(listen)[1] for _, listen in listens(deployment)}
    for cluster in deployment.clusters.values():
        for name, pool in cluster.pools.items():
            if pool.address:
                pools[name] = split_address(pool.address)
            else:
                pools[name] = _own_address(name, pool.listen, taken)
                admins[name] = _admin_address(deployment, name, pool.admin, taken)
        for name, engine in cluster.engines.items():
            engines[name] = (
                engine.url or f"http://{join_address(_own_address(name, engine.listen, taken))}"
            )
    gateway = _own_address(deployment.gateway.name, deployment.gateway.listen, taken)
    run = secrets.token_hex(4)
    return Topology(deployment, file, overlay, run, pools, engines, gateway, admins)


def parts(topology: Topology) -> list[list[ProcessPart]]:
    """The processes that this machine starts, by stage: pool nodes first."""
    deployment = topology.deployment
    pools: list[ProcessPart] = []
    engines: list[ProcessPart] = []
    for cluster_name, cluster in deployment.clusters.items():
        pools += [
            _pool_part(topology, cluster, name)
            for name, pool in cluster.pools.items()
            if not pool.address
        ]
        here = [name for name, engine in cluster.engines.items() if not engine.url]
        if cluster.timing is None:
            engines += [_engine_part(topology, cluster, name) for name in here]
        else:
            engines += [
                _timing_part(topology, cluster_name, names) for names in _processes(cluster, here)
            ]
    return [stage for stage in (pools, [*engines, _gateway_part(topology)]) if stage]


def prepare_identities(deployment: Deployment) -> None:
    """See that every part started here has an identity.

    Raises:
        ConfigError: One is missing and may not be made, or no peer would let it in.
    """
    directory, names = deployment.security.identities, identity_names(deployment)
    if deployment.security.generate:
        make_authority(directory)
        for name in names:
            regions = regions_of_part(deployment, name)
            identity = make_identity(directory, name, regions=regions)
            if wrong_regions(identity.certificate, name, regions):
                reissue(directory, name, regions)
        renew_due(directory, names, datetime.datetime.now(datetime.UTC))
    for problem in identity_problems(deployment):
        raise ConfigError(problem)


def identity_problems(deployment: Deployment, names: Sequence[str] | None = None) -> Iterator[str]:
    """Return missing or invalid identities of parts started here that are not created.

    Args:
        names: The parts; all that are started here if absent.
    """
    security, now = deployment.security, datetime.datetime.now(datetime.UTC)
    for name in identity_names(deployment) if names is None else names:
        identity = identity_in(security.identities, name)
        files = (identity.authority, identity.certificate, identity.key)
        missing = [path for path in files if not path.exists()]
        closed = [path for path in files if path not in missing and not os.access(path, os.R_OK)]
        if closed:
            found = closed[0].stat()
            yield (
                f"identity file {closed[0]} cannot be read: it is of user {found.st_uid} and "
                f"group {found.st_gid} with mode {stat.S_IMODE(found.st_mode):o}, and this is user "
                f"{os.getuid()}; give it to that user (in Kubernetes: fsGroup of the pod)"
            )
        elif not missing:
            yield from faults(identity, name, now)
            wanted = regions_of_part(deployment, name)
            if not security.generate and (why := wrong_regions(identity.certificate, name, wanted)):
                yield why
        elif not security.generate:
            yield (
                f"identity file {missing[0]} is missing; make it with `prfaas identity {name}` "
                f"where the deployment's ca.key is, and carry it to {security.identities}"
            )


def identity_names(deployment: Deployment) -> list[str]:
    """Names of the parts started here that need an identity."""
    # A replica may run on another machine, with an identity that was made elsewhere.
    names = deployment.gateways if deployment.security.generate else [deployment.gateway.name]
    for cluster in deployment.clusters.values():
        names += [name for name, pool in cluster.pools.items() if not pool.address]
    return names


def regions_of_part(deployment: Deployment, name: str) -> Regions:
    """Regions that the certificate of a pool node or gateway has to name."""
    for cluster in deployment.clusters.values():
        if name in cluster.pools:
            return pool_footprint(cluster, cluster.pools[name])
    return deployment.gateway_regions


def check_addresses(deployment: Deployment) -> None:
    """See that every `listen` address is given to one part only; ConfigError if one is not."""
    owners: dict[Address, str] = {}
    for name, listen in [*listens(deployment), *deployment.gateway.replicas.items()]:
        address = split_address(listen)
        other = owners.setdefault(address, name)
        if other != name and address[1]:
            raise ConfigError(
                f"{other} and {name} cannot both listen on {join_address(address)}; "
                "name another port for one of them"
            )


def check_sockets(deployment: Deployment) -> None:
    """Check that the sockets of pool nodes started here have paths that the kernel takes;
    ConfigError if one is too long."""
    for cluster in deployment.clusters.values():
        for name, pool in cluster.pools.items():
            path = deployment.pool_socket(name).absolute()
            size = len(os.fsencode(path))
            if not pool.address and size > SOCKET_BYTES_MAX:
                raise ConfigError(
                    f"state = {str(deployment.state)!r}: the socket of {name} would be {path}, "
                    f"{size} bytes, and a socket's path has {SOCKET_BYTES_MAX} at most; name a "
                    "shorter directory, such as one in /run"
                )


def check_ports(deployment: Deployment) -> None:
    """See that every `listen` address is free on this machine; ConfigError if one is not."""
    for name, listen in listens(deployment):
        _bind(name, split_address(listen))


def port_problem(name: str, listen: str) -> str | None:
    """Return the reason for which a part cannot listen at an address; None if it can."""
    try:
        _bind(name, split_address(listen))
    except ConfigError as error:
        return str(error)
    return None


def listens(deployment: Deployment) -> list[tuple[str, str]]:
    """Name and address of all that listens on this machine at a place of the file."""
    found = [(deployment.gateway.name, deployment.gateway.listen)]
    for cluster in deployment.clusters.values():
        here = [(name, pool) for name, pool in cluster.pools.items() if not pool.address]
        found += [(name, pool.listen or "") for name, pool in here]
        found += [(f"admin of {name}", pool.admin or "") for name, pool in here]
        found += [(name, engine.listen or "") for name, engine in cluster.engines.items()]
    return [(name, listen) for name, listen in found if listen]


def _pool_part(topology: Topology, cluster: ClusterTable, name: str) -> ProcessPart:
    deployment = topology.deployment
    admin = join_address(topology.admins[name])
    args = [sys.executable, "-m", "prfaas", "pool", str(topology.file), "--name", name]
    if topology.overlay is not None:
        args += ["--with", str(topology.overlay)]
    args += ["--listen", join_address(topology.pools[name]), "--admin", admin]
    for peer in deployment.destinations(name):
        args += ["--peer", f"{peer}={join_address(topology.pools[peer])}"]
    return ProcessPart(
        name=name,
        kind="pool node",
        command=Command(args, dict(os.environ)),
        health_url=f"http://{admin}/health",
        log=_log(deployment, name),
        places={name: join_address(topology.pools[name])},
        stop_s=cluster.pools[name].drain_timeout / NS_PER_S + STOP_S,
    )


def _engine_part(topology: Topology, cluster: ClusterTable, name: str) -> ProcessPart:
    deployment, engine = topology.deployment, cluster.engines[name]
    url = topology.engines[name]
    return ProcessPart(
        name=name,
        kind="engine",
        command=engine_command(
            name,
            engine,
            deployment.model,
            split_address(url.removeprefix("http://")),
            deployment.pool_socket(engine.pool),
            topology.run,
        ),
        health_url=f"{url}/health",
        log=_log(deployment, name),
        leftovers=[shared_memory_files(name, topology.run)],
        start_timeout_ns=ENGINE_START_TIMEOUT_NS,
        places={name: url},
        warm_up=(
            f"{url}/v1/completions",
            {
                "model": deployment.model.name,
                "prompt": list(range(WARM_UP_TOKENS)),
                "max_tokens": 2,
            },
        ),
    )


def _processes(cluster: ClusterTable, names: list[str]) -> list[list[str]]:
    """Timing engines by the process they run in."""
    if cluster.timing is None or not cluster.timing.one_process:
        return [[name] for name in names]
    of_pool: dict[str, list[str]] = {}
    for name in names:
        of_pool.setdefault(cluster.engines[name].pool, []).append(name)
    return list(of_pool.values())


def _timing_part(topology: Topology, cluster_name: str, names: list[str]) -> ProcessPart:
    deployment = topology.deployment
    cluster, first = deployment.clusters[cluster_name], names[0]
    urls = {name: topology.engines[name] for name in names}
    return ProcessPart(
        name=first,
        kind="timing engine" if len(names) == 1 else f"{len(names)} timing engines",
        command=timing_command(
            names,
            (cluster_name, cluster),
            deployment.model,
            {name: split_address(url.removeprefix("http://")) for name, url in urls.items()},
            deployment.pool_socket(cluster.engines[first].pool),
        ),
        health_url=f"{urls[names[-1]]}/health",
        log=_log(deployment, first),
        places=urls,
    )


def _gateway_part(topology: Topology) -> ProcessPart:
    table = topology.deployment.gateway
    args = [sys.executable, "-m", "prfaas", "gateway", str(topology.file)]
    args += ["--listen", join_address(topology.gateway)]
    if topology.overlay is not None:
        args += ["--with", str(topology.overlay)]
    for name, url in topology.engines.items():
        args += ["--engine", f"{name}={url}"]
    for name, address in topology.pools.items():
        args += ["--pool", f"{name}={join_address(address)}"]
    # Layouts that differ keep requests local, and nothing from starting.
    query = "?full=parts" if _is_all_here(topology) else ""
    return ProcessPart(
        name=topology.deployment.gateway.name,
        kind="gateway",
        command=Command(args, dict(os.environ)),
        # Its `/health` depends on engines, which may take far longer than a gateway to start.
        health_url=f"{topology.gateway_url}/version",
        whole_url=f"{topology.gateway_url}/health{query}",
        places={topology.deployment.gateway.name: topology.gateway_url},
        log=_log(topology.deployment, topology.deployment.gateway.name),
        stop_s=(table.lame_duck + table.drain_timeout) / NS_PER_S + STOP_S,
    )


def _is_all_here(topology: Topology) -> bool:
    """Return True if every part is started on this machine; others are not waited for."""
    clusters = topology.deployment.clusters.values()
    return not any(
        [engine.url for cluster in clusters for engine in cluster.engines.values()]
        + [pool.address for cluster in clusters for pool in cluster.pools.values()]
    )


def _log(deployment: Deployment, name: str) -> Path:
    return deployment.state / "logs" / f"{name}.log"


def _admin_address(
    deployment: Deployment, name: str, admin: str | None, taken: set[int]
) -> Address:
    """Address of a pool node's health and metrics: that of the file, else a derived port."""
    if admin is not None:
        return _own_address(name, admin, taken)
    first = admin_port(deployment.state, name)
    for port in range(first, first + ADMIN_TRIES):
        if port not in taken:
            with contextlib.suppress(ConfigError):
                return _own_address(name, f"127.0.0.1:{port}", taken)
    return _own_address(name, None, taken)


def _own_address(name: str, listen: str | None, taken: set[int]) -> Address:
    """The address of a part; where it names no port, a free one that no other part has."""
    host, port = split_address(listen) if listen else ("127.0.0.1", 0)
    if port:
        found = _bind(name, (host, port))
        taken.add(port)
        return found
    for candidate in free_ports():
        if candidate not in taken:
            with contextlib.suppress(ConfigError):
                found = _bind(name, (host, candidate))
                taken.add(found[1])
                return found
    return _bind(name, (host, 0))


def _bind(name: str, address: Address) -> Address:
    """Try an address; port 0 finds a free one."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{name} cannot listen on {join_address(address)}: {reason}; "
                "name another address, or stop what uses it"
            ) from None
        return address[0], probe.getsockname()[1]


FILE_NAME = "targets.json"


def targets(topology: Topology) -> list[dict[str, object]]:
    """Parts started here with `/metrics`: gateway, pool nodes, engines."""
    deployment = topology.deployment
    gateway = deployment.gateway.name
    found = [_target("gateway", gateway, join_address(topology.gateway))]
    for cluster_name, cluster in deployment.clusters.items():
        for name in cluster.pools:
            if name in topology.admins:
                place = join_address(topology.admins[name])
                found.append(_target("pool", name, place, cluster_name))
        for name, engine in cluster.engines.items():
            if not engine.url:
                place = topology.engines[name].removeprefix("http://")
                found.append(_target("engine", name, place, cluster_name))
    return found


def write_targets(topology: Topology) -> Path:
    """Write them into the state directory atomically; returns the file."""
    path = topology.deployment.state / FILE_NAME
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(targets(topology), indent=2) + "\n")
    draft.replace(path)
    return path


def _target(kind: str, name: str, place: str, cluster: str | None = None) -> dict[str, object]:
    labels = {"job": f"prfaas-{kind}", "part": name}
    return {"targets": [place], "labels": labels | ({"cluster": cluster} if cluster else {})}
