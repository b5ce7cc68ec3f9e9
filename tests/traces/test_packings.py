"""Packed and binary files, other encodings and units of time: read, or refused in words."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from prfaas.cli.trace.actions import Import
from prfaas.errors import ConfigError
from prfaas.traces.reader import TracePart, read_requests
from prfaas.traces.requests import Unit
from prfaas.units import NS_PER_MS, NS_PER_S

_ROWS = [{"timestamp": 1000 * i, "input_length": 600, "output_length": 5} for i in range(30)]


def _lines(rows: Sequence[Mapping[str, float]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _at(instants: list[float]) -> bytes:
    return _lines([{"timestamp": t, "input_length": 600, "output_length": 5} for t in instants])


def _zip(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("trace.jsonl", data)
    return file.getvalue()


def _as_is(data: bytes) -> bytes:
    return data


@pytest.mark.parametrize("pack", [_as_is, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("suffix", [".jsonl", ".data"])
def test_packed_text_is_read_whatever_its_name(
    tmp_path: Path, pack: Callable[[bytes], bytes], suffix: str
) -> None:
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(pack(b"\xef\xbb\xbf" + _lines(_ROWS)))
    assert len(read_requests(path).rows) == 30


_FORMATS = {
    "a zip archive": _zip(_lines(_ROWS)),
    "packed with zstd": b"\x28\xb5\x2f\xfd\x04\x58\x11\x02" * 20,
    "packed with lz4": b"\x04\x22\x4d\x18\x64\x40\xa7\x00" * 20,
    "a 7-Zip archive": b"7z\xbc\xaf\x27\x1c\x00\x04" * 20,
    "Parquet": b"PAR1\x15\x04\x15\x10" * 20,
    "Arrow": b"ARROW1\x00\x00\xff\xff" * 20,
    "ORC": b"ORC\x08\x03\x10\x00" * 20,
    "Avro": b"Obj\x01\x04\x14avro" * 20,
    "an SQLite database": b"SQLite format 3\x00\x10\x00" * 20,
    "HDF5": b"\x89HDF\r\n\x1a\n\x00\x00" * 20,
    "a tar archive": b"trace.jsonl" + b"\0" * 246 + b"ustar\x0000" + b"\0" * 600,
    "text in UTF-16": _lines(_ROWS).decode().encode("utf-16"),
    "text in UTF-16;": _lines(_ROWS).decode().encode("utf-16-le"),
    "text in UTF-16; convert": _lines(_ROWS).decode().encode("utf-16-be"),
    "no text": b"\x00\x00\x00\x01\xff\x00" * 100,
}


@pytest.mark.parametrize("pack", [_as_is, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("words", _FORMATS)
def test_other_formats_are_named_with_the_next_step(
    tmp_path: Path, words: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(pack(_FORMATS[words]))
    with pytest.raises(ConfigError, match=f"is {words}") as refusal:
        read_requests(path)
    assert "line 1" not in str(refusal.value)
    assert any(step in str(refusal.value) for step in ("unpack", "convert", "CSV"))


def test_a_file_that_is_packed_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(gzip.compress(_lines(_ROWS))))
    with pytest.raises(ConfigError, match="packed with gzip twice"):
        read_requests(path)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "trace"
    path.write_bytes(pack(_lines(_ROWS))[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(path)


@pytest.mark.parametrize(
    "instants",
    [
        [0.0, 3.5, 14.4, 20.25, 288.9],  # a few minutes
        [round(i * 1.37, 2) for i in range(500)],
        [float(i) for i in range(600)],  # whole seconds
        [1.7e9 + i for i in range(20)],  # since 1970
    ],
)
def test_seconds_are_not_taken_for_milliseconds(tmp_path: Path, instants: list[float]) -> None:
    path, out = tmp_path / "trace.jsonl", tmp_path / "ms.jsonl"
    path.write_bytes(_at(instants))
    with pytest.raises(ConfigError, match=r"in ms.*--timestamps s"):
        read_requests(path)
    rows = read_requests(path, unit="s").rows
    assert rows[-1].at_ns == round((instants[-1] - instants[0]) * NS_PER_S)
    units: tuple[tuple[Unit, int], ...] = (("s", NS_PER_S), ("ms", NS_PER_MS))
    for unit, factor in units:
        made = Import(
            path, out, None, TracePart(), 512, 0.0, None, None, 0, overwrite=True, unit=unit
        )
        made.run(as_json=True)
        found = read_requests(out).rows[-1].at_ns
        assert found == pytest.approx((instants[-1] - instants[0]) * factor, abs=10)


@pytest.mark.parametrize(
    "instants",
    [
        [0, 0, 3000, 3000, 6000, 9000, 9000, 12000, 15000, 18000, 21000],  # as Mooncake's own
        [12.5, 1240.25, 2410.75, 4107.5, 90_240.125],  # decimals of ms
        [0, 5, 7],  # a few at once
        [0] * 1000,  # all at once
    ],
)
def test_milliseconds_are_read(tmp_path: Path, instants: list[float]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(_at(instants))
    assert len(read_requests(path).rows) == len(instants)
