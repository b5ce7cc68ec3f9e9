"""The keyring of a disk tier: the wrapped keys of tenants in one file.

    FOLDER/keyring    JSON: {"format": 1, "keys": [{"id", "tenant", "made_s", "wrapped"}, ...]}

The file is replaced as a whole: a draft is written and synchronised, renamed over the old one, and
the folder is synchronised. So a crash leaves the old keys or the new ones. The old file is then
overwritten in place, as far as the file system and the device do that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from prfaas.core.kv.tenant_salts import TAG_PATTERN
from prfaas.errors import ConfigError
from prfaas.logs import log_event
from prfaas.pool.keys.sealing import AlteredError, UnknownKeyError
from prfaas.pool.keys.tenant_keys import KEY_BYTES, KEY_ID_BYTES, TenantKey, new_key
from prfaas.pool.keys.wrapping import KeyWrapper

_log = logging.getLogger(__name__)

FILE_NAME = "keyring"
KEYS_MAX = 4096
"""Keys in a keyring; a new one beyond them destroys the oldest of a tenant without a reserve."""
FILE_BYTES_MAX = 4 << 20


class _Entry(msgspec.Struct):
    id: Annotated[bytes, msgspec.Meta(min_length=KEY_ID_BYTES, max_length=KEY_ID_BYTES)]
    tenant: Annotated[str, msgspec.Meta(pattern=TAG_PATTERN)]
    made_s: Annotated[int, msgspec.Meta(ge=0)]
    wrapped: Annotated[bytes, msgspec.Meta(max_length=4096)]


class _File(msgspec.Struct):
    format: Literal[1]
    keys: Annotated[list[_Entry], msgspec.Meta(max_length=KEYS_MAX)]


class Keyring:
    """Keys of tenants, in memory and in a file. Thread-safe; changes block for the disk.

    Args:
        file: Made with the first key.
        wrapper: Wraps keys with a key of the site.
        clock_s: Time since 1970, seconds.
        keys_max: Limit of keys, at most KEYS_MAX.

    Raises:
        ConfigError: The file cannot be read, or a key of it cannot be unwrapped.
        OSError: Keys that another key of the site wrapped cannot be wrapped anew.
    """

    def __init__(
        self,
        file: Path,
        wrapper: KeyWrapper,
        clock_s: Callable[[], float] = time.time,
        keys_max: int = KEYS_MAX,
    ) -> None:
        self._keys_max = keys_max
        self._file, self._wrapper, self._clock_s = file, wrapper, clock_s
        self._lock = threading.Lock()
        self._wrapped: dict[bytes, bytes] = {}
        self._by_id: dict[bytes, TenantKey] = {}
        """All keys, the oldest first."""
        self._sealing: dict[str, TenantKey] = {}
        """The newest key of each tenant."""
        self._kept: Set[str] = frozenset()
        for key, wrapped in self._load():
            self._add(key, wrapped)
        old = [each for each, data in self._wrapped.items() if not wrapper.is_current(data)]
        if old:
            self._wrapped |= {
                each: wrapper.wrap(self._by_id[each].secret, self._by_id[each].bound)
                for each in old
            }
            self._write(self._wrapped, self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, key_id: bytes) -> TenantKey | None:
        """The key of that name; None if there is none, or it was destroyed."""
        return self._by_id.get(key_id)

    def keep(self, tenants: Set[str]) -> None:
        """Destroy keys of other tenants first where room is needed, from now on."""
        self._kept = tenants

    def sealing(self, tenant: str) -> TenantKey:
        """The key for new blocks of a tenant, which is on disk when this returns; OSError if a new
        key cannot be written."""
        key = self._sealing.get(tenant)
        if key is not None:
            return key
        with self._lock:
            key = new_key(tenant, int(self._clock_s()))
            kept = self._kept
            order = sorted(self._by_id, key=lambda each: self._by_id[each].tenant in kept)
            oldest = order[: max(0, len(order) + 1 - self._keys_max)]
            wrapped = {each: old for each, old in self._wrapped.items() if each not in oldest}
            wrapped[key.id] = self._wrapper.wrap(key.secret, key.bound)
            self._write(wrapped, {**self._by_id, key.id: key})
            for each in oldest:
                self._remove(each)
                log_event(_log, logging.WARNING, "tenant_key_destroyed", why="too_many_keys")
            self._add(key, wrapped[key.id])
        return key

    def destroy(self, tenant: str) -> int:
        """Destroy all keys of a tenant; return their number. Once it returns, they are gone.

        Raises:
            OSError: The file cannot be written; the keys may come back with the next start.
        """
        with self._lock:
            over = [key.id for key in self._by_id.values() if key.tenant == tenant]
            if over:
                kept = {each: old for each, old in self._wrapped.items() if each not in over}
                self._write(kept, self._by_id)
            for each in over:
                self._remove(each)
        return len(over)

    def _add(self, key: TenantKey, wrapped: bytes) -> None:
        self._by_id[key.id] = self._sealing[key.tenant] = key
        self._wrapped[key.id] = wrapped

    def _remove(self, key_id: bytes) -> None:
        key = self._by_id.pop(key_id)
        del self._wrapped[key_id]
        if self._sealing.get(key.tenant) is key:
            del self._sealing[key.tenant]

    # --- the file ---

    def _load(self) -> list[tuple[TenantKey, bytes]]:
        try:
            with self._file.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(
                f"the keyring {self._file} cannot be read: {error.strerror}"
            ) from None
        try:
            entries = msgspec.json.decode(data, type=_File).keys
            return [self._unwrapped(entry) for entry in entries]
        except UnknownKeyError as error:
            raise ConfigError(
                f"the keyring {self._file} {error}, which is not in the file of the site's keys: "
                "add that key as a further line, or delete the folder and with it its blocks"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, AlteredError) as error:
            raise ConfigError(
                f"the keyring {self._file} is broken: {error}; delete the folder and with it its "
                "blocks"
            ) from None

    def _unwrapped(self, entry: _Entry) -> tuple[TenantKey, bytes]:
        named = TenantKey(entry.id, entry.tenant, entry.made_s, b"")
        secret = self._wrapper.unwrap(entry.wrapped, named.bound)
        if len(secret) != KEY_BYTES:
            raise AlteredError(f"a key of {len(secret)} bytes")
        return TenantKey(entry.id, entry.tenant, entry.made_s, secret), entry.wrapped

    def _write(self, wrapped: dict[bytes, bytes], keys: dict[bytes, TenantKey]) -> None:
        entries = [
            _Entry(each, keys[each].tenant, keys[each].made_s, data)
            for each, data in wrapped.items()
        ]
        draft = self._file.with_suffix(".draft")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(msgspec.json.encode(_File(1, entries)))
            out.flush()
            os.fsync(out.fileno())
        with _old(self._file) as old:
            draft.replace(self._file)
            _synchronise(self._file.parent)
            if old is not None:
                with contextlib.suppress(OSError):
                    os.pwrite(old, bytes(os.fstat(old).st_size), 0)
                    os.fsync(old)


@contextlib.contextmanager
def _old(path: Path) -> Iterator[int | None]:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)


def _synchronise(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
