"""EndpointSlices of a Kubernetes API server as a source: a list, then a watch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from prfaas.config.services import KubernetesTable
from prfaas.errors import ConfigError, PeerError
from prfaas.membership.endpoint_slices import EndpointSlice, SliceMembers, read_slice
from prfaas.membership.port import OnList
from prfaas.tasks import Backoff

PAGE_ITEMS = 500
PAGES_MAX = 64
PAGE_BYTES_MAX = 32 << 20
EVENT_BYTES_MAX = 4 << 20
GONE = 410
"""Status of a resourceVersion that is too old to continue from."""


@dataclass(frozen=True, slots=True)
class WatchTiming:
    """Times of the requests, seconds."""

    backoff_s: float = 0.2
    """Wait before the first new request; doubles from there."""
    backoff_max_s: float = 10.0
    """Longest such wait; a watch that lasts longer lets it begin anew."""
    connect_s: float = 5.0
    list_s: float = 20.0
    """Limit for a page of a list."""
    watch_s: int = 240
    """Duration that is requested for a watch."""
    silence_s: float = 100.0
    """Longest silence of a watch; bookmarks come about once a minute."""


class _TooOldError(Exception):
    """The watch cannot continue from its resourceVersion: list again."""


class Kubernetes:
    """Engines and pool nodes in EndpointSlices; ConfigError if the address of the API server is
    unknown.

    While the API server does not answer, the last list stays.

    Args:
        timing: Times of the requests.
    """

    name = "kubernetes"

    def __init__(self, table: KubernetesTable, timing: WatchTiming | None = None) -> None:
        self._table, self._timing = table, timing or WatchTiming()
        self._base = _base_of(table)
        self._slices: dict[str, EndpointSlice] = {}
        self._members = SliceMembers()
        self._version = ""
        self.num_lists = 0
        """Complete lists that were read."""
        self.fault = self.waits = ""
        self.current_at_s = 0.0

    async def follow(self, on_list: OnList) -> None:
        """See `Source`."""
        clock, timing = asyncio.get_running_loop().time, self._timing
        backoff = Backoff(timing.backoff_s, timing.backoff_max_s)
        while True:
            began_at_s = clock()
            try:
                async with self._session() as http:
                    if not self._version:
                        await self._list(http)
                        on_list(*self._members.read(self._slices))
                    async for _ in self._watch(http):
                        on_list(*self._members.read(self._slices))
            except _TooOldError:
                self._version = ""
            except TimeoutError:
                self.fault = f"the API server at {self._base} does not answer in time"
            except (aiohttp.ClientError, OSError) as error:
                words = f"{type(error).__name__}: {error}"
                self.fault = f"the API server at {self._base} cannot be used: {words}"
            except (
                PeerError,
                ConfigError,
                msgspec.MsgspecError,
                ValueError,
                RecursionError,
            ) as error:
                self.fault, self._version = str(error), ""
            if clock() - began_at_s > timing.backoff_max_s:
                backoff.reset()
            await backoff.pause()

    async def _list(self, http: aiohttp.ClientSession) -> None:
        slices: dict[str, EndpointSlice] = {}
        query = {"labelSelector": self._table.selector, "limit": str(PAGE_ITEMS)}
        for _ in range(PAGES_MAX):
            async with asyncio.timeout(self._timing.list_s), self._get(http, query) as response:
                page = msgspec.json.decode(await _read(response))
            if not isinstance(page, dict) or not isinstance(page.get("items"), list):
                raise PeerError("the API server answers a list without items")
            for item in page["items"]:
                found = read_slice(item)
                slices[found.metadata.name] = found
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                self._slices, self._version = slices, str(metadata.get("resourceVersion", ""))
                self.num_lists += 1
                self._is_current()
                return
            query["continue"] = str(metadata["continue"])
        raise PeerError(f"the API server lists more than {PAGES_MAX * PAGE_ITEMS} EndpointSlices")

    async def _watch(self, http: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Apply events; yields after those that came together."""
        query = {
            "labelSelector": self._table.selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(self._timing.watch_s),
        }
        rest = b""
        async with self._get(http, query) as response:
            self._is_current()
            while True:
                async with asyncio.timeout(self._timing.silence_s):
                    data = await response.content.readany()
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > EVENT_BYTES_MAX:
                    raise PeerError(f"an event has more than {EVENT_BYTES_MAX} bytes")
                changes = [self._apply(msgspec.json.decode(line)) for line in lines if line.strip()]
                if changes:
                    self._is_current()
                if any(changes):
                    yield

    def _apply(self, event: Any) -> bool:
        """Apply an event; return True if the members may have changed.

        Raises:
            _TooOldError: The watch has to begin anew with a list.
            PeerError: It is no event.
        """
        kind = event.get("type") if isinstance(event, dict) else None
        value = event.get("object") if isinstance(event, dict) else None
        if kind == "ERROR" and isinstance(value, dict):
            if value.get("code") == GONE:
                raise _TooOldError
            raise PeerError(f"the watch ended: {str(value.get('message'))[:200]}")
        found = read_slice(value)
        if found.metadata.resourceVersion:
            self._version = found.metadata.resourceVersion
        if kind == "DELETED":
            return self._slices.pop(found.metadata.name, None) is not None
        if kind in ("ADDED", "MODIFIED"):
            self._slices[found.metadata.name] = found
            return True
        if kind != "BOOKMARK":
            raise PeerError(f"an event of type {str(kind)[:40]!r}")
        return False

    def _is_current(self) -> None:
        self.fault, self.current_at_s = "", asyncio.get_running_loop().time()

    @contextlib.asynccontextmanager
    async def _get(
        self, http: aiohttp.ClientSession, query: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        namespace = self._table.namespace or self._file("namespace")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        headers = {"Accept": "application/json"}
        if token := self._file("token"):
            headers["Authorization"] = f"Bearer {token}"
        request = http.get(self._base + path, params=query, headers=headers, allow_redirects=False)
        async with asyncio.timeout(self._timing.list_s):
            response = await request
        async with response:
            if response.status == GONE:
                raise _TooOldError
            if response.status != 200:
                raise aiohttp.ClientError(f"status {response.status}")
            yield response

    def _file(self, name: str) -> str:
        """A file of the service account; "" without one. The kubelet renews them."""
        try:
            return (self._table.service_account / name).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""

    def _session(self) -> aiohttp.ClientSession:
        authority = self._table.service_account / "ca.crt"
        tls = ssl.create_default_context(cafile=authority if authority.exists() else None)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timing.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )


def _base_of(table: KubernetesTable) -> str:
    if table.url is not None:
        return table.url.rstrip("/")
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if not host or not port:
        raise ConfigError(
            "membership.kubernetes.url is absent, and so are KUBERNETES_SERVICE_HOST and "
            "KUBERNETES_SERVICE_PORT, which every pod has; give the URL of the API server"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """A page of a list; PeerError if it is longer than the limit."""
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > PAGE_BYTES_MAX:
            raise PeerError(f"a page of a list has more than {PAGE_BYTES_MAX} bytes")
    return bytes(data)
