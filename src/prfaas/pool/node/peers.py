"""The peers of a pool node: links and the pools that may push; both can change while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.pool.receive.link_server import LinkPort
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.wire.allow_list import AllowList


class Peers:
    """Adds and removes peers.

    Args:
        settings: Names the peers of the start.
        links: Links by the name of the peer; changed in place.
        dial: Makes a link: name, host and port, budget in bits per second, data connections; 0
            is what the settings have.
        sources: Names of pools that may push.
        hosts: Pools of other hosts of the site.
        metrics: Have series for each peer.
        on_change: Called when a link has come or gone.
    """

    def __init__(
        self,
        settings: PoolSettings,
        links: dict[str, OutboundLink],
        dial: Callable[[str, tuple[str, int], int, int], OutboundLink],
        sources: AllowList,
        hosts: AllowList,
        inbound: InboundTransfers,
        port: LinkPort,
        metrics: PoolMetrics,
        on_change: Callable[[], None],
    ) -> None:
        self.settings, self.links = settings, links
        self.metrics = metrics
        self._dial = dial
        self._sources, self._hosts = sources, hosts
        self._inbound, self._port = inbound, port
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self.can_grow = False
        """True if peers may join."""

    def run(self, group: asyncio.TaskGroup) -> None:
        """Keep the links up, those of later peers too, until the tasks of a group are cancelled."""
        self._group = group
        for name in self.links:
            self._start(group, name)

    def add(
        self, name: str, address: tuple[str, int], budget: int = 0, connections: int = 0
    ) -> None:
        """Dial a new peer.

        Args:
            budget: Limit of the rate, bits per second; 0 is the limit in the settings, or none.
            connections: Data connections; 0 is the number in the settings, or adapts.
        """
        self.links[name] = self._dial(name, address, budget, connections)
        if self._group is not None:
            self._start(self._group, name)
        self._on_change()

    def remove(self, name: str) -> None:
        """Close the link to a peer, and forget it."""
        if self.links.pop(name, None) is None:
            return
        if (task := self._tasks.pop(name, None)) is not None:
            # The last samples of a link are taken while it closes.
            task.add_done_callback(lambda _: self._forget(name))
            task.cancel()
        self._on_change()

    def admit(self, sources: Iterable[str], hosts: Iterable[str]) -> None:
        """Change the pools that may push.

        Args:
            hosts: Names of pools of other hosts of the site.
        """
        self._sources.replace(sources)
        self._hosts.replace(hosts)

    def dismiss(self, name: str) -> None:
        """Close the connections of a pool that may not push any more."""
        self._port.dismiss(name)
        self._forget(name)

    def expire(self) -> None:
        """End transfers whose time is over. No variable that lives on keeps a removed link."""
        for link in self.links.values():
            link.expire()

    @property
    def may_exist(self) -> bool:
        """Return True if there are peers, or may be later."""
        return bool(self.links) or self.has_sources or self.can_grow

    @property
    def has_sources(self) -> bool:
        """Return True if anybody may push to this pool."""
        return bool(self._sources)

    def is_up(self, name: str) -> bool:
        """Return True if the link to a peer is up, or from one that only pushes."""
        link = self.links.get(name)
        return self._inbound.channels.is_connected(name) if link is None else link.is_up

    def is_idle(self, name: str, *, inbound: bool) -> bool:
        """Return True if no transfer to a peer is open.

        Args:
            inbound: Transfers from it count as well.
        """
        link = self.links.get(name)
        if link is not None and link.num_open:
            return False
        return not inbound or not self._inbound.known.open_from(name)

    def _start(self, group: asyncio.TaskGroup, name: str) -> None:
        self._tasks[name] = group.create_task(self.links[name].run())

    def _forget(self, name: str) -> None:
        """Remove its metrics, unless it is back, or pushes to this pool."""
        if name not in self.links and name not in self._sources:
            self.metrics.registry.forget("peer", name)
