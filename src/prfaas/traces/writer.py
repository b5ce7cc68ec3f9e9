"""Files of recorded workloads, complete or not at all."""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import cast

import msgspec

from prfaas.errors import ConfigError

SUFFIXES = (".jsonl", ".jsonl.gz")
_encoder = msgspec.json.Encoder()


def check_target(path: Path, source: Path, *, overwrite: bool = False) -> None:
    """Check where a file is to be written.

    Raises:
        ConfigError: Its name does not end as it should, or it exists and may not be replaced.
    """
    if not path.name.endswith(SUFFIXES):
        raise ConfigError(f"{path}: the name of the file has to end in {' or '.join(SUFFIXES)}")
    if path.exists() and (not overwrite or path.samefile(source)):
        raise ConfigError(f"{path} exists; give another name, or --force to replace it")


def write_lines(path: Path, lines: Iterable[msgspec.Struct]) -> None:
    """Write JSON lines, gzipped where the name ends in ".gz"; the same lines give the same bytes.

    Raises:
        ConfigError: The file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as raw, _packed(path, raw) as file:
            for line in lines:
                file.write(_encoder.encode(line) + b"\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _packed(path: Path, raw: BufferedIOBase) -> Iterator[BufferedIOBase]:
    if path.suffix != ".gz":
        yield raw
        return
    with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
        yield cast(BufferedIOBase, file)
