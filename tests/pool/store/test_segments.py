"""Segment files: what was appended is found and read back; what is broken is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.pool.store.disk_segments import (
    ALIGN_BYTES,
    FORMAT,
    MARKER,
    SegmentFiles,
    head_bytes,
    record_bytes,
)
from tests.pool.segment_files import ORIGIN, append, files_in, good, name_of

HEADER_BYTES = head_bytes(ORIGIN)
SIZES = [1, 100, ALIGN_BYTES - HEADER_BYTES, ALIGN_BYTES, 3 * ALIGN_BYTES + 7]


def fill(folder: Path, sizes: list[int]) -> Path:
    """One segment with blocks of these sizes; its path."""
    with files_in(folder) as files:
        number = files.start()
        for block, size in enumerate(sizes):
            assert append(files, block, size).num_bytes == size
        files.seal()
        assert good(files, number) == dict.fromkeys(range(len(sizes)), True)
    (path,) = folder.glob("*.seg")
    assert path.stat().st_size == sum(record_bytes(size, ORIGIN) for size in sizes)
    return path


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    path = fill(tmp_path / "disk", SIZES)
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    for file in (path, tmp_path / "disk" / MARKER):
        assert file.stat().st_mode & 0o777 == 0o600


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, sum(record_bytes(size, ORIGIN) for size in SIZES) - 1))
def test_a_file_cut_anywhere_keeps_what_is_before(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    path = fill(folder, SIZES)
    os.truncate(path, cut)
    ends = [sum(record_bytes(size, ORIGIN) for size in SIZES[:n]) for n in range(len(SIZES) + 1)]
    whole = [n for n, size in enumerate(SIZES) if ends[n] + HEADER_BYTES + size <= cut]
    with files_in(folder) as files:
        assert good(files, 0) == dict.fromkeys(whole, True)
        begun = any(ends[n] < cut < ends[n] + HEADER_BYTES + SIZES[n] for n in range(len(SIZES)))
        assert files.scan(0).num_broken == begun


@settings(max_examples=100, deadline=None)
@given(block=st.integers(0, len(SIZES) - 1), data=st.data())
def test_a_flipped_bit_costs_one_block(
    tmp_path_factory: pytest.TempPathFactory, block: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    path = fill(folder, SIZES)
    start = sum(record_bytes(size, ORIGIN) for size in SIZES[:block])
    offset = data.draw(st.integers(0, HEADER_BYTES + SIZES[block] - 1))
    with path.open("r+b") as file:
        file.seek(start + offset)
        (byte,) = file.read(1)
        file.seek(start + offset)
        file.write(bytes([byte ^ 1 << data.draw(st.integers(0, 7))]))
    with files_in(folder) as files:
        found = good(files, 0)
        in_header = offset < HEADER_BYTES
        assert files.scan(0).num_broken == in_header
        assert [n for n, intact in found.items() if intact] == [
            n for n in range(len(SIZES)) if n != block
        ]
        assert (block in found) != in_header


def test_a_block_under_another_name_is_not_given(tmp_path: Path) -> None:
    with files_in(tmp_path) as files:
        files.start()
        place = append(files, 1, 100)
        assert files.read(name_of(2), place, memoryview(bytearray(100))) is None
        assert files.read(name_of(1), place, memoryview(bytearray(99))) is None
        assert files.read(name_of(1), place, memoryview(bytearray(100))) is not None


def test_what_was_appended_to_is_not_appended_to_again(tmp_path: Path) -> None:
    fill(tmp_path, SIZES)
    with files_in(tmp_path) as files:
        assert files.start() == 1
        append(files, 9, 10)
        assert [segment.number for segment in files.found()] == [0, 1]
        files.remove(0)
        files.remove(0)
        assert [segment.number for segment in files.found()] == [1]


def test_a_failed_append_leaves_nothing(tmp_path: Path) -> None:
    """In a process of its own, whose files the kernel limits."""
    code = """
import pathlib, resource, sys
from tests.pool.segment_files import append, files_in, good
with files_in(pathlib.Path(sys.argv[1])) as files:
    files.start()
    append(files, 0, 5000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
    try:
        append(files, 1, 50000)
    except OSError as error:
        print(error)
    append(files, 2, 5000)
    print(good(files, 0), files.scan(0).num_broken)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert "of 53248 bytes were written" in done.stdout
    assert done.stdout.endswith("{0: True, 2: True} 0\n")


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds thesis\.tex; name an empty folder"):
        SegmentFiles(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    path = fill(tmp_path, SIZES)
    (tmp_path / MARKER).write_text("3\n")
    with pytest.raises(ConfigError, match=f"format '3'.*this version writes '{FORMAT}'"):
        SegmentFiles(tmp_path)
    assert path.exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with files_in(tmp_path), pytest.raises(ConfigError, match="another pool node uses"):
        SegmentFiles(tmp_path)
    with files_in(tmp_path):
        pass


def test_a_place_that_can_not_be_a_folder_is_one_clear_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot use .*name another folder"):
        SegmentFiles(tmp_path / "file" / "disk")


def test_the_root_of_a_new_file_system_is_empty_enough(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with files_in(tmp_path) as files:
        assert files.found() == []
