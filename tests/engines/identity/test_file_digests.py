"""Digests of whole files, and when a kept one is not trusted."""

import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import pytest

from prfaas.engines.identity import checkpoint_files
from prfaas.engines.identity.checkpoint_files import (
    ENTRIES_MAX,
    FileDigests,
    ReadProgress,
    cache_directory,
)
from prfaas.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

LONG_AGO_NS = 10**9 * 1_600_000_000


def digests_in(directory: Path | None = None, entries_max: int = ENTRIES_MAX) -> FileDigests:
    """Keeps digests of files of this moment, too; one test is about those that are not."""
    return FileDigests(directory, settled_ns=0, entries_max=entries_max)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a file is read."""
    counted: list[int] = []
    read = checkpoint_files._read

    def counting(*about: Any) -> bytes:
        counted.append(1)
        return read(*about)

    monkeypatch.setattr(checkpoint_files, "_read", counting)
    return counted


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
    path, read = tmp_path / "weights", checkpoint_files._read
    path.write_bytes(b"a" * 1000)

    def meanwhile(*about: Any) -> bytes:
        digest = read(*about)
        path.write_bytes(b"b" * 1001)
        return digest

    monkeypatch.setattr(checkpoint_files, "_read", meanwhile)
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


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_cost_of_reading_is_logged_once_with_its_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas")
    path = weights(tmp_path)
    for num_read, num_kept in ((1, 0), (0, 1)):
        digests = digests_in(tmp_path / "kept")
        digests.digest(path)
        assert (digests.progress.num_files, digests.progress.num_kept) == (num_read, num_kept)
        digests.progress.log_summary()
    [line] = logged(caplog)
    assert "0.00 GB in 1 files read in" in line
    assert "GB/s; 0 files unchanged since an earlier start" in line


def test_progress_of_a_long_file_is_logged_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "prfaas")
    times = iter(range(0, 100 * 10**9, 4 * 10**9))
    total = ReadProgress(now_ns=lambda: next(times))
    file = total.file("model-00001.safetensors", 8 * 10**9)
    for _ in range(8):
        file.advance(10**9)
    file.finish()
    assert logged(caplog) == [
        "digest of model-00001.safetensors: 3.00 of 8.00 GB, 0.25 GB/s",
        "digest of model-00001.safetensors: 6.00 of 8.00 GB, 0.25 GB/s",
    ]
    assert (total.num_bytes, total.read_ns) == (8 * 10**9, 36 * 10**9)


def test_digests_that_can_not_be_kept_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas")
    (tmp_path / "kept").write_bytes(b"a file where the directory should be")
    digests = digests_in(tmp_path / "kept")
    assert digests.digest(weights(tmp_path)) == blake3.blake3(b"w" * 1000).digest()
    digests.progress.log_summary()
    assert "XDG_CACHE_HOME" in logged(caplog)[-1]


def test_files_in_a_directory_that_is_read_only_are_digested_and_kept(
    tmp_path: Path, reads: list[int]
) -> None:
    """Nothing is written beside a checkpoint, which is often an image or a network file system."""
    model = tmp_path / "model"
    model.mkdir()
    path = weights(model)
    path.chmod(0o400)
    model.chmod(0o500)
    before = sorted(model.iterdir()), model.stat().st_mtime_ns
    try:
        for _ in range(2):
            digest = digests_in(tmp_path / "kept").digest(path)
            assert digest == blake3.blake3(b"w" * 1000).digest()
        assert (sorted(model.iterdir()), model.stat().st_mtime_ns) == before
    finally:
        model.chmod(0o700)
    assert len(reads) == 1


def test_a_process_that_waits_for_another_one_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas")
    path, kept = weights(tmp_path), tmp_path / "kept"
    kept.mkdir(mode=0o700)
    with (kept / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waits = threading.Thread(target=digests_in(kept).digest, args=[path])
        waits.start()
        while not caplog.records:
            waits.join(0.01)
        assert "waiting for another process" in logged(caplog)[0]
    waits.join()
    assert len(list(kept.iterdir())) == 2
