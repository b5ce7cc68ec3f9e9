"""The deployment file as a source of members: a change of them is applied whole, or refused whole.

What else changes waits for a restart, and is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prfaas.config.deployment import Deployment
from prfaas.core.membership.members import Listed, Site, accepted
from prfaas.errors import ConfigError
from prfaas.limited_files import digest_of
from prfaas.membership.entries import entries_of, site_of
from prfaas.membership.peer_entries import PeerClusters, cluster_of, peer_entries
from prfaas.membership.port import OnList

POLL_S = 0.5
"""Time between two looks at a file; a change is read once two looks find the same content."""


@dataclass(frozen=True, slots=True)
class FileView:
    """The parts of a deployment file that matter to a process."""

    process: str
    """"gateway" or "pool node"; in error messages."""
    site: Site
    """The facts with which its members have to agree."""
    entries: Callable[[Deployment], Sequence[Listed]]
    """Returns its members; raises ValueError."""
    fixed: Callable[[Deployment], dict[str, object]]
    """Returns what must not change while it runs, by key; raises ValueError."""
    later: Callable[[Deployment], dict[str, object]]
    """Returns what it reads at its start only, by key; raises ValueError."""


class DeploymentFile:
    """The members in a deployment file.

    Args:
        paths: The file, and settings that take precedence over it.
        load: Reads and checks them.
        deployment: As it was read at the start.
        view: Its parts that matter.
        poll_s: Time between two looks, seconds.
    """

    name = "file"

    def __init__(
        self,
        paths: tuple[Path, ...],
        load: Callable[[], Deployment],
        deployment: Deployment,
        view: FileView,
        poll_s: float = POLL_S,
    ) -> None:
        self._paths, self._load, self._poll_s = paths, load, poll_s
        self._view, self._fixed, self._later = view, view.fixed(deployment), view.later(deployment)
        self._started_with = {each.member.name: each.member for each in view.entries(deployment)}
        self.fault = self.waits = ""
        self.current_at_s = 0.0

    async def follow(self, on_list: OnList) -> None:
        """See `Source`; the list of the start is the caller's."""
        taken = before = digest_of(self._paths)
        self.current_at_s = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(self._poll_s)
            now = await asyncio.to_thread(digest_of, self._paths)
            if now == before != taken:
                taken = now
                try:
                    on_list(await asyncio.to_thread(self._entries), ())
                    self.fault = ""
                except (ConfigError, ValueError) as error:
                    self.fault = f"the change is refused, the old members stay: {error}"
            before = now
            if not self.fault:
                self.current_at_s = asyncio.get_running_loop().time()

    def _entries(self) -> Sequence[Listed]:
        """Read the file.

        Raises:
            ConfigError: It is wrong.
            ValueError: It changes what members depend on, or a member contradicts the others.
        """
        deployment, view = self._load(), self._view
        if changed := _differing(self._fixed, view.fixed(deployment)):
            raise ValueError(
                f"{changed} cannot change while the {view.process} runs; restart the {view.process}"
            )
        self.waits = _differing(self._later, view.later(deployment))
        found = view.entries(deployment)
        _, refused = accepted(found, self._started_with, view.site)
        if refused:
            raise ValueError("; ".join(f"{each.name}: {each.words}" for each in refused))
        return found


def _differing(before: dict[str, object], now: dict[str, object]) -> str:
    """Keys of what has changed."""
    return ", ".join(key for key in {**before, **now} if now.get(key) != before.get(key))


def gateway_view(
    deployment: Deployment, engines: Mapping[str, str], pools: Mapping[str, tuple[str, int]]
) -> FileView:
    """The view of a gateway.

    Args:
        deployment: As it was read at the start.
        engines: URLs of engines that are given elsewhere.
        pools: Addresses of pool nodes that are given elsewhere.
    """
    entries = partial(entries_of, engines=engines, pools=pools)
    return FileView("gateway", site_of(deployment), entries, _shape, _gateway_later)


def _shape(deployment: Deployment) -> dict[str, object]:
    roles = {f"clusters.{name}.role": each.role for name, each in deployment.clusters.items()}
    return {"names of clusters": set(deployment.clusters), **roles}


def _gateway_later(deployment: Deployment) -> dict[str, object]:
    rest = {key: getattr(deployment, key) for key in type(deployment).model_fields}
    del rest["clusters"]
    for name, table in deployment.clusters.items():
        members: dict[str, object] = {"engines": {}, "pools": {}, "has_roles": False}
        rest[f"clusters.{name}"] = table.model_copy(update=members)
    return rest


def peer_view(
    name: str, clusters: PeerClusters, addresses: Mapping[str, tuple[str, int]]
) -> FileView:
    """The view of a pool node.

    Args:
        addresses: Addresses of peers that are given elsewhere.
    """
    return FileView(
        "pool node",
        clusters.site,
        partial(peer_entries, name=name, clusters=clusters, addresses=addresses),
        lambda read: {
            "names and roles of clusters": _shape(read),
            "names of gateways": set(read.gateways),
        },
        partial(_pool_later, name=name),
    )


def _pool_later(deployment: Deployment, name: str) -> dict[str, object]:
    cluster = cluster_of(deployment, name)
    table = deployment.clusters[cluster].pools[name]
    return {
        f"clusters.{cluster}.pools.{name}": table.model_copy(update={"links": {}}),
        "security": deployment.security,
        "state": deployment.state,
        "tracing": deployment.tracing,
    }
