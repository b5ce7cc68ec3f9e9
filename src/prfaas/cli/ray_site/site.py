"""A site on a Ray cluster: its hosts, its parts, and the number of its engines."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prfaas.cli.host.admin_ports import admin_port
from prfaas.cli.host.free_ports import free_ports
from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.ray_site.hosts import Host, Needs
from prfaas.cli.ray_site.parts import (
    PartSpec,
    Places,
    engines_of,
    member_files,
    members_folder,
)
from prfaas.cli.ray_site.remote_part import RemotePart
from prfaas.cli.supervision.restarts import Phase
from prfaas.cli.supervision.supervisor import PartChange, Supervisor
from prfaas.config.addresses import split_address
from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError
from prfaas.units import NS_PER_S

LEAVE_S = 2.0
"""Time in which gateways have read that an engine is not listed any more."""
POLL_S = 0.2


class RaySite:
    """The parts of a deployment file on a Ray cluster.

    Args:
        file: Its absolute path, the same on every host.
        needs: Resources of an "engine", a "pool" and a "gateway".
        num_engines: Engines of each cluster at the start; the others of the file are spares.
        on_change: Called at every change of a part.

    Raises:
        ConfigError: The file is of no such site.
    """

    def __init__(
        self,
        deployment: Deployment,
        file: Path,
        needs: Mapping[str, Needs],
        num_engines: Mapping[str, int],
        on_change: Callable[[PartChange], None],
    ) -> None:
        check_site(deployment)
        self._deployment, self._file = deployment, file
        self._run = secrets.token_hex(4)
        self._engines: set[str] = set()
        for cluster, names in self.engines_here().items():
            count = num_engines.get(cluster, len(names))
            self._check_count(cluster, count)
            self._engines |= set(names[:count])
        if unknown := sorted(num_engines.keys() - deployment.clusters.keys()):
            raise ConfigError(f"there is no cluster {unknown[0]!r} in {file}")
        self._host_of = self._hosts(needs)
        self._ports = self._free_ports()
        self._scaling = asyncio.Lock()
        self._on_change = on_change
        self.supervisor = Supervisor([])

    def lay_out(self) -> Supervisor:
        """The supervisor of all parts; every host has its node."""
        deployment = self._deployment
        gateway = deployment.gateway.name
        pools: list[ProcessPart] = [self._remote(name) for name in self._pools()]
        others: list[ProcessPart] = [
            self._remote(n) for n in self._engine_names() if n in self._engines
        ]
        self.supervisor = Supervisor(
            [stage for stage in (pools, [*others, self._remote(gateway)]) if stage],
            self._changed,
            deployment.supervision,
            restart=True,
        )
        return self.supervisor

    @property
    def hosts(self) -> list[Host]:
        """The hosts, each once."""
        return list(dict.fromkeys(self._host_of.values()))

    def engines_here(self) -> dict[str, list[str]]:
        """Engines without `url` by cluster."""
        return {
            cluster: [name for name, engine in table.engines.items() if not engine.url]
            for cluster, table in self._deployment.clusters.items()
        }

    @property
    def gateway_address(self) -> tuple[str, int]:
        """Where clients reach the gateway."""
        return self._places().gateway

    async def scale(self, cluster: str, count: int) -> list[str]:
        """Change the number of engines of a cluster; see `prfaas.cli.supervision.control.Scale`."""
        self._check_count(cluster, count)
        names = self.engines_here()[cluster]
        async with self._scaling:
            for name in [n for n in names[:count] if n not in self._engines]:
                self._engines.add(name)
                self.supervisor.add(self._remote(name))
                await self._ready(name)
                self.spread_members()
            leaving = [name for name in names[count:] if name in self._engines]
            self._engines -= set(leaving)
            self.spread_members()
            for name in reversed(leaving):
                await self._drained(name)
                await self.supervisor.remove(name)
        return names[:count]

    def spread_members(self) -> None:
        """Send the member files to all hosts."""
        folder, files = self._members()
        for part in self.supervisor.parts:
            if isinstance(part, RemotePart):
                part.write_members(folder, files)

    def _changed(self, change: PartChange) -> None:
        if change.phase is Phase.STARTING:
            self.spread_members()  # it may have moved
        self._on_change(change)

    async def _ready(self, name: str) -> None:
        while (phase := self._phase(name)) is not Phase.READY:
            if phase is Phase.FAILED:
                raise ConfigError(f"engine {name} does not start; see `prfaas ctl parts`")
            await asyncio.sleep(POLL_S)

    async def _drained(self, name: str) -> None:
        """Wait until an engine that is not listed any more has no request, for the drain time."""
        part = self.supervisor.part(name)
        limit_s = self._deployment.gateway.drain_timeout / NS_PER_S
        deadline, left_at = time.monotonic() + LEAVE_S + limit_s, time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            if time.monotonic() < left_at or not isinstance(part, RemotePart):
                continue
            if await part.is_idle(part.places[name]):
                return

    def _phase(self, name: str) -> Phase:
        return next(c.phase for c in self.supervisor.changes() if c.part.name == name)

    def _check_count(self, cluster: str, count: int) -> None:
        if cluster not in self._deployment.clusters:
            known = ", ".join(self._deployment.clusters)
            raise ConfigError(f"there is no cluster {cluster!r} in {self._file}, which has {known}")
        most = len(self.engines_here()[cluster])
        if most and not 1 <= count <= most:
            raise ConfigError(
                f"{count} engines of {cluster} are asked for; {self._file} has {most}, and 1 is "
                "the least: name more engines in the file and start the site again"
            )

    def _pools(self) -> list[str]:
        return [
            name
            for table in self._deployment.clusters.values()
            for name, pool in table.pools.items()
            if not pool.address
        ]

    def _engine_names(self) -> list[str]:
        return [name for names in self.engines_here().values() for name in names]

    def _hosts(self, needs: Mapping[str, Needs]) -> dict[str, Host]:
        found: dict[str, Host] = {}
        for name in self._pools():
            engines = [
                e for e in self._engine_names() if engines_of(self._deployment)[e].pool == name
            ]
            host = Host(name, {name: needs["pool"]} | dict.fromkeys(engines, needs["engine"]))
            found |= dict.fromkeys(host.needs, host)
        gateway = self._deployment.gateway.name
        return found | {gateway: Host(gateway, {gateway: needs["gateway"]})}

    def _free_ports(self) -> dict[str, int]:
        """A port for every part: that of the file, else one that is free on this machine."""
        deployment, found, free = self._deployment, dict[str, int](), free_ports()
        listens: dict[str, str | None] = {deployment.gateway.name: deployment.gateway.listen}
        for table in deployment.clusters.values():
            listens |= {name: pool.listen for name, pool in table.pools.items()}
            listens |= {f"admin {name}": pool.admin for name, pool in table.pools.items()}
            listens |= {name: engine.listen for name, engine in table.engines.items()}
        for name, listen in listens.items():
            port = split_address(listen)[1] if listen else 0
            if not port and name.startswith("admin "):
                port = admin_port(deployment.state, name.removeprefix("admin "))
            found[name] = port or next(each for each in free if _is_free(each))
        return found

    def _places(self) -> Places:
        """Addresses by the nodes on which the hosts are now."""
        deployment, ports = self._deployment, self._ports
        nodes = {host: (host.node() or ("", ""))[1] for host in self.hosts}
        at = {name: nodes[host] for name, host in self._host_of.items() if nodes[host]}
        pools = {name: (at[name], ports[name]) for name in self._pools() if name in at}
        listen = split_address(deployment.gateway.listen)[0] if deployment.gateway.listen else ""
        gateway = listen or at.get(deployment.gateway.name, "127.0.0.1")
        return Places(
            pools,
            {name: (at[name], ports[name]) for name in self._engine_names() if name in at},
            (gateway, ports[deployment.gateway.name]),
            {name: (self._admin_host(name), ports[f"admin {name}"]) for name in pools},
        )

    def _admin_host(self, pool: str) -> str:
        admin = self._deployment.pools[pool].admin
        return split_address(admin)[0] if admin else "127.0.0.1"

    def _members(self) -> tuple[Path, dict[str, str]]:
        files = member_files(self._deployment, self._places(), self._engines)
        return members_folder(self._deployment), files

    def _remote(self, name: str) -> RemotePart:
        return RemotePart(
            self._part(name), self._host_of[name], lambda: self._spec(name), self._members
        )

    def _spec(self, name: str) -> PartSpec:
        return PartSpec(self._file, name, self._run, self._places())

    def _part(self, name: str) -> ProcessPart:
        return self._spec(name).part()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return port > 0


def check_site(deployment: Deployment) -> None:
    """Check that Ray can run the parts of a deployment.

    Raises:
        ConfigError: It cannot.
    """
    for cluster, table in deployment.clusters.items():
        if table.timing is not None and table.timing.one_process:
            raise ConfigError(
                f"clusters.{cluster}.timing.one_process puts several engines in one process; with "
                "`prfaas ray` each has an actor: leave it out"
            )
    if deployment.gateway.replicas:
        raise ConfigError(
            "gateway.replicas names gateways that run elsewhere, and `prfaas ray` starts one: "
            "start the others with `prfaas gateway`, on the member files of their host"
        )
    if deployment.membership.folder is not None:
        raise ConfigError(
            "membership.folder is the directory of `prfaas ray` itself; leave it out of the file"
        )
