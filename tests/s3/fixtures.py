"""Fixtures: the server, the proxy before it, and settings of a tier in a fresh bucket."""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.pool.shared.bucket import S3Bucket
from prfaas.pool.shared.settings import S3Settings, S3Timing

from .faulty import FaultyS3
from .server import running_server
from .versions import Versions

OTHERS = ("keys/", "purges/")
TIMING = S3Timing(refresh_s=0.1, request_s=60.0, probe_s=60.0, flush_s=0.05, close_s=60.0)
"""Short intervals, and limits that no busy machine reaches."""


def new_key() -> str:
    """A line of a file of keys."""
    return base64.b64encode(secrets.token_bytes(32)).decode()


@dataclass
class Bucket:
    """A bucket, and a file of keys.

    Attributes:
        versions: Old versions of its objects.
        s3: The way to the server.
        direct: A client that does not pass the proxy.
        settings: Of the tier.
    """

    versions: Versions
    s3: FaultyS3
    direct: S3Bucket
    settings: S3Settings

    def changed(self, **changes: Any) -> S3Settings:
        return replace(self.settings, **changes)

    def timed(self, **times: float) -> S3Timing:
        """Its intervals with other values, seconds."""
        return replace(self.settings.timing, **times)

    async def everything(self) -> dict[str, int]:
        """Paths and sizes of what is there."""
        return {path: size async for part in self.direct.list(60) for path, size in part}

    async def objects(self) -> dict[str, int]:
        """Those that are no keys of tenants and no marks of purges."""
        found = await self.everything()
        return {path: size for path, size in found.items() if not path.startswith(OTHERS)}

    async def data(self, path: str) -> bytes:
        return bytes(await self.direct.read(path, 0, (await self.everything())[path], 60))


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with running_server() as port:
        yield port


@pytest.fixture
async def bucket(
    s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    name, keys = f"bucket-{secrets.token_hex(8)}", tmp_path / "site.keys"
    keys.write_text(f"{new_key()}\n")
    keys.chmod(0o600)
    async with FaultyS3(s3_port).serving() as s3, aiohttp.ClientSession() as http:
        server = f"http://127.0.0.1:{s3_port}"
        async with http.put(f"{server}/{name}") as reply:
            assert reply.status == 200
        settings = S3Settings(
            name,
            keys,
            1 << 30,
            endpoint=s3.url,
            region="us-east-1",
            prefix="site",
            deadline_ns=120 * 10**9,
            timing=TIMING,
        )
        versions = Versions(f"{server}/{name}", http)
        yield Bucket(versions, s3, S3Bucket(replace(settings, endpoint=server)), settings)
