"""Parts of a deployment in this process: pool nodes, hosts of timing engines and a gateway.

Each is stopped with the stack it was started on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.config.addresses import Endpoints
from prfaas.config.deployment import Deployment
from prfaas.engines.timing.host import HostSettings, InstanceHost
from prfaas.gateway.app import Gateway
from prfaas.gateway.pools.pool_client import PoolTiming
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.wire.identity import identity_in
from tests.lab.faults import FaultProxy
from tests.pool.sites import LOOPBACK, Site

from .worlds import started

MEMORY_BYTES = 1 << 22
"""Of a pool node."""


class PartsOnStack:
    """Starts parts, and keeps what the gateway has to know of them.

    Args:
        stack: Stops them.
        directory: For sockets.
        identities: Of all.
    """

    def __init__(self, stack: AsyncExitStack, directory: Path, identities: Path) -> None:
        self._stack, self._directory, self._identities = stack, directory, identities
        self.sites: dict[str, Site] = {}
        self.hosts: list[InstanceHost] = []
        self.urls: dict[str, str] = {}
        """Base URLs of engines, by name."""

    async def wire(self) -> FaultProxy:
        """A wire without a target."""
        made = FaultProxy((LOOPBACK, 0))
        await made.open()
        self._stack.push_async_callback(made.close)
        return made

    def socket(self, pool: str) -> Path:
        """Socket of a pool node for its engines."""
        return self._directory / f"{pool}.sock"

    async def pool_node(
        self,
        name: str,
        peers: Mapping[str, tuple[str, int]],
        sources: Iterable[str],
        **settings: Any,
    ) -> Site:
        """Start a pool node; `settings` are further fields of `PoolProcessSettings`."""
        fields: dict[str, Any] = {
            "memory_bytes": MEMORY_BYTES,
            "listen": (LOOPBACK, 0),
            "socket_path": self.socket(name),
            "admin": (LOOPBACK, 0),
            "identity": identity_in(self._identities, name),
            "gateways": frozenset({"gateway"}),
        }
        site = Site(
            PoolProcessSettings(
                name, peers=dict(peers), sources=frozenset(sources), **(fields | settings)
            )
        )
        await site.ready()
        self._stack.push_async_callback(site.kill)
        self.sites[name] = site
        return site

    async def engines(self, settings: HostSettings) -> None:
        """Start a host of timing engines."""
        host, urls = await started(settings)
        self._stack.push_async_callback(host.close)
        self.hosts.append(host)
        self.urls |= urls

    async def gateway(
        self, deployment: Deployment, poll_s: float = 0.02
    ) -> tuple[str, aiohttp.ClientSession, Gateway]:
        """Start a gateway in front of all parts; its URL, and a session to ask it with."""
        made = make_gateway(
            deployment,
            Endpoints(
                engines=self.urls,
                pools={name: (LOOPBACK, site.port) for name, site in self.sites.items()},
            ),
            poll_s=poll_s,
            timing=PoolTiming(backoff_s=0.01, backoff_max_s=0.05),
        )
        url = await made.start()
        self._stack.push_async_callback(made.close)
        return url, await self._stack.enter_async_context(aiohttp.ClientSession()), made
