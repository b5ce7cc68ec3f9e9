"""A site on a Ray cluster: its hosts, its parts, and the number of its engines."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prfaas.cli.host.ports import admin_port, free_ports
from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.ray_site.hosts import Host, Needs
from prfaas.cli.ray_site.parts import Members, PartSpec, engines_of, member_files, members_folder
from prfaas.cli.ray_site.remote import POLL_S, RemoteKeeper
from prfaas.cli.supervision.keeper import PartChange, Phase
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.addresses import split_address
from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError
from prfaas.units import NS_PER_S

LEAVE_S = 2.0
"""Time in which gateways have read that an engine is not listed any more."""


class RaySite:
    """The parts of a deployment file on a Ray cluster; ConfigError if the file is of no such site.

    Args:
        file: Its absolute path, the same on every host.
        needs: Resources of an "engine", a "pool" and a "gateway".
        num_engines: Engines of each cluster at the start; the others of the file are spares.
        on_change: Called at every change of a part.
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
        self._at: dict[str, str] = {}
        """Address of the node of each part that has been placed."""
        self._members = Members(1, members_folder(deployment), {})
        self._scaling = asyncio.Lock()
        self._on_change = on_change
        self.supervisor = Supervisor([])

    def lay_out(self) -> Supervisor:
        """The supervisor of all parts; every host has its node."""
        deployment = self._deployment
        others = [name for name in self._engine_names() if name in self._engines]
        stages = [self._pools(), [*others, deployment.gateway.name]]
        self.supervisor = Supervisor(
            [[self._part(name) for name in stage] for stage in stages if stage],
            self._on_change,
            deployment.supervision,
            restart=True,
            keeper=self._keeper,
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
    def gateway_url(self) -> str:
        """Place where clients reach the gateway."""
        name = self._deployment.gateway.name
        return self.supervisor.part(name).places[name]

    async def scale(self, cluster: str, count: int) -> list[str]:
        """Change the number of engines of a cluster; see `prfaas.cli.supervision.control.Scale`."""
        self._check_count(cluster, count)
        names = self.engines_here()[cluster]
        async with self._scaling:
            for name in [n for n in names[:count] if n not in self._engines]:
                self._engines.add(name)
                self.supervisor.add(self._part(name))
                await self._ready(name)
            leaving = [name for name in names[count:] if name in self._engines]
            self._engines -= set(leaving)
            self._spread_members()
            for name in reversed(leaving):
                await self._drained(name)
                await self.supervisor.remove(name)
        return names[:count]

    def _spread_members(self) -> None:
        """Make new member files, which all hosts get."""
        listed = {*self._pools(), *self._engines} & self._at.keys()
        places = {name: (self._at[name], self._ports[name]) for name in listed}
        files, version = member_files(self._deployment, places), self._members.version + 1
        self._members = replace(self._members, version=version, files=files)

    def _found(self, name: str, host: str) -> None:
        """A part is on a node."""
        if self._at.get(name) != host:
            self._at[name] = host
            self._spread_members()

    async def _ready(self, name: str) -> None:
        while (phase := self.supervisor.keeper(name).change.phase) is not Phase.READY:
            if phase is Phase.FAILED:
                raise ConfigError(f"engine {name} does not start; see `prfaas ctl parts`")
            await asyncio.sleep(POLL_S)

    async def _drained(self, name: str) -> None:
        """Wait until an engine that is not listed any more has no request, for the drain time."""
        keeper = self.supervisor.keeper(name)
        await asyncio.sleep(LEAVE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deployment.gateway.drain_timeout / NS_PER_S):
                while isinstance(keeper, RemoteKeeper) and not await keeper.is_idle():  # noqa: ASYNC110 - engines signal nothing
                    await asyncio.sleep(POLL_S)

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

    def _spec(self, name: str) -> PartSpec:
        return PartSpec(self._file, name, self._run, self._ports)

    def _part(self, name: str) -> ProcessPart:
        """The part as this host would start it: its name, kind, log and limits."""
        return self._spec(name).part("127.0.0.1")

    def _keeper(self, part: ProcessPart, *args: Any, **more: Any) -> RemoteKeeper:
        return RemoteKeeper(
            part,
            *args,
            host=self._host_of[part.name],
            spec=self._spec(part.name),
            members=lambda: self._members,
            on_host=self._found,
            **more,
        )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return port > 0


def check_site(deployment: Deployment) -> None:
    """Check that Ray can run the parts of a deployment; ConfigError if it cannot."""
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
