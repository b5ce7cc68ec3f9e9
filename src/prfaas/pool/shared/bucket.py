"""The S3 bucket of a shared tier: list, read, write and delete, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from prfaas.errors import ConfigError, TransferError
from prfaas.extras import require
from prfaas.pool.shared.settings import S3Settings

if TYPE_CHECKING:
    from obstore.store import S3Config

CONNECT_S = 2.0
RETRY_S = 0.02
PAGE = 1000
"""Objects in an answer to a list."""
_BEYOND_END = "416 Range Not Satisfiable"


class GoneError(Exception):
    """The object is not in the bucket."""


class Bucket(Protocol):
    """A place for objects. Paths are below the prefix of the site.

    Every method raises `TransferError` if the server fails, refuses, or does not answer in time.
    """

    def list(self, limit_s: float, under: str = "") -> AsyncIterator[Sequence[tuple[str, int]]]:
        """All objects, or those of a folder: path and size, in parts, each within the limit."""
        ...

    async def read(self, path: str, start: int, num_bytes: int, limit_s: float) -> memoryview:
        """Part of an object; shorter if the object is; GoneError if the object is not there."""
        ...

    async def write(self, path: str, data: bytes, limit_s: float) -> None:
        """Write an object."""
        ...

    async def delete(self, paths: Sequence[str], limit_s: float) -> None:
        """Delete objects; missing ones are ignored."""
        ...


class S3Bucket:
    """A bucket of an S3 server; ConfigError if the library is not installed, or a setting is
    wrong."""

    def __init__(self, settings: S3Settings) -> None:
        require("the shared tier in an S3 bucket", "s3")
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        self._error = BaseError
        place: S3Config = {}
        if settings.endpoint:
            place["endpoint"] = settings.endpoint
        if settings.region:
            place["region"] = settings.region
        try:
            self._store = S3Store(
                settings.bucket,
                prefix=settings.prefix,
                config=place,
                client_options={
                    "allow_http": True,  # Only to loopback: the settings were checked.
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": timedelta(seconds=60),
                },
                retry_config={
                    "max_retries": 1,
                    "backoff": {"init_backoff": timedelta(seconds=RETRY_S)},
                    "retry_timeout": timedelta(seconds=settings.deadline_s),
                },
            )
        except BaseError as error:
            raise ConfigError(f"bucket {settings.bucket} cannot be used: {words(error)}") from None

    async def list(
        self, limit_s: float, under: str = ""
    ) -> AsyncIterator[Sequence[tuple[str, int]]]:
        """All objects, or those of a folder: path and size, in parts, each within the limit.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        parts = aiter(self._store.list(under or None, chunk_size=PAGE))
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TransferError(f"no list in {limit_s:.2f} s") from None
            except (self._error, OSError) as error:
                raise TransferError(words(error)) from None
            yield [(found["path"], found["size"]) for found in part]

    async def read(self, path: str, start: int, num_bytes: int, limit_s: float) -> memoryview:
        """Part of an object; shorter if the object is.

        Raises:
            GoneError: The object is not there.
            TransferError: The server failed, or did not answer in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                found = self._store.get_range_async(path, start=start, length=num_bytes)
                return memoryview(await found)
        except FileNotFoundError:
            raise GoneError(path) from None
        except TimeoutError:
            raise TransferError(f"no answer in {limit_s:.2f} s") from None
        except (self._error, OSError) as error:
            if _BEYOND_END in str(error):
                return memoryview(b"")
            raise TransferError(words(error)) from None

    async def write(self, path: str, data: bytes, limit_s: float) -> None:
        """Write an object.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self._store.put_async(path, data, use_multipart=False)
        except TimeoutError:
            raise TransferError(f"no answer in {limit_s:.2f} s") from None
        except (self._error, OSError) as error:
            raise TransferError(words(error)) from None

    async def delete(self, paths: Sequence[str], limit_s: float) -> None:
        """Delete objects; missing ones are ignored.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self._store.delete_async(list(paths))
        except FileNotFoundError:
            return
        except TimeoutError:
            raise TransferError(f"no answer in {limit_s:.2f} s") from None
        except (self._error, OSError) as error:
            raise TransferError(words(error)) from None


def words(error: Exception) -> str:
    """The first line of an error, without the request that the library adds to it."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
