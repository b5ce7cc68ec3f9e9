"""Digests of whole files, and when a kept one is not trusted."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest

from prfaas.engines.identity import file_digests
from prfaas.engines.identity.file_digests import ENTRIES_MAX, FileDigests, cache_directory
from prfaas.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

LONG_AGO_NS = 10**9 * 1_600_000_000
GIB = 1 << 30


def digests_in(directory: Path | None = None, entries_max: int = ENTRIES_MAX) -> FileDigests:
    """Keeps digests of files of this moment, too; one test is about those that are not."""
    return FileDigests(directory, settled_ns=0, entries_max=entries_max)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a file is read."""
    counted: list[int] = []
    read = file_digests._read

    def counting(file: object) -> bytes:
        counted.append(1)
        return read(file)

    monkeypatch.setattr(file_digests, "_read", counting)
    return counted


def test_one_byte_of_a_file_over_a_gibibyte_changes_the_digest(tmp_path: Path) -> None:
    digests, found = digests_in(tmp_path / "kept"), []
    for name, place in (("a", None), ("b", GIB // 2 + 12_345)):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(GIB + (60 << 20))
            if place is not None:
                file.seek(place)
                file.write(b"\x01")
        found.append(digests.digest(path))
    assert found[0] != found[1]


def test_an_unchanged_file_is_read_once(tmp_path: Path, reads: list[int]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 1000)
    first = digests_in(tmp_path / "kept").digest(path)
    assert first == blake3.blake3(b"w" * 1000).digest()
    assert digests_in(tmp_path / "kept").digest(path) == first
    assert len(reads) == 1


@pytest.mark.parametrize("how", ["in place", "other file"])
def test_a_changed_file_is_read_again_although_size_and_time_are_the_same(
    tmp_path: Path, how: str
) -> None:
    path, digests = tmp_path / "weights", digests_in(tmp_path / "kept")
    path.write_bytes(b"a" * 1000)
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    before = digests.digest(path)
    if how == "in place":
        with path.open("r+b") as file:
            file.write(b"b")
    else:
        other = tmp_path / "new"
        other.write_bytes(b"b" + b"a" * 999)
        other.replace(path)
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert path.stat().st_mtime_ns == LONG_AGO_NS
    assert digests.digest(path) == blake3.blake3(b"b" + b"a" * 999).digest() != before


def test_the_digest_of_a_file_that_just_changed_is_not_kept(
    tmp_path: Path, reads: list[int]
) -> None:
    path, digests = tmp_path / "weights", FileDigests(tmp_path / "kept", settled_ns=3600 * 10**9)
    path.write_bytes(b"a")
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    digests.digest(path)
    digests.digest(path)
    assert len(reads) == 2


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "weights", file_digests._read
    path.write_bytes(b"a" * 1000)

    def meanwhile(file: object) -> bytes:
        digest = read(file)
        path.write_bytes(b"b" * 1001)
        return digest

    monkeypatch.setattr(file_digests, "_read", meanwhile)
    with pytest.raises(ConfigError, match="was changed while its digest was computed"):
        digests_in(tmp_path / "kept").digest(path)


def test_what_others_could_have_written_is_not_read(tmp_path: Path, reads: list[int]) -> None:
    path, kept = tmp_path / "weights", tmp_path / "kept"
    path.write_bytes(b"a" * 1000)
    right = digests_in(kept).digest(path)
    [entry] = [each for each in kept.iterdir() if each.name != "lock"]
    entry.write_text("00" * 32)
    kept.chmod(0o777)
    assert digests_in(kept).digest(path) == right
    assert len(reads) == 2


@pytest.mark.parametrize("text", ["", "zz", "00", "00" * 40])
def test_a_broken_entry_is_computed_again(tmp_path: Path, text: str) -> None:
    path, kept = tmp_path / "weights", tmp_path / "kept"
    path.write_bytes(b"a" * 1000)
    right = digests_in(kept).digest(path)
    [entry] = [each for each in kept.iterdir() if each.name != "lock"]
    entry.write_text(text)
    assert digests_in(kept).digest(path) == right


def test_old_entries_make_room(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for number in range(8):
        path = tmp_path / f"weights-{number}"
        path.write_bytes(bytes([number]))
        digests_in(kept, entries_max=3).digest(path)
    assert len(list(kept.iterdir())) <= 5


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights cannot be read: No such file"):
        digests_in(tmp_path / "kept").digest(tmp_path / "weights")


def test_digests_lie_in_the_users_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    digests_in().digest(path)
    directory = tmp_path / "prfaas" / "file-digests"
    assert cache_directory() == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert len(list(directory.iterdir())) == 2


def test_a_user_without_a_home_reads_files_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    assert digests_in().digest(path) == digests_in().digest(path)
    assert len(reads) == 2


def test_a_lock_that_can_not_be_had_costs_time_alone(tmp_path: Path) -> None:
    path, kept = tmp_path / "weights", tmp_path / "kept"
    path.write_bytes(b"a")
    (kept / "lock").mkdir(parents=True)
    kept.chmod(0o700)
    assert digests_in(kept).digest(path) == blake3.blake3(b"a").digest()


def weights(directory: Path) -> Path:
    path = directory / "weights"
    path.write_bytes(b"w" * 1000)
    return path


def test_a_directory_that_is_swapped_after_it_was_checked_plants_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a user who may write above it: entries are opened in the directory that was checked."""
    path, kept, planted = weights(tmp_path), tmp_path / "kept", tmp_path / "planted"
    right = digests_in(kept).digest(path)
    shutil.copytree(kept, planted)
    for entry in planted.iterdir():
        if entry.name != "lock":
            entry.write_text(bytes(32).hex())

    def then_swap(check: Callable[..., Any]) -> Callable[..., Any]:
        def swapping(*about: Any) -> Any:
            found = check(*about)
            if planted.exists() and (about[0] == kept or stat.S_ISDIR(found.st_mode)):
                kept.rename(tmp_path / "ours")
                planted.rename(kept)
            return found

        return swapping

    for name in ("fstat", "access"):
        monkeypatch.setattr(os, name, then_swap(getattr(os, name)))
    assert digests_in(kept).digest(path) == right


def test_a_directory_behind_a_symbolic_link_is_not_used(tmp_path: Path, reads: list[int]) -> None:
    path = weights(tmp_path)
    digests_in(tmp_path / "kept").digest(path)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    num_reads = len(reads)
    digests_in(tmp_path / "link").digest(path)
    assert len(reads) > num_reads
