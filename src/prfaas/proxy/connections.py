"""Connections of gateways to the proxy: limits by site of their number and of idle time.

A connection without a request, or whose answer is not read, is closed in time. A site at its limit
gets refusals, and no descriptor that other sites need.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections import Counter

from aiohttp import web

from prfaas.errors import PeerError
from prfaas.membership.agreements import Agreements
from prfaas.proxy.metrics import ProxyMetrics
from prfaas.wire.identity import peer_name
from prfaas.wire.name_authorities import peer_certificate
from prfaas.wire.plain_http import TimedHandler

HANDSHAKE_S = 10.0
"""Time limit of the TLS handshake: until then, a connection is of no site."""
TLS_LIMITS = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": HANDSHAKE_S}
HEAD_S = 10.0
"""Time limit of the head of the first request."""
IDLE_S = 75.0
"""Time limit of the answer to a request and the head of the next."""
LINGER_S = 2.0
"""Time in which a gateway can read the answer to a body that is not read."""
REST_BYTES_MAX = 64 << 10
"""Longer bodies are not read to the end for the sake of their connection."""
STRANGERS_MAX = 32
"""Connections of gateways without a contract, together."""
REFUSALS_MAX = 16
"""Connections of one site beyond its limit that get an answer; more are closed at once."""
RETRY_AFTER_S = "1"
SITES_SHARE = 0.75
"""Share of the descriptors of the process that the connections of all sites may use."""


class ConnectionCounts:
    """Counts the connections of each site, over the ports of all engines."""

    def __init__(self, agreements: Agreements, metrics: ProxyMetrics) -> None:
        self.agreements, self._metrics = agreements, metrics
        self._open = Counter[str]()
        self.head_s, self.idle_s, self.linger_s = HEAD_S, IDLE_S, LINGER_S

    def __getitem__(self, site: str) -> int:
        """Return the number of open connections of a site; those of no site are of ""."""
        return self._open[site]

    def site_of(self, transport: asyncio.BaseTransport | None) -> str | None:
        """Site of the gateway at the other end, by its certificate; None for all others."""
        secured: ssl.SSLObject | None = (
            transport.get_extra_info("ssl_object") if transport is not None else None
        )
        try:
            name = peer_name(secured, self.agreements.contracts.site_of_gateway.keys())
            return self.agreements.authorities.site_of(name, peer_certificate(secured))
        except PeerError:
            return None

    def limit(self, site: str) -> int:
        """Return the most connections of a site: what its contract allows, and a part of the
        descriptors that is there for each site."""
        sites = self.agreements.contracts.by_site
        contract = sites.get(site)
        if contract is None:
            return STRANGERS_MAX
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return contract.connections_max
        each = int(soft * SITES_SHARE) // len(sites) - REFUSALS_MAX
        return max(1, min(contract.connections_max, each))

    def came(self, site: str) -> int:
        """Count a connection; return how many there are beyond the limit."""
        self._open[site] += 1
        beyond = self._open[site] - self.limit(site)
        if beyond > 0:
            self._metrics.refused.labels(reason="connections").inc()
        return beyond

    def went(self, site: str) -> None:
        """A connection has ended."""
        self._open[site] -= 1
        if not self._open[site]:
            del self._open[site]


class GatewayConnection(TimedHandler):
    """One connection of a gateway."""

    __slots__ = ("_connections", "_site", "is_refused")

    def __init__(self, connections: ConnectionCounts, server: web.Server) -> None:
        super().__init__(server)
        self._connections = connections
        self._site: str | None = None
        self.is_refused = False
        """True beyond the limit of its site: its request is answered so."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is done: the site is known, and the first head has to come in time."""
        super().connection_made(transport)
        self._site = self._connections.site_of(transport) or ""
        beyond = self._connections.came(self._site)
        self.is_refused = beyond > 0
        if beyond > REFUSALS_MAX:
            self._end()
        else:
            self.limit(self._connections.head_s, self._end)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is closed, by whomever."""
        if self._site is not None:
            self._connections.went(self._site)
            self._site = None
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; it has to be read, and the next head has to come, in time."""
        if self._site is not None:
            self.limit(self._connections.idle_s, self._end)
        if not _is_unread(request):
            return await super().finish_response(request, resp, start_time)
        resp.force_close()
        await super().finish_response(request, resp, start_time)
        # A gateway that still sends would lose the answer if the connection ended at once. Nothing
        # is read meanwhile, so little more than a buffer comes.
        await asyncio.sleep(self._connections.linger_s)
        self._end()
        return resp, True

    def _end(self) -> None:
        """End it; nothing waits for a peer that may not read."""
        if self.transport is not None:
            self.transport.abort()


def _is_unread(request: web.BaseRequest) -> bool:
    """Return True if a long body has not come in full; its length may be unknown."""
    num_bytes = request.content_length
    return not request.content.is_eof() and (num_bytes is None or num_bytes > REST_BYTES_MAX)


def refused(status: int, message: str, *, is_last: bool = False) -> web.Response:
    """An answer without a result; `is_last` closes the connection."""
    headers = {"Retry-After": RETRY_AFTER_S} if status == 429 else None
    answer = web.json_response({"error": {"message": message}}, status=status, headers=headers)
    if is_last:
        answer.force_close()
    return answer
