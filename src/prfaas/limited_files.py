"""Files that somebody else wrote: read with limits, and refused in words.

Every file of settings, members, contracts, prices, plans and models is read here, so that none of
them holds a process up, ends it or takes its memory: a pipe without a writer, a device without an
end, a text that a parser fails at.

`shipped_file` finds the files that prfaas comes with: `prfaas plan paper-case-study` runs in an
empty folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError

FILE_BYTES_MAX = 16 << 20
DEPTH_MAX = 64
"""Tables and lists within each other."""
NUMBER_MAX = 2**64
GIVEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Descriptors that whoever started the process gave it: pipes are read to their end."""


def read_limited(path: Path, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Bytes of a regular file.

    Args:
        bytes_max: Limit of its size.

    Raises:
        OSError: It cannot be read.
        ConfigError: It is something else than a file, or too long.
    """
    is_given = str(path).startswith(GIVEN)
    # Without waiting: a pipe has a writer one day, or never.
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if is_given else os.O_NONBLOCK)
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or is_given):
            raise ConfigError(f"{path} is a pipe, a socket or a device; give a regular file")
        if found.st_size > bytes_max:
            raise ConfigError(f"{path} has {found.st_size} bytes, limit {bytes_max}")
        # As much as it has: room for `bytes_max` takes longer to get than a file of settings.
        data = file.read(found.st_size + 1)
        if len(data) > found.st_size:
            data += file.read(bytes_max + 1 - len(data))
    if len(data) > bytes_max:
        raise ConfigError(f"{path} has more than {bytes_max} bytes, the limit")
    return data


def digest_of(paths: Iterable[Path]) -> bytes:
    """Digest of the contents of files. One that cannot be read differs from any contents."""
    content = hashlib.sha256()
    for path in paths:
        data = None
        with contextlib.suppress(OSError, ConfigError):
            data = read_limited(path)
        content.update(b"-" if data is None else b"%d:" % len(data) + data)
    return content.digest()


def read_json(path: Path, bytes_max: int = FILE_BYTES_MAX, number_max: float = NUMBER_MAX) -> Any:
    """The value in a JSON file.

    Args:
        number_max: Limit of its integers.

    Raises:
        ConfigError: The file cannot be read, is no JSON, or is beyond a limit.
    """
    try:
        value = json.loads(read_limited(path, bytes_max))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: values lie deeper than {DEPTH_MAX} levels") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from None
    check_values(value, path, number_max)
    return value


def check_values(value: object, path: Path, number_max: float = NUMBER_MAX) -> None:
    """See that no value of a parsed file is one that later steps fail at.

    Raises:
        ConfigError: Values lie too deep, or a number is too large; names its key.
    """
    waiting: list[tuple[object, str, int]] = [(value, "", 1)]
    while waiting:
        each, place, depth = waiting.pop()
        if isinstance(each, dict):
            inner = [(each[key], f"{place}.{key}".lstrip(".")) for key in each]
        elif isinstance(each, list):
            inner = [(item, place) for item in each]
        else:
            if isinstance(each, int) and abs(each) >= number_max:
                raise ConfigError(f"{path}: {place[:200]}: a number of {number_max} or more")
            continue
        if depth > DEPTH_MAX:
            raise ConfigError(f"{path}: {place[:200]}: deeper than {DEPTH_MAX} levels")
        waiting += [(item, where, depth + 1) for item, where in inner]


_INSTALLED = Path(__file__).with_name("shipped")
SHIPPED_ROOT = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2]
"""Folder of `examples`, `dashboards` and `deploy`, which prfaas comes with: in this package of a
wheel, at the root of a checkout."""


def shipped_file(path: Path, folder: str = "") -> Path | None:
    """The shipped file of a path that does not exist, absolute; None if there is none.

    Args:
        path: From the working directory, as in `examples/laptop.toml`; or a name, as in `laptop`.
        folder: Folder of `examples` with the files of this kind, for names.
    """
    here = SHIPPED_ROOT / "examples" / folder
    places = (SHIPPED_ROOT / path, here / path, here / f"{path}.toml")
    with contextlib.suppress(OSError, ValueError):  # Whoever reads the path reports what is wrong.
        if not (path.exists() or path.is_absolute() or ".." in path.parts):
            return next((place for place in places if place.is_file()), None)
    return None


def file_or_shipped(path: Path, folder: str = "") -> Path:
    """The path, or the shipped file that it names if there is nothing at the path."""
    return shipped_file(path, folder) or path
