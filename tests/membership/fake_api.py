"""A Kubernetes API server that lists and watches EndpointSlices, and misbehaves on command."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
Slice = dict[str, Any]


def endpoint_slice(
    name: str, labels: dict[str, str], ports: dict[str, int], *endpoints: dict[str, Any]
) -> Slice:
    """An EndpointSlice as the API shows it."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {"name": name, "labels": labels},
        "endpoints": list(endpoints),
        "ports": [{"name": key, "port": port, "protocol": "TCP"} for key, port in ports.items()],
    }


def endpoint(
    pod: str, address: str, node: str = "node-1", *, ready: bool = True, terminating: bool = False
) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": True, "terminating": terminating},
        "nodeName": node,
        "targetRef": {"kind": "Pod", "name": pod},
    }


@dataclass
class FakeApi:
    """The API server of one namespace."""

    namespace: str = "prfaas"
    page_items: int = 2
    slices: dict[str, Slice] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    """Watches from older versions get 410."""
    is_hanging: bool = False
    """It accepts requests and answers nothing, and watches are silent."""
    status: int = 200
    tokens: list[str] = field(default_factory=list)
    """Of all requests."""
    watches_from: list[int] = field(default_factory=list)
    url: str = ""
    _events: list[tuple[int, str, Slice]] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _cut: int = 0
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_get(PATH.format(namespace=self.namespace), self._get)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls).start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def put(self, found: Slice) -> None:
        """Add or change a slice."""
        name = found["metadata"]["name"]
        await self._note("MODIFIED" if name in self.slices else "ADDED", found)
        self.slices[name] = found

    async def delete(self, name: str) -> None:
        await self._note("DELETED", self.slices.pop(name))

    async def bookmark(self) -> None:
        await self._note("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    async def expire(self) -> None:
        """Old versions are forgotten, and running watches get an error event of 410."""
        self.oldest = self.version + 1
        self.version += 1
        self._events.clear()
        await self._wake()

    async def cut(self) -> None:
        """Close all watches."""
        self._cut += 1
        await self._wake()

    async def _note(self, kind: str, found: Slice) -> None:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self._events.append((self.version, kind, json.loads(json.dumps(found))))
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.status != 200:
            return web.Response(status=self.status)
        if "watch" in request.query:
            return await self._watch(request)
        return self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        start = int(request.query.get("continue", "0"))
        found = sorted(self.slices.values(), key=lambda each: str(each["metadata"]["name"]))
        page, rest = found[start : start + self.page_items], found[start + self.page_items :]
        metadata = {"resourceVersion": str(self.version)}
        if rest:
            metadata["continue"] = str(start + self.page_items)
        return web.json_response({"metadata": metadata, "items": page})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen, cut = int(request.query["resourceVersion"]), self._cut
        self.watches_from.append(seen)
        if seen < self.oldest:
            return web.Response(status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while self._cut == cut:
                if seen < self.oldest:
                    gone = {"kind": "Status", "code": 410, "message": "too old"}
                    await response.write(_line("ERROR", gone))
                    break
                for version, kind, found in self._events if not self.is_hanging else ():
                    if version > seen:
                        await response.write(_line(kind, found))
                        seen = version
                async with self._changed:
                    if self._cut == cut and seen >= self.oldest and self._is_told(seen):
                        await self._changed.wait()
        return response

    def _is_told(self, seen: int) -> bool:
        return self.is_hanging or not self._events or self._events[-1][0] <= seen


def _line(kind: str, found: object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"
