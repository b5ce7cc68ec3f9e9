"""Regions in shared memory whose engine was killed: real files, locks and processes."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.engines.launch import engine_id, shared_memory_files
from prfaas.engines.shared_memory import (
    SHARED_MEMORY,
    abandoned_bytes,
    claim,
    remove_abandoned,
)

ENGINE = """
import mmap, os, sys, time
from pathlib import Path
from prfaas.engines.shared_memory import claim
directory, *names = sys.argv[1:]
for name in names:
    claim(name, Path(directory))
    region = os.open(f"{directory}/vllm_offload_{name}.mmap", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(region, 1 << 20)
    mmap.mmap(region, 1 << 20)[:] = b"k" * (1 << 20)
print("mapped", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in real shared memory, of this test alone."""
    path = SHARED_MEMORY / f"prfaas-test-{secrets.token_hex(6)}"
    path.mkdir(mode=0o700)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def engine(folder: Path, *names: str) -> subprocess.Popen[str]:
    """A process that holds regions as an engine does."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(folder), *names], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def region(folder: Path, name: str) -> Path:
    return folder / f"vllm_offload_{name}.mmap"


def test_all_files_of_a_split_region_are_removed(folder: Path) -> None:
    """vLLM 0.33 may split a region."""
    dead, living = engine(folder, "prfaas-e-1"), engine(folder, "prfaas-e-11")
    for name in ("prfaas-e-1", "prfaas-e-11"):
        for part in (1, 2):
            (folder / f"vllm_offload_{name}.mmap.{part}").write_bytes(bytes(4096))
    kill(dead)
    try:
        first = region(folder, "prfaas-e-1")
        assert sorted(remove_abandoned(folder)) == [
            first,
            *(first.with_name(f"{first.name}.{part}") for part in (1, 2)),
        ]
        left = [path.name for path in folder.iterdir()]
        assert len(left) == 4
        assert all("prfaas-e-11." in name for name in left)
    finally:
        kill(living)


def test_what_a_killed_engine_left_is_removed_and_what_lives_is_not(folder: Path) -> None:
    ranks = ["prfaas-e-1_dp0", "prfaas-e-1_dp1"]
    dead, living = engine(folder, *ranks), engine(folder, "prfaas-e-2")
    foreign = region(folder, "somebody-elses")
    foreign.write_bytes(bytes(4096))
    try:
        assert remove_abandoned(folder) == []
        assert abandoned_bytes(folder) == 0
        kill(dead)
        assert abandoned_bytes(folder) == 2 << 20
        assert sorted(remove_abandoned(folder)) == [region(folder, name) for name in ranks]
        assert remove_abandoned(folder) == []
        left = sorted(path.name for path in folder.iterdir())
        assert left == [
            "vllm_offload_prfaas-e-2.mmap",
            "vllm_offload_prfaas-e-2.owner",
            "vllm_offload_somebody-elses.mmap",
        ]
    finally:
        kill(living)
    assert remove_abandoned(folder) == [region(folder, "prfaas-e-2")]
    assert [path.name for path in folder.iterdir()] == [foreign.name]


def test_one_living_rank_of_an_engine_keeps_its_region(folder: Path) -> None:
    """Workers and scheduler of an engine share one region; each of them owns it."""
    scheduler, worker = engine(folder, "prfaas-e-3"), engine(folder, "prfaas-e-3")
    kill(scheduler)
    assert remove_abandoned(folder) == []
    kill(worker)
    assert remove_abandoned(folder) == [region(folder, "prfaas-e-3")]


def test_links_and_files_of_others_are_left_alone(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (folder / "vllm_offload_x.owner").symlink_to(target)
    region(folder, "x").write_text("rows")
    os.mkfifo(folder / "vllm_offload_y.owner.fifo")
    assert remove_abandoned(folder) == []
    assert target.exists()
    with pytest.raises(OSError, match="symbolic"):
        claim("x", folder)


def test_an_owner_file_that_was_swept_away_meanwhile_is_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    swept: list[int] = []
    lock = fcntl.flock

    def swept_once(descriptor: int, operation: int) -> None:
        if not swept and operation == fcntl.LOCK_SH:
            swept.append(descriptor)
            remove_abandoned(folder)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", swept_once)
    held = claim("prfaas-e-4", folder)
    region(folder, "prfaas-e-4").write_bytes(bytes(4096))
    assert swept
    assert remove_abandoned(folder) == []
    os.close(held)
    assert remove_abandoned(folder) == [region(folder, "prfaas-e-4")]


def test_what_a_part_leaves_is_named_with_its_owner_file_and_ranks(folder: Path) -> None:
    name = engine_id("pd-engine", "0a1b2c3d")
    pattern = shared_memory_files("pd-engine", "0a1b2c3d").name
    other = engine_id("pd-engine", "ffffffff")
    files = [f"vllm_offload_{name}{end}" for end in (".mmap", ".owner", "_dp0.mmap", "_dp1.owner")]
    for file in [*files, f"vllm_offload_{other}.mmap"]:
        (folder / file).touch()
    assert sorted(path.name for path in folder.glob(pattern)) == sorted(files)
