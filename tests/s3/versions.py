"""Versions of the objects of a bucket: what was deleted comes back."""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp

_MARKER = re.compile(
    r"<DeleteMarker>.*?<Key>([^<]+)</Key>.*?<VersionId>([^<]+)</VersionId>.*?</DeleteMarker>", re.S
)
_ON = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"


@dataclass
class Versions:
    """Versions at a server, past any proxy.

    Attributes:
        url: Of the bucket.
    """

    url: str
    http: aiohttp.ClientSession

    async def keep(self) -> None:
        """Have deleted objects kept as old versions, from now on."""
        async with self.http.put(f"{self.url}?versioning", data=_ON) as reply:
            assert reply.status == 200

    async def restore(self, under: str = "") -> int:
        """Bring back what was deleted below a path of the site; return the number of objects."""
        async with self.http.get(f"{self.url}?versions") as reply:
            found = _MARKER.findall(await reply.text())
        some = [(key, version) for key, version in found if key.startswith(f"site/{under}")]
        for key, version in some:
            async with self.http.delete(f"{self.url}/{key}?versionId={version}") as reply:
                assert reply.status == 204
        return len(some)
